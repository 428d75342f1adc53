"""A process beside this one. On the start path of a step whose image is stored: it imports what that has."""

from __future__ import annotations

import _signal
import os

from enroot_py.base import linux, log

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


def run_in_background(work: Callable[[], None]) -> None:
    """Let a process of its own do something, which ends with this one and says nothing in its name. Raises OSError."""
    parent = os.getpid()
    if os.fork():
        return
    try:
        linux.prctl(linux.PR_SET_PDEATHSIG, _signal.SIGKILL)
        if os.getppid() == parent:
            log.sink = log.silent
            work()
    except BaseException as e:  # noqa: BLE001 - the end of a process
        log.debug(f"swarm: {type(e).__name__}: {e}")
    finally:
        os._exit(0)
