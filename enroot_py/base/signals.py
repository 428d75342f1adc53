"""Sets of signals, signal(7). On the start path: not the module signal, which imports enum."""

from __future__ import annotations

from _signal import SIG_DFL, SIGHUP, SIGINT, SIGPIPE, SIGQUIT, SIGTERM, SIGTSTP, SIGUSR1, SIGUSR2, SIGXFSZ, signal

ENDING = (SIGHUP, SIGINT, SIGQUIT, SIGTERM)  # people, terminals and Slurm end a program by these
FOR_PROGRAMS = (*ENDING, SIGUSR1, SIGUSR2)  # sent to every process of a step, these are for its programs
UNHEARD = (*FOR_PROGRAMS, SIGPIPE, SIGTSTP)  # by what serves files to a container, which ends with that alone


def restore() -> None:
    """Stop ignoring what Python ignores: it would stay so in the program that this process becomes."""
    for number in (SIGPIPE, SIGXFSZ):
        signal(number, SIG_DFL)
