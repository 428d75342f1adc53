"""Compressed blobs on their way through a node: unlinked files, of which other processes read what is there already.

A blob is cut into pieces of PIECE bytes, the last one shorter. They come by several trees at once, in order by each, so
what is there without a gap grows as the slowest of them does. Only that much is read, and given to those who ask.
"""

from __future__ import annotations

import errno
import mmap
import os
import select
import struct
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress

PIECE = 256 << 10
_COUNTER = struct.Struct("=Q")  # bytes that are there without a gap
_WORDS = 4096  # bytes of a reason


class Spool:
    """The blobs of an image, by position in its manifest, in files of ``directory``. Raises OSError.

    Blobs that are ``lacking`` are wanted here, the others may go through this node, and ``complete`` are whole already, in
    these files. ``files`` are to be filled instead of files of ``directory``; ``full`` makes a reason and a hint of an
    error in doing so, for nobody can go on without them. All processes that have this object since before a fork(2)
    see the bytes that come.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        lacking: Sequence[int],
        directory: str,
        complete: Mapping[int, int] | None = None,
        *,
        files: Mapping[int, int] | None = None,
        full: Callable[[OSError], tuple[str, str]] | None = None,
    ) -> None:
        self.sizes, self.complete, self.lacking = sizes, complete or {}, lacking
        # A reader sleeps at the event of its blob until there is more of the blob.
        self.events = {blob: os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for blob in lacking}
        self._directory, self._full = directory, full
        self._fds = {**self.complete, **(files or {})}
        self._fds |= {blob: _nameless(directory) for blob in lacking if blob not in self._fds}
        # Of each blob what is there, which the peer says, and up to where the process is that fetches it.
        self._shared = mmap.mmap(-1, 2 * max(len(sizes), 1) * _COUNTER.size)
        self._end = mmap.mmap(-1, 8 + _WORDS)
        self._counts: list[list[int]] = []  # pieces by blob and tree
        self.trees = 0
        self.alive = -1  # a pipe whose other end the peer has
        for blob in self.complete:
            self._put(2 * blob, sizes[blob])

    def plant(self, trees: int) -> None:
        """Say by how many trees pieces come; what is there stays."""
        self.trees = trees
        self._counts = [
            [self._pieces_of(self.there(blob), blob, tree) for tree in range(trees)] for blob in range(len(self.sizes))
        ]

    def count(self, blob: int, tree: int) -> int:
        """How many pieces of a blob have come by a tree."""
        return self._counts[blob][tree]

    def piece(self, blob: int, tree: int, count: int) -> int:
        """The number of the piece of a blob that comes by a tree after ``count`` others."""
        return (tree - blob) % self.trees + count * self.trees  # so that short blobs have trees of their own

    def tree(self, blob: int, piece: int) -> int:
        return (piece + blob) % self.trees

    def length(self, blob: int, piece: int) -> int:
        """Bytes of a piece: 0 beyond the last one."""
        return max(0, min(PIECE, self.sizes[blob] - piece * PIECE))

    @property
    def fds(self) -> Collection[int]:
        return [*self._fds.values(), *self.events.values()]

    def fd(self, blob: int) -> int:
        """The file of a blob. Raises OSError."""
        if blob not in self._fds:  # it goes through this node alone
            self._fds[blob] = _nameless(self._directory)
        return self._fds[blob]

    def write(self, blob: int, data: memoryview, offset: int) -> None:
        """Raises OSError."""
        try:
            while data:
                written = os.pwrite(self.fd(blob), data, offset)
                data, offset = data[written:], offset + written
        except OSError as e:
            if self._full is not None:
                self.give_up(*self._full(e))
            raise

    def wrote(self, blob: int, piece: int) -> None:
        """A piece is in the file; whether it counts, it may have come from elsewhere meanwhile."""
        counts, tree = self._counts[blob], self.tree(blob, piece)
        if piece == self.piece(blob, tree, counts[tree]):
            counts[tree] += 1
            first = min(self.piece(blob, number, count) for number, count in enumerate(counts))
            self._is_there(blob, min(first * PIECE, self.sizes[blob]))

    def fetches(self, blob: int) -> None:
        """A process will begin to fetch a blob from where it ends. Raises OSError."""
        self.fd(blob)
        self._put(2 * blob + 1, self.there(blob))

    def fetched(self, blob: int) -> bool:
        """Take notice of what the process that fetches a blob has written; whether that is all."""
        self._is_there(blob, self._get(2 * blob + 1))
        there = self.there(blob)
        for tree in range(self.trees):
            counts = self._counts[blob]
            counts[tree] = max(counts[tree], self._pieces_of(there, blob, tree))
        return there >= self.sizes[blob]

    def _pieces_of(self, there: int, blob: int, tree: int) -> int:
        """Whole pieces of a tree among the first bytes of a blob."""
        pieces = -(-there // PIECE) if there >= self.sizes[blob] else there // PIECE
        return max(0, -(-(pieces - self.piece(blob, tree, 0)) // self.trees))

    # -- what other processes see

    def there(self, blob: int) -> int:
        """Bytes that are there without a gap."""
        return self._get(2 * blob)

    def all_there(self) -> int:
        """Bytes of all blobs that are there."""
        return sum(self.there(blob) for blob in range(len(self.sizes)))

    def _is_there(self, blob: int, there: int) -> None:
        if there > self.there(blob):
            self._put(2 * blob, there)
            self._wake(blob)

    def _wake(self, blob: int) -> None:
        if blob in self.events:
            os.eventfd_write(self.events[blob], 1)

    def wait(self, blob: int, seconds: float) -> bool:
        """Sleep until there may be more of a blob; whether the peer has ended."""
        poll = select.poll()
        poll.register(self.events[blob], select.POLLIN)
        poll.register(self.alive, select.POLLIN)
        ready = {fd for fd, _ in poll.poll(seconds * 1000)}
        with suppress(BlockingIOError):
            os.eventfd_read(self.events[blob])
        return self.alive in ready

    def _get(self, number: int) -> int:
        return int(_COUNTER.unpack_from(self._shared, number * _COUNTER.size)[0])

    def _put(self, number: int, value: int) -> None:
        _COUNTER.pack_into(self._shared, number * _COUNTER.size, value)

    def append(self, blob: int, data: bytes) -> None:
        """Write what comes next, as the process that fetches. Raises OSError."""
        at = self._get(2 * blob + 1)
        self.write(blob, memoryview(data), at)
        self._put(2 * blob + 1, at + len(data))

    def read(self, blob: int, size: int, at: int) -> bytes:
        return os.pread(self.fd(blob), size, at)

    def give_up(self, reason: str, hint: str) -> None:
        """Say to all who wait that nothing more comes, and why."""
        words = f"{reason}\0{hint}".encode("utf-8", "backslashreplace")[:_WORDS]
        self._end[8 : 8 + len(words)] = words
        self._end[:8] = (len(words) + 1).to_bytes(8, "little")
        for blob in self.events:
            self._wake(blob)

    @property
    def given_up(self) -> tuple[str, str] | None:
        """Why nothing more comes, and the way out."""
        length = int.from_bytes(self._end[:8], "little")
        if not length:
            return None
        reason, _, hint = self._end[8 : 7 + length].decode("utf-8", "replace").partition("\0")
        return reason, hint


def _nameless(directory: str) -> int:
    """A file without a name, open(2) O_TMPFILE; where the file system knows none, one that loses its name at once."""
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as e:
        if e.errno not in (errno.EISDIR, errno.EOPNOTSUPP):
            raise
    fd, path = tempfile.mkstemp(prefix=".swarm-", dir=directory)
    os.unlink(path)
    return fd
