"""Stands for Slurm 25.11's namespace/linux: ``jobspace.py hold MAP`` makes the namespaces of a job, and as slurmd's
slurmstepd (``slurmd -d``) this starts the one of a step in them, as slurmd of 25.11 does: namespace_p_join().

MAP is what a user_ns_script would write to uid_map and gid_map, commas between lines.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PLACE = "/run/jobspace"
KINDS = {"user": 0x10000000, "pid": 0x20000000, "mnt": 0x20000}
SLURMSTEPD = "/usr/sbin/slurmstepd"
libc = ctypes.CDLL(None, use_errno=True)


def call(name, *arguments):
    if getattr(libc, name)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), name)


def hold(text):
    """Make the namespaces, and the first process of the PID namespace. The process that is waited for goes to PLACE."""
    made, go = os.pipe(), os.pipe()
    parent = os.fork()
    if parent == 0:
        os.setsid()
        call("unshare", sum(KINDS.values()))
        os.write(made[1], b"1")
        os.read(go[0], 1)
        if os.fork() == 0:
            call("mount", b"none", b"/", None, 0x4000 | 0x40000, None)  # MS_REC | MS_PRIVATE
            call("mount", b"proc", b"/proc", b"proc", 0, None)
            call("mount", b"none", b"/tmp", b"tmpfs", 0, b"mode=1777")
            os.write(made[1], b"2")
            os.closerange(0, 64)
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # orphans are collected by the kernel
            while True:
                signal.pause()
        os.closerange(0, 64)
        os.wait()
        os._exit(0)
    os.read(made[0], 1)
    for name in ("uid_map", "gid_map"):
        with open(f"/proc/{parent}/{name}", "w") as file:
            file.write(text.replace(",", "\n"))
    os.write(go[1], b"1")
    os.read(made[0], 1)
    with open(PLACE, "w") as file:
        print(parent, file=file)


def join(arguments):
    """Be the slurmstepd of a step in these namespaces."""
    with open(PLACE) as file:
        process = file.read().strip()
    spaces = [os.open(f"/proc/{process}/ns/{name}", os.O_RDONLY) for name in ("user", "pid_for_children", "mnt")]
    for space in spaces:
        call("setns", space, 0)
        os.close(space)
    if os.fork() == 0:
        os.execv(SLURMSTEPD, [SLURMSTEPD, *arguments])
    os._exit(0)


if sys.argv[1:2] == ["hold"]:
    hold(sys.argv[2])
elif sys.argv[1:2] == ["spank"]:  # the epilog of a job
    os.execv(SLURMSTEPD, [SLURMSTEPD, *sys.argv[1:]])
else:
    join(sys.argv[1:])
