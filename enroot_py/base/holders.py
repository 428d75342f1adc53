"""Who holds a lock file: node, boot and process, where flock(2) need not reach the other nodes."""

from __future__ import annotations

import os

from enroot_py.base import cgroups, linux
from enroot_py.base.frozen import Frozen

MAX_BYTES = 4096  # of a lock file that are read


class Holder(Frozen):
    """A process of a node, which a lock file names. ``boot`` is the boot ID of the node, or the beginning of it."""

    node: str
    boot: str
    pid: int

    def __str__(self) -> str:
        return f"process {self.pid} on {self.node}"

    @property
    def is_here(self) -> bool:
        """Whether it is a process of this node, from whatever boot."""
        return self.node == os.uname().nodename

    @property
    def is_gone(self) -> bool:
        """Whether a process of this node has ended, as far as /proc shows it."""
        return not linux.boot_id().startswith(self.boot) or not os.path.exists(f"/proc/{self.pid}")

    def asleep(self) -> str:
        """Why it does nothing for now, if it is a process of this node; else ""."""
        return cgroups.asleep(self.pid) if self.is_here and linux.boot_id().startswith(self.boot) else ""

    def dumps(self) -> bytes:
        """Return the content of a lock file."""
        return os.fsencode(f"{self.node} {self.boot} {self.pid}\n")


def this_process() -> Holder:
    return Holder(os.uname().nodename, linux.boot_id(), os.getpid())


def loads(content: bytes) -> Holder | None:
    """Return the holder that a lock file names; None for a file that is just being written."""
    words = os.fsdecode(content).split()
    return Holder(words[0], words[1], int(words[2])) if len(words) == 3 and words[2].isdecimal() else None
