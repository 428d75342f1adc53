"""Sets of signals, signal(7). On the start path, so it does not use the module signal, which imports enum."""

from __future__ import annotations

import _signal
from _signal import SIG_DFL, SIGPIPE, SIGXFSZ, signal

CATCHABLE = _signal.valid_signals() - {_signal.SIGKILL, _signal.SIGSTOP}
STOPPING = (_signal.SIGTSTP, _signal.SIGTTIN, _signal.SIGTTOU)
# The terminal sends these to the whole foreground process group.
OF_TERMINALS = (*STOPPING, _signal.SIGINT, _signal.SIGQUIT, _signal.SIGWINCH)
# Processes that keep a container running or serve its files ignore these signals, because scancel may signal all
# processes of a step (cgroup.conf, SignalChildrenProcesses). They end only with the step or the container, or after a
# fault of their own, such as SIGSEGV. SIGCHLD is not in this set.
UNHEARD = tuple(CATCHABLE - {_signal.SIGCHLD})


def restore() -> None:
    """Reset the signals that Python ignores, because a program executed by execve(2) would ignore them too."""
    for number in (SIGPIPE, SIGXFSZ):
        signal(number, SIG_DFL)
