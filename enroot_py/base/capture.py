"""Capture a program's output and keep only its first and last bytes.

The pipe is read until the program ends, so that the program neither blocks nor gets SIGPIPE. The reader stays open
for processes that the program leaves behind.
"""

from __future__ import annotations

import os
import select

from enroot_py.base import log
from enroot_py.base.fds import Fd

_PIPE_BYTES = 1 << 16  # capacity of a pipe: pipe(7)
_KEPT_BYTES = 1 << 20
SHOWN_BYTES = 1 << 14  # a step shows this much of a hook's output


class Capture:
    """A pipe that keeps the first and the last half megabyte of its data. Processes write to ``writer``."""

    def __init__(self) -> None:
        self.reader, self.writer = map(Fd, os.pipe2(os.O_CLOEXEC))
        self._begin()

    def _begin(self) -> None:
        self._head, self._tail, self._size = bytearray(), bytearray(), 0

    def read(self) -> None:
        """Read the pipe once, without blocking."""
        poll = select.poll()
        poll.register(self.reader, select.POLLIN)
        if not poll.poll(0):
            return
        data = os.read(self.reader, _PIPE_BYTES)
        self._size += len(data)
        room = _KEPT_BYTES // 2 - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        del self._tail[: -_KEPT_BYTES // 2]

    def take(self, limit: int = _KEPT_BYTES) -> str:
        """Return the output since the last call. If it exceeds ``limit`` bytes, cut the middle."""
        output, size = bytes(self._head + self._tail), self._size
        self._begin()
        if size > limit:
            left_out = f"\n[INFO] {size - limit} bytes of output are omitted here\n".encode()
            output = output[: limit // 2] + left_out + output[-(limit // 2) :]
        return os.fsdecode(output)


def wait(child: int, output: Capture) -> int:
    """Read ``output`` until ``child`` ends, and return the child's wait status.

    Does not wait for processes that the child leaves behind, although they may still write.
    """
    with Fd(os.pidfd_open(child)) as process:
        poll = select.poll()
        poll.register(process, select.POLLIN)
        poll.register(output.reader, select.POLLIN)
        ended = False
        while not ended:
            ended = process in {fd for fd, _ in poll.poll()}
            output.read()
    return os.waitpid(child, 0)[1]


_shared: Capture | None = None


def shared() -> Capture:
    """Return the shared pipe of all programs that this process runs before it enters a container."""
    global _shared
    _shared = _shared or Capture()
    return _shared


def left_open() -> int:
    """Close our writing end of the shared pipe. Return the reading end if a leftover process may write, else -1."""
    if _shared is None:
        return -1
    os.close(_shared.writer)
    poll = select.poll()
    poll.register(_shared.reader, 0)
    return -1 if any(event & select.POLLHUP for _, event in poll.poll(0)) else int(_shared.reader)


def show(text: str, *, failed: bool) -> None:
    """Log a hook's output, for Slurm steps, whose stderr is not visible.

    Without ``failed``, log only the lines that begin with [WARN] or [ERROR], as warnings.
    """
    for line in text.splitlines():
        level, bracket, message = line.partition("] ")
        if failed:
            log.error(message if bracket and level in ("[INFO", "[WARN", "[ERROR") else line)
        elif bracket and level in ("[WARN", "[ERROR"):
            log.warn(message)
