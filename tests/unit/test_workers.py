"""Run tasks in forked processes: their outcomes, and signals that arrive at any moment."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from enroot_py.base import workers
from enroot_py.base.errors import ImageError, PenrootError


def fail() -> None:
    raise ImageError("no such thing", hint="look elsewhere")


def test_the_first_failure_ends_the_others() -> None:
    with pytest.raises(ImageError, match="no such thing") as caught:
        workers.run([lambda: time.sleep(600), fail], 2)
    assert caught.value.hint == "look elsewhere"
    with pytest.raises(PenrootError, match="killed by SIGKILL"):
        workers.run([lambda: time.sleep(600), lambda: os.kill(os.getpid(), signal.SIGKILL)], 2)


@pytest.mark.parametrize("error", [OSError(38, "Function not implemented"), ImageError("long " * 50_000)])
def test_any_failure_with_a_message_is_reported(error: Exception) -> None:
    def task() -> None:
        raise error

    with pytest.raises((PenrootError, OSError), match=re.escape(str(error)[:20])):
        workers.run([task], 1)


@pytest.mark.parametrize(("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_that_comes_in_a_destructor_is_not_lost(number: int, raised: type[BaseException]) -> None:
    class Last:
        def __del__(self) -> None:
            os.kill(os.getpid(), number)

    held = [Last()]

    def tick(done: int) -> None:
        held.clear()

    with pytest.raises(raised):
        workers.run([lambda: time.sleep(600)], 1, tick)
    assert not held
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.parametrize("end", [lambda: None, fail])
def test_a_signal_at_the_very_end_is_not_lost(end: Callable[[], None]) -> None:
    def tick(done: int) -> None:
        if done:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises((KeyboardInterrupt, ImageError)):
        workers.run([end], 1, tick)


def test_an_ignored_signal_stays_ignored() -> None:
    script = (
        "import os, signal\nfrom enroot_py.base import workers\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "workers.run([lambda: None], 1, lambda done: os.kill(os.getpid(), signal.SIGINT))\nprint('went on')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout == "went on\n", done.stderr
