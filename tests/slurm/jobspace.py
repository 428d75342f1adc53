"""A stand-in for Slurm 25.11's plugin namespace/linux.

``jobspace.py hold MAP`` makes the namespaces of a job. Run as slurmd's slurmstepd (``slurmd -d``), the script starts a
step's slurmstepd in these namespaces, like slurmd 25.11: namespace_p_join(). MAP is the text that a user_ns_script
would write to uid_map and gid_map, with commas between lines.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PID_FILE = "/run/jobspace"
KINDS = {"user": 0x10000000, "pid": 0x20000000, "mnt": 0x20000}
SLURMSTEPD = "/usr/sbin/slurmstepd"
libc = ctypes.CDLL(None, use_errno=True)


def call(name, *arguments):
    if getattr(libc, name)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), name)


def hold(text):
    """Create the namespaces, and process 1 of the PID namespace. Write the holder's process id to PID_FILE."""
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
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps orphans
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
    with open(PID_FILE, "w") as file:
        print(parent, file=file)


def join(arguments):
    """Run the slurmstepd of a step in the namespaces that hold() has created."""
    with open(PID_FILE) as file:
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
elif sys.argv[1:2] == ["spank"]:  # the epilog of a job, which runs outside of the namespaces
    os.execv(SLURMSTEPD, [SLURMSTEPD, *sys.argv[1:]])
else:
    join(sys.argv[1:])
