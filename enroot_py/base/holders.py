"""Record node, boot and PID of a lock's holder in the lock file, because flock(2) may not reach other nodes."""

from __future__ import annotations

import os

from enroot_py.base import cgroups, linux
from enroot_py.base.frozen import Frozen

MAX_BYTES = 4096  # read limit for a lock file


class Holder(Frozen):
    """The process that a lock file names. ``boot`` is the boot ID of its node, or the beginning of the ID."""

    node: str
    boot: str
    pid: int

    def __str__(self) -> str:
        return f"process {self.pid} on {self.node}"

    @property
    def is_here(self) -> bool:
        """Return whether the process belongs to this node, in this boot or an earlier one."""
        return self.node == os.uname().nodename

    @property
    def is_gone(self) -> bool:
        """Return whether the process has ended. Call this only for a process of this node."""
        return not linux.boot_id().startswith(self.boot) or not os.path.exists(f"/proc/{self.pid}")

    def pause_reason(self) -> str:
        """Return why the process is paused, such as "it is stopped"; "" if it runs, or is of another node or boot."""
        return cgroups.pause_reason(self.pid) if self.is_here and linux.boot_id().startswith(self.boot) else ""

    def dumps(self) -> bytes:
        """Return the content of a lock file."""
        return os.fsencode(f"{self.node} {self.boot} {self.pid}\n")


def this_process() -> Holder:
    return Holder(os.uname().nodename, linux.boot_id(), os.getpid())


def loads(content: bytes) -> Holder | None:
    """Return the holder that a lock file names, or None for an incomplete file."""
    words = os.fsdecode(content).split()
    return Holder(words[0], words[1], int(words[2])) if len(words) == 3 and words[2].isdecimal() else None
