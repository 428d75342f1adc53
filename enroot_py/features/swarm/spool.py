"""The blobs of an image while they arrive, in files that other processes read meanwhile.

The files have no names, unless the caller passes its own files. A blob is cut into pieces of PIECE bytes; the last
piece may be shorter. The pieces arrive by several trees at once, in order within each tree. Children can get a piece as
soon as it has arrived. A byte is available to readers when all bytes before it have arrived.
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
_COUNTER = struct.Struct("=Q")
_MAX_REASON_BYTES = 4096


class Spool:
    """The blobs of an image, by position in its manifest. Forked processes share the spool, and see the bytes arrive.

    This node lacks the blobs ``lacking`` and may relay the others. ``complete`` has the files of complete blobs.
    ``files`` has files to write blobs to; the other blobs are written to ``directory``. If a write fails, readers
    fail with the reason and the hint that ``explain`` returns. Without ``explain``, readers use another source.

    Raises OSError.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        lacking: Sequence[int],
        directory: str,
        complete: Mapping[int, int] | None = None,
        *,
        files: Mapping[int, int] | None = None,
        explain: Callable[[OSError], tuple[str, str]] | None = None,
    ) -> None:
        self.sizes, self.complete, self.lacking = sizes, complete or {}, lacking
        # A reader sleeps until the event of its blob says that more bytes are available.
        self.events = {blob: os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for blob in lacking}
        self._directory, self._explain = directory, explain
        self._descriptors = {**self.complete, **(files or {})}
        self._descriptors |= {blob: _unnamed_file(directory) for blob in lacking if blob not in self._descriptors}
        self._counters = mmap.mmap(-1, max(len(sizes), 1) * _COUNTER.size)  # available bytes by blob
        self._reason = mmap.mmap(-1, 8 + _MAX_REASON_BYTES)
        self._counts: list[list[int]] = []  # pieces that have arrived, by blob and tree
        self.trees = 0
        self.peer_pipe = -1  # the peer process holds the other end
        for blob in self.complete:
            _COUNTER.pack_into(self._counters, blob * _COUNTER.size, sizes[blob])

    def set_trees(self, trees: int) -> None:
        """Set the number of trees. Available bytes are kept."""
        self.trees = trees
        self._counts = [
            [self._pieces_in(self.available(blob), blob, tree) for tree in range(trees)]
            for blob in range(len(self.sizes))
        ]

    def count(self, blob: int, tree: int) -> int:
        """Return how many pieces of a blob have arrived by a tree."""
        return self._counts[blob][tree]

    def piece(self, blob: int, tree: int, count: int) -> int:
        """Return the number of the next piece of a blob in a tree, if the tree has already carried ``count`` pieces."""
        return (tree - blob) % self.trees + count * self.trees  # short blobs begin in different trees

    def tree(self, blob: int, piece: int) -> int:
        return (piece + blob) % self.trees

    def length(self, blob: int, piece: int) -> int:
        """Return the length of a piece, or 0 after the last piece."""
        return max(0, min(PIECE, self.sizes[blob] - piece * PIECE))

    @property
    def descriptors(self) -> Collection[int]:
        return [*self._descriptors.values(), *self.events.values()]

    def descriptor(self, blob: int) -> int:
        """Return the file of a blob. Raises OSError."""
        if blob not in self._descriptors:  # this node only relays the blob
            self._descriptors[blob] = _unnamed_file(self._directory)
        return self._descriptors[blob]

    def write(self, blob: int, data: memoryview, offset: int) -> None:
        """Write bytes of a blob. Raises OSError."""
        try:
            while data:
                written = os.pwrite(self.descriptor(blob), data, offset)
                data, offset = data[written:], offset + written
        except OSError as e:
            if self._explain is not None:
                self.give_up(*self._explain(e))
            raise

    def piece_written(self, blob: int, piece: int) -> None:
        """Count a piece, unless it has arrived from another source meanwhile."""
        counts, tree = self._counts[blob], self.tree(blob, piece)
        if piece == self.piece(blob, tree, counts[tree]):
            counts[tree] += 1
            first_missing = min(self.piece(blob, number, count) for number, count in enumerate(counts))
            self._set_available(blob, min(first_missing * PIECE, self.sizes[blob]))

    def fetched(self, blob: int, end: int) -> None:
        """Make all bytes before ``end`` available, after a fetching process has written them."""
        self._set_available(blob, end)
        available = self.available(blob)
        for tree in range(self.trees):
            counts = self._counts[blob]
            counts[tree] = max(counts[tree], self._pieces_in(available, blob, tree))

    def _pieces_in(self, available: int, blob: int, tree: int) -> int:
        """Return how many whole pieces of a tree are in the first ``available`` bytes of a blob."""
        pieces = -(-available // PIECE) if available >= self.sizes[blob] else available // PIECE
        return max(0, -(-(pieces - self.piece(blob, tree, 0)) // self.trees))

    # -- state that processes share

    def available(self, blob: int) -> int:
        return int(_COUNTER.unpack_from(self._counters, blob * _COUNTER.size)[0])

    def is_complete(self, blob: int) -> bool:
        return self.available(blob) >= self.sizes[blob]

    def total_available(self) -> int:
        return sum(self.available(blob) for blob in range(len(self.sizes)))

    def _set_available(self, blob: int, available: int) -> None:
        if available > self.available(blob):
            _COUNTER.pack_into(self._counters, blob * _COUNTER.size, available)
            self._wake(blob)

    def _wake(self, blob: int) -> None:
        if blob in self.events:
            os.eventfd_write(self.events[blob], 1)

    def wait(self, blob: int, seconds: float) -> bool:
        """Sleep until a blob may have new bytes, at most ``seconds``. Return True if the peer process has ended."""
        poll = select.poll()
        poll.register(self.events[blob], select.POLLIN)
        poll.register(self.peer_pipe, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(seconds * 1000)}
        with suppress(BlockingIOError):
            os.eventfd_read(self.events[blob])
        return self.peer_pipe in ready

    def read(self, blob: int, size: int, offset: int) -> bytes:
        return os.pread(self.descriptor(blob), size, offset)

    def give_up(self, reason: str, hint: str) -> None:
        """Wake all readers and tell them why no more bytes come."""
        text = f"{reason}\0{hint}".encode("utf-8", "backslashreplace")[:_MAX_REASON_BYTES]
        self._reason[8 : 8 + len(text)] = text
        self._reason[:8] = (len(text) + 1).to_bytes(8, "little")
        for blob in self.events:
            self._wake(blob)

    @property
    def given_up(self) -> tuple[str, str] | None:
        """The reason and the hint of give_up(), or None."""
        length = int.from_bytes(self._reason[:8], "little")
        if not length:
            return None
        reason, _, hint = self._reason[8 : 7 + length].decode("utf-8", "replace").partition("\0")
        return reason, hint


def _unnamed_file(directory: str) -> int:
    """Open a file without a name: open(2), O_TMPFILE. If the file system has no O_TMPFILE, unlink a new file."""
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as e:
        if e.errno not in (errno.EISDIR, errno.EOPNOTSUPP):
            raise
    descriptor, path = tempfile.mkstemp(prefix=".swarm-", dir=directory)
    os.unlink(path)
    return descriptor
