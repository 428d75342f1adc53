"""Sets of signals, signal(7). On the start path: not the module signal, which imports enum."""

from __future__ import annotations

import _signal
from _signal import SIG_DFL, SIGPIPE, SIGXFSZ, signal

CATCHABLE = _signal.valid_signals() - {_signal.SIGKILL, _signal.SIGSTOP}
STOPPING = (_signal.SIGTSTP, _signal.SIGTTIN, _signal.SIGTTOU)
# The terminal sends these to the whole process group in its foreground.
OF_TERMINALS = (*STOPPING, _signal.SIGINT, _signal.SIGQUIT, _signal.SIGWINCH)
# By what holds a container or serves its files. It ends with the step or with the container alone: scancel may send any
# signal to all processes of a step (SignalChildrenProcesses of cgroup.conf), which is for its programs. A fault of its
# own ends it all the same, and whoever has children hears of them.
UNHEARD = tuple(CATCHABLE - {_signal.SIGCHLD})


def restore() -> None:
    """Stop ignoring what Python ignores: it would stay so in the program that this process becomes."""
    for number in (SIGPIPE, SIGXFSZ):
        signal(number, SIG_DFL)
