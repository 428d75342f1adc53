"""The progress of a step's nodes on srun's stderr: one rewritten line on a terminal, elsewhere a line every 10 s."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from enroot_py.base import log
from enroot_py.base.progress import bar, columns

if TYPE_CHECKING:
    from enroot_py.features.swarm.messages import Progress

_TERMINAL_INTERVAL_S = 0.2
_LINE_INTERVAL_S = 10.0
_SILENT_S = 1.0  # show nothing before this time: small images need no progress line


class Display:
    """Write progress lines to a descriptor: an image of ``size`` bytes arrives on ``nodes`` nodes.

    ``shows_registry``: each line ends with the number of bytes that came from the registry.
    """

    def __init__(self, descriptor: int, image: str, size: int, nodes: int, *, shows_registry: bool = True) -> None:
        self._descriptor, self._image, self._nodes = descriptor, image, nodes
        self._size = size
        self._shows_registry = shows_registry
        self._is_terminal = log.is_terminal(descriptor)
        self._began = self._shown = time.monotonic()
        self._rewriting = False
        self._ended = False

    def show(self, progress: Callable[[], Progress], *, ended: bool) -> None:
        """Write a line if it is time for one; call this a few times a second. ``ended``: all nodes have the image."""
        now = time.monotonic()
        if self._ended:
            return
        interval = _TERMINAL_INTERVAL_S if self._is_terminal else _LINE_INTERVAL_S
        if ended:
            self._ended = True
            nodes = log.many(self._nodes, "node")
            self._line(f"{log.size(self._size)} on {nodes} in {now - self._began:.1f} s{self._registry(progress())}")
        elif now >= self._shown + interval and now >= self._began + _SILENT_S:
            self._shown = now
            if self._is_terminal:
                self._rewrite(progress(), now - self._began)
            else:
                self._line(self._state(progress()))

    def end(self) -> None:
        """Clear the progress bar on the terminal, if it is the last line."""
        if self._rewriting:
            self._write("\r\x1b[K")

    def _state(self, progress: Progress) -> str:
        missing = self._nodes - progress.joined
        not_begun = f", {log.many(missing, 'node')} not begun" if missing > 0 else ""
        slowest = (
            f", {progress.slowest} has {progress.fraction:.0%} of {log.size(self._size)}" if progress.slowest else ""
        )
        return f"{progress.ready} of {self._nodes} nodes have it{not_begun}{slowest}{self._registry(progress)}"

    def _rewrite(self, progress: Progress, seconds: float) -> None:
        """Rewrite the line with a progress bar of the slowest node."""
        done = int(progress.fraction * self._size) if progress.slowest else 0
        facts = (f"{progress.ready}/{self._nodes} nodes", *filter(None, (progress.slowest,)))
        line = bar(self._image, done, self._size, seconds, columns(self._descriptor), *facts)
        self._rewriting = True
        self._write(f"\r\x1b[K{line}")

    def _line(self, text: str) -> None:
        clear = "\r\x1b[K" if self._rewriting else ""
        self._rewriting = False
        self._write(f"{clear}{log.printable(f'pyxis: {self._image}: {text}')}\n")

    def _write(self, text: str) -> None:
        try:
            poll = select.poll()
            poll.register(self._descriptor, select.POLLOUT)
            if poll.poll(0):  # never block: the nodes would wait
                os.write(self._descriptor, text.encode("utf-8", "replace"))
        except OSError:  # the terminal is gone
            self._ended = True

    def _registry(self, progress: Progress) -> str:
        return f", {log.size(progress.fetched)} from the registry" * self._shows_registry
