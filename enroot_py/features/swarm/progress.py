"""How far the nodes of a step are with an image, on srun's stderr: a line that is rewritten, or one now and then."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from enroot_py.base import log

if TYPE_CHECKING:
    from enroot_py.features.swarm.messages import Progress

_OFTEN = 0.2  # seconds between two states of a line on a terminal
_NOW_AND_THEN = 10.0  # seconds between two lines elsewhere
_SOON = 1.0  # seconds for which nothing is shown: most images are small


class Display:
    """Lines on a descriptor about an image of ``size`` bytes for so many ``nodes``.

    They tell what came from the registry, if that ``counts``.
    """

    def __init__(self, fd: int, image: str, size: int, nodes: int, *, counts: bool = True) -> None:
        self._fd, self._image, self._nodes = fd, image, nodes
        self._size = log.size(size)
        self._counts = counts
        self._is_terminal = os.isatty(fd)
        self._began = self._shown = time.monotonic()
        self._rewriting = False
        self._ended = False

    def show(self, progress: Callable[[], Progress], *, ended: bool) -> None:
        """To be called some times in a second; the last line is the one by which all nodes have it."""
        now = time.monotonic()
        if self._ended:
            return
        if ended:
            self._ended = True
            many = log.many(self._nodes, "node")
            self._line(f"{self._size} on {many} in {now - self._began:.1f} s{self._cost(progress())}")
        elif now >= self._shown + (_OFTEN if self._is_terminal else _NOW_AND_THEN) and now >= self._began + _SOON:
            self._shown = now
            self._line(self._state(progress()), stays=not self._is_terminal)

    def end(self) -> None:
        """Clear a line that was to be rewritten."""
        if self._rewriting:
            self._write("\r\x1b[K")

    def _state(self, progress: Progress) -> str:
        missing = f", {log.many(self._nodes - progress.joined, 'node')} not begun" if progress.joined < self._nodes else ""
        slowest = f", {progress.slowest} has {progress.fraction:.0%} of {self._size}" if progress.slowest else ""
        return f"{progress.ready} of {self._nodes} nodes have it{missing}{slowest}{self._cost(progress)}"

    def _line(self, text: str, *, stays: bool = True) -> None:
        text = log.printable(f"pyxis: {self._image}: {text}")
        if self._is_terminal:
            clear = "\r\x1b[K" if self._rewriting or not stays else ""
            text = clear + (text if stays else text[: self._columns() - 1])
        self._rewriting = self._is_terminal and not stays
        self._write(text + ("\n" if stays else ""))

    def _columns(self) -> int:
        try:
            return os.get_terminal_size(self._fd).columns or 80
        except OSError:  # it is gone
            return 80

    def _write(self, text: str) -> None:
        try:
            poll = select.poll()
            poll.register(self._fd, select.POLLOUT)
            if poll.poll(0):  # else nobody reads it now, and the nodes must not wait
                os.write(self._fd, text.encode("utf-8", "replace"))
        except OSError:  # a terminal that is gone
            self._ended = True

    def _cost(self, progress: Progress) -> str:
        return f", {log.size(progress.fetched)} from the registry" * self._counts
