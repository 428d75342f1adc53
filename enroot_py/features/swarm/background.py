"""Run work in a forked process.

A step imports this module before its tasks start, even if its image is stored already. So keep its imports few.
"""

from __future__ import annotations

import _signal
import os

from enroot_py.base import linux, log

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


def run_in_background(work: Callable[[], None], *, silent: bool = True) -> int:
    """Run ``work`` in a forked process that ends with its parent. Return the process id. Raises OSError.

    ``silent``: the process writes no log messages.
    """
    parent = os.getpid()
    if process := os.fork():
        return process
    try:
        linux.prctl(linux.PR_SET_PDEATHSIG, _signal.SIGKILL)
        if os.getppid() == parent:
            log.sink = log.silent if silent else log.sink
            work()
    except BaseException as e:  # noqa: BLE001 - the process ends
        log.debug(f"swarm: {type(e).__name__}: {e}")
    finally:
        os._exit(0)
