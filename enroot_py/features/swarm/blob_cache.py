"""Compressed blobs that a node keeps after unpacking them, to upload them to nodes of later steps."""

from __future__ import annotations

import contextlib
import os
import time

from enroot_py.base import digests, log, making, trusted


class BlobCache:
    """Files in ``directory``, each named by its digest. Above ``max_bytes`` in all, the oldest files are deleted.

    open() ignores files older than the last boot: a crash may have truncated them.
    """

    def __init__(self, directory: str, max_bytes: int) -> None:
        self.directory, self._max_bytes = directory, max_bytes

    def open(self, digest: str, size: int) -> int | None:
        """Open the file of a blob for reading. Return None if there is none."""
        if not self._max_bytes:
            return None
        try:
            descriptor = trusted.file(self._path(digest))
        except OSError:
            return None
        status = os.fstat(descriptor)
        booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        if status.st_size == size and status.st_mtime >= booted:
            return descriptor
        os.close(descriptor)
        return None

    def add(self, digest: str, descriptor: int) -> None:
        """Link an unnamed file into the directory. The bytes of the file must have this digest."""
        if os.fstat(descriptor).st_size > self._max_bytes:
            return
        try:
            with contextlib.suppress(FileExistsError):
                making.link(descriptor, self._path(digest))
            self._trim()
        except OSError as e:
            log.debug(f"swarm: {self.directory}: {e.strerror}")

    def _trim(self) -> None:
        with os.scandir(self.directory) as entries:
            files = [(status.st_mtime, status.st_size, entry.path) for entry in entries for status in [entry.stat()]]
        room = self._max_bytes
        for _, size, path in sorted(files, reverse=True):
            room -= size
            if room < 0:
                with contextlib.suppress(FileNotFoundError):  # another step's helper has deleted it
                    os.unlink(path)

    def _path(self, digest: str) -> str:
        return f"{self.directory}/{digests.encoded(digest)}"
