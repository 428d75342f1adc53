"""Run in a container: try to reach the file system beneath its root, and print the /etc/secret that each try sees."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

MS_BIND, MS_MOVE, MS_REC, MNT_DETACH = 0x1000, 0x2000, 0x4000, 2
CLONE_NEWNS, CLONE_NEWUSER = 0x20000, 0x10000000
SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}[os.uname().machine]
libc = ctypes.CDLL(None, use_errno=True)


def enter_namespaces() -> None:
    uid, gid = os.geteuid(), os.getegid()
    if libc.unshare(CLONE_NEWUSER | CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "unshare")
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def unmount() -> None:
    libc.umount2(b"/", MNT_DETACH)


def move() -> None:
    libc.mount(b"/", b"/mnt", None, MS_MOVE, None)


def walk_up() -> None:
    for _ in range(9):
        os.chdir("..")
    os.chroot(".")


def leave_chroot() -> None:
    outside = os.open("/", os.O_RDONLY)
    os.chroot("/mnt")
    os.fchdir(outside)
    walk_up()


def enter_again() -> None:
    space = os.open("/proc/self/ns/mnt", os.O_RDONLY)
    libc.setns(space, CLONE_NEWNS)


def pivot() -> None:
    libc.mount(b"none", b"/mnt", b"tmpfs", 0, None)
    os.mkdir("/mnt/old")
    os.chdir("/mnt")
    libc.syscall(SYS_PIVOT_ROOT, b".", b"old")
    libc.umount2(b"/old", MNT_DETACH)
    libc.umount2(b"/", MNT_DETACH)


def attempt(act: Callable[[], None], *, in_namespaces: bool) -> None:
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    try:
        if in_namespaces:
            enter_namespaces()
        act()
    except OSError:
        pass
    for path in ("/etc/secret", "../etc/secret"):
        try:
            with open(path) as file:
                seen = file.read().strip()
        except OSError:
            seen = "nothing"
        print(f"{act.__name__} sees {seen}", flush=True)
    os._exit(0)


# Run pivot() last: it changes the root of every process in the namespace.
for in_namespaces in (True, False):
    for act in (unmount, move, walk_up, leave_chroot, enter_again, pivot):
        attempt(act, in_namespaces=in_namespaces)
