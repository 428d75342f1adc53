"""Compressed blobs that a node keeps when it has unpacked them, to give them to nodes of later steps."""

from __future__ import annotations

import contextlib
import os
import time

from enroot_py.base import digests, log, making, trusted


class BlobCache:
    """Blobs in files of ``directory``, named by their digests: ``most`` bytes, of which the oldest go first.

    None of before the node was booted is used, as it may not have been on the disk yet when power went.
    """

    def __init__(self, directory: str, most: int) -> None:
        self.directory, self._most = directory, most

    def open(self, digest: str, size: int) -> int | None:
        """The file of a blob, for reading; None where it is not kept."""
        if not self._most:
            return None
        try:
            fd = trusted.file(self._path(digest))
        except OSError:
            return None
        state = os.fstat(fd)
        booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        if state.st_size == size and state.st_mtime >= booted:
            return fd
        os.close(fd)
        return None

    def add(self, digest: str, fd: int) -> None:
        """Give a file that has no name yet, and whose bytes have this digest, one here."""
        if os.fstat(fd).st_size > self._most:
            return
        try:
            with contextlib.suppress(FileExistsError):
                making.link(fd, self._path(digest))
            self._trim()
        except OSError as e:
            log.debug(f"swarm: {self.directory}: {e.strerror}")

    def _trim(self) -> None:
        with os.scandir(self.directory) as entries:
            files = [(state.st_mtime, state.st_size, entry.path) for entry in entries for state in [entry.stat()]]
        room = self._most
        for _, size, path in sorted(files, reverse=True):
            room -= size
            if room < 0:
                with contextlib.suppress(FileNotFoundError):  # another step's helper was faster
                    os.unlink(path)

    def _path(self, digest: str) -> str:
        return f"{self.directory}/{digests.encoded(digest)}"
