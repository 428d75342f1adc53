"""Known failures of other software: the tests, the error text, and where the cause is documented."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Known:
    """``where``, ``test`` and ``says`` are patterns for "RELEASE SLURM", the test's name and the failure's text.

    A Slurm built from source is called "RELEASE VERSION of DIRECTORY".
    """

    where: str
    test: str
    says: str
    why: str
    source: str

    def names(self, where: str, test: str) -> bool:
        return bool(re.match(self.where, where) and re.search(self.test, test))

    def covers(self, where: str, test: str, text: str) -> bool:
        return self.names(where, test) and bool(re.search(self.says, text))


KNOWN: tuple[Known, ...] = (
    Known(
        where="[a-z]+-arm64 [0-9.]+$",
        test="tests/(unit|kernel)/",
        says="cannot create a user namespace: Invalid argument",
        why="qemu-user has two threads",
        source="https://man7.org/linux/man-pages/man2/unshare.2.html#ERRORS",
    ),
    Known(
        where="[a-z]+-arm64 [0-9.]+$",
        test="tests/unit/test_submit.py",
        says="as_child_of",
        why="the command line of an emulated parent begins with the emulator",
        source="https://docs.kernel.org/admin-guide/binfmt-misc.html",
    ),
    Known(
        where="[a-z]+-arm64 [0-9.]+$",
        test="test_processor_time_of_ended_children",
        says=r"assert \(0.0 - 0.0\) > 0.0",
        why="qemu-user writes /proc/self/stat with zeros",
        source="https://gitlab.com/qemu-project/qemu/-/blob/v10.0.0/linux-user/syscall.c",
    ),
    Known(
        where="forky 26[.0-9]*$",
        test="tests/slurm/",
        says="this Slurm has no mpi/pmix",
        why="Debian builds Slurm without PMIx",
        source="https://bugs.debian.org/1149781",
    ),
)
