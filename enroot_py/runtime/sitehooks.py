"""Run Python hooks of a site or a user in this process. Turn their os._exit() and os.exec*() into errors.

In a step, capture their stderr, and keep only a bounded part of it. This module is imported only if there are such
hooks.
"""

from __future__ import annotations

import _thread
import os
import select
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

from enroot_py.base import capture, log
from enroot_py.base.errors import HookError

T = TypeVar("T")

_TICK_S = 0.0005
_THREAD_END_TIMEOUT_S = 1
# With these functions, a hook could end the start before the program runs, and the caller would see success.
_ENDING = ("_exit", "execv", "execve")


def call(function: Callable[..., T], *arguments: object) -> T:
    """Call a function of a hook. Raises SystemExit if it calls sys.exit(), os._exit() or os.exec*() in this process.

    In a child that the hook forked, os._exit() and os.exec*() work as usual. In a step, nobody sees stderr, so the
    hook's stderr is logged: all lines if the hook fails, else only warnings and errors. At most capture.SHOWN_BYTES
    are logged.
    """
    originals = {name: getattr(os, name) for name in _ENDING}
    try:
        for name, original in originals.items():
            setattr(os, name, _guarded(name, original))
        return _captured(function, *arguments) if log.captured() else function(*arguments)
    finally:
        for name, original in originals.items():
            setattr(os, name, original)


def _guarded(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement for a function of os: it works in forked children, and raises SystemExit in this process."""
    process = os.getpid()

    def end(*arguments: object) -> Any:
        if os.getpid() != process:
            return original(*arguments)
        raise SystemExit(f"os.{name}() would end penroot: return from the hook instead")

    return end


def _captured(function: Callable[..., T], *arguments: object) -> T:
    output, failed = capture.shared(), True
    try:
        with _Redirected(output):
            result = function(*arguments)
        failed = False
        return result
    finally:
        capture.show(output.take(capture.SHOWN_BYTES), failed=failed)


class _Redirected:
    """Redirect stderr to a pipe within the ``with`` block. A thread reads the pipe, so no writer blocks."""

    def __init__(self, output: capture.Capture) -> None:
        self._output = output

    def __enter__(self) -> None:
        self._stderr = os.dup(2)
        self._end, self._wake = os.pipe2(os.O_CLOEXEC)
        os.dup2(self._output.writer, 2)
        _thread.start_new_thread(self._read, ())

    def _read(self) -> None:
        poll = select.poll()
        poll.register(self._end, select.POLLIN)
        poll.register(self._output.reader, select.POLLIN)
        try:
            while self._end not in {fd for fd, _ in poll.poll()}:
                self._output.read()
            self._output.read()
        finally:
            os.dup2(self._stderr, 2)  # no thread reads the pipe any more, so a writer could block

    def __exit__(self, failure: object, *_: object) -> None:
        sys.stderr.flush()
        os.dup2(self._stderr, 2)
        # Wake the thread: it reads no end of file, because this process and the hook's children keep the pipe open.
        os.write(self._wake, b".")
        # A process with two threads cannot enter a user namespace: unshare(2).
        deadline = time.monotonic() + _THREAD_END_TIMEOUT_S
        while (count := len(os.listdir("/proc/self/task"))) > 1 and time.monotonic() < deadline:
            time.sleep(_TICK_S)
        for fd in (self._stderr, self._end, self._wake):
            os.close(fd)
        if count > 1 and not failure:
            raise HookError("the hook leaves a thread running", hint="join the thread before run() returns")
