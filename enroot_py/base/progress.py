"""Show the progress of an import: on a terminal in one changing line, elsewhere in a new line every few seconds."""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Callable

from enroot_py.base import log

_INTERVAL_S = 5.0  # between lines if stderr is not a terminal
_COUNT = struct.Struct("=Q")
_NAME_CHARS, _BAR_CHARS, _MIN_BAR_CHARS = 32, 40, 5


def columns(descriptor: int) -> int:
    """Return the width of a terminal, or 80."""
    try:
        return os.get_terminal_size(descriptor).columns or 80
    except OSError:  # the terminal is gone
        return 80


def bar(label: str, done: int, total: int, seconds: float, width: int, *facts: str) -> str:
    """Return a line that fits ``width``: image name without registry, bytes, rate, time left, facts, and a bar."""
    rate = done / max(seconds, 0.001)
    words = [
        label.rpartition("/")[2][-_NAME_CHARS:],
        f"{done / 1e6:.0f}/{total / 1e6:.0f} MB",
        f"{rate / 1e6:.0f} MB/s",
    ]
    if rate > 0 and seconds > 1:
        words.append(f"{max(total - done, 0) / rate:.0f} s left")
    line = log.printable("  ".join((*words, *facts)))
    room = min(width - len(line) - 5, _BAR_CHARS)
    if room >= _MIN_BAR_CHARS:
        filled = min(done * room // max(total, 1), room)
        line += f"  [{'#' * filled}{' ' * (room - filled)}]"
    return line[: width - 1]


class Progress:
    """Add up how many bytes, out of ``total``, several processes have read. Each process counts the bytes of one part.

    Create this before forking the processes, because the counts are in shared memory. tick() calls ``go_on`` if a
    process has read data since the previous tick().
    """

    def __init__(self, label: str, parts: int, total: int, go_on: Callable[[], None]) -> None:
        self._what = label
        self._parts = parts
        self._total = total
        self._counts = mmap.mmap(-1, _COUNT.size * max(1, parts))
        self._began = self._shown = time.monotonic()
        self._done = 0  # parts
        self._go_on = go_on
        self._seen = 0  # bytes
        if log.on_terminal():
            self.tick(0)  # before the fork, so that log lines of the forked processes clear the progress line

    def part(self, number: int) -> Callable[[int], None]:
        """Return a function that sets how many bytes of part ``number`` have been read. Any process can call it."""

        def count(size: int) -> None:
            _COUNT.pack_into(self._counts, number * _COUNT.size, size)

        return count

    def tick(self, done: int) -> None:
        """Show the progress if it is due. ``done`` parts are complete."""
        self._done = done
        if (read := self._read()) != self._seen:
            self._seen = read
            self._go_on()
        now = time.monotonic()
        if log.on_terminal():
            log.rewrite(bar(self._what, read, self._total, now - self._began, columns(2)))
        elif now - self._shown >= _INTERVAL_S:
            self._shown = now
            log.info(self._text(now))

    def end(self) -> None:
        """Clear the line that was rewritten."""
        if log.on_terminal():
            log.rewrite("")

    def _read(self) -> int:
        return sum(_COUNT.unpack_from(self._counts, n * _COUNT.size)[0] for n in range(self._parts))

    def _text(self, now: float) -> str:
        got = self._read()
        rate = got / max(now - self._began, 0.001)
        left = f", {(self._total - got) / rate:.0f} s left" if rate > 0 and now - self._began > 1 else ""
        return (
            f"{self._what}: {self._done} of {log.many(self._parts, 'layer')}, "
            f"{got / 1e6:.0f} of {self._total / 1e6:.0f} MB, {rate / 1e6:.0f} MB/s{left}"
        )
