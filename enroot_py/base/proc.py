"""Read state and children of a process: proc_pid_stat(5), proc_tid_children(5)."""

from __future__ import annotations

import os

from enroot_py.base.fds import Fd


class Stat:
    """State, parent, session, start time and CPU time of a process. ``comm`` is the name of its program."""

    __slots__ = ("comm", "_fields")

    def __init__(self, pid: int) -> None:
        """Read /proc/PID/stat. Raises OSError if the process has ended."""
        with Fd(os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)) as fd:
            before, _, after = os.fsdecode(fd.content()).rpartition(")")
        self.comm = before.partition("(")[2]
        self._fields = after.split()

    @property
    def state(self) -> str:
        """Return one letter, such as R, S or Z. T means stopped by a signal, t by a debugger."""
        return self._fields[0]

    @property
    def is_stopped(self) -> bool:
        return self.state in "Tt"

    @property
    def parent(self) -> int:
        return int(self._fields[1])

    @property
    def session(self) -> int:
        """Return the session: the PID of the process that called setsid(2)."""
        return int(self._fields[3])

    @property
    def started(self) -> int:
        """Return the start time in clock ticks after boot. PID and start time identify a process."""
        return int(self._fields[19])

    def processor_s(self, *, with_children: bool = False) -> float:
        """Return the CPU seconds of the process. ``with_children`` adds the CPU seconds of its ended children."""
        return sum(map(int, self._fields[11 : 15 if with_children else 13])) / os.sysconf("SC_CLK_TCK")


def look(pid: int) -> Stat | None:
    """Return the Stat of a process, or None if the process has ended."""
    try:
        return Stat(pid)
    except OSError:
        return None


def children(pid: int) -> list[int]:
    """Return the children of the first thread of a process, or [] if the process has ended.

    A child may be missing while another one ends.
    """
    try:
        with Fd(os.open(f"/proc/{pid}/task/{pid}/children", os.O_RDONLY | os.O_CLOEXEC)) as fd:
            return [int(child) for child in fd.content().split()]
    except OSError:
        return []
