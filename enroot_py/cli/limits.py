"""Check settings and limits of the kernel that containers depend on: namespaces, inotify, keys, ptrace."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from enroot_py.cli.findings import Finding
from enroot_py.runtime import pods

_MIN_NAMESPACES = 100
_MIN_KEYS = 200  # the kernel's default: security/keys/key.c
_FILE = "/etc/sysctl.d/80-penroot.conf"


def findings() -> Iterator[Finding]:
    """Check all limits."""
    yield from namespaces()
    yield from inotify()
    yield from keys()
    yield from ptrace()


def sysctl(name: str, root: str = "/proc/sys") -> int | None:
    """Return a setting of the kernel, or None if it does not exist: sysctl(8)."""
    try:
        with open(f"{root}/" + name.replace(".", "/")) as file:
            return int(file.read())
    except (OSError, ValueError):
        return None


def _fix(name: str, value: int) -> str:
    prefix = f"{pods.MACHINE}: " if pods.is_read_only("/proc/sys") else ""
    return f"{prefix}echo {name}={value} >> {_FILE}; sysctl --system"


def namespaces(root: str = "/proc/sys") -> Iterator[Finding]:
    """Check that users can create namespaces: each start creates a user, a mount and a cgroup namespace."""
    for name, verdict, purpose in (
        ("user", "bad", "containers"),
        ("mnt", "bad", "containers"),
        ("cgroup", "bad", "containers"),
        ("pid", "warn", "containers with --pid"),
        ("net", "warn", "containers with --net"),
        ("ipc", "warn", "containers with --ipc"),
        ("uts", "warn", "containers with --uts"),
    ):
        setting = f"user.max_{name}_namespaces"
        value = sysctl(setting, root)
        if value is not None and value < _MIN_NAMESPACES:
            yield Finding(verdict, f"{setting} is {value}: users can start few or no {purpose}", _fix(setting, 15000))
        elif value is not None and verdict == "bad":
            yield Finding("ok", f"{setting} is {value}")
    for setting, wrong, right, verdict in (
        ("kernel.unprivileged_userns_clone", 0, 1, "bad"),
        # Only a warning: an AppArmor profile can exempt the interpreter. doctor.py starts a container to find out.
        ("kernel.apparmor_restrict_unprivileged_userns", 1, 0, "warn"),
    ):
        value = sysctl(setting, root)
        if value == wrong:
            message = f"{setting} is {value}: users cannot create container namespaces"
            yield Finding(verdict, message, _fix(setting, right))
        elif value is not None:
            yield Finding("ok", f"{setting} is {value}")


def inotify(root: str = "/proc/sys") -> Iterator[Finding]:
    """Check that programs in containers can watch files: inotify(7). The limits count all containers of a user.

    The kernel's defaults are at least 128 instances and 8192 watches: fs/notify/inotify/inotify_user.c.
    """
    low = []
    for name, least, right in (("instances", 128, 1024), ("watches", 8192, 524288)):
        setting = f"fs.inotify.max_user_{name}"
        value = sysctl(setting, root)
        if value is None:
            return  # the kernel has no inotify
        if value < least:
            low.append(setting)
            message = f'{setting} is {value}: editors, file watchers and tail -f fail with "No space left on device"'
            yield Finding("warn", message, _fix(setting, right))
    if not low:
        yield Finding("ok", "users can watch files: fs.inotify.max_user_instances and max_user_watches")


def keys(root: str = "/proc") -> Iterator[Finding]:
    """Check that the caller can create keys, as ENROOT_UNSHARE_KEYRING, docker and logins do: keyrings(7)."""
    fix = _fix("kernel.keys.maxkeys", 2000)
    most = sysctl("kernel.keys.maxkeys", f"{root}/sys")
    if most is None:
        return  # the kernel has no keyrings
    if most < _MIN_KEYS:
        yield Finding("warn", f'kernel.keys.maxkeys is {most}: new keyrings fail with "Disk quota exceeded"', fix)
        return
    used, quota = _used_keys(f"{root}/key-users")
    if used * 10 > quota * 9:
        message = f'you have {used} of {quota} keys: new keyrings fail with "Disk quota exceeded"'
        yield Finding("warn", message, f"keyctl show; {fix}")
    else:
        yield Finding("ok", f"kernel.keys.maxkeys is {most}")


def _used_keys(path: str) -> tuple[int, int]:
    """Return the caller's number of keys and its limit: the field ``qnkeys/maxkeys`` of proc_key_users(5)."""
    with contextlib.suppress(OSError, ValueError, IndexError), open(path) as file:
        for fields in (line.replace(":", " ").split() for line in file):
            if fields[0] == str(os.geteuid()):
                used, _, quota = fields[3].partition("/")
                return int(used), int(quota)
    return 0, 0


def ptrace(root: str = "/proc/sys") -> Iterator[Finding]:
    """Check whether Yama lets processes of a user read each other's memory: ptrace(2)."""
    value = sysctl("kernel.yama.ptrace_scope", root)
    if value is None:
        return  # Yama is not enabled
    if value == 0:
        yield Finding("ok", "kernel.yama.ptrace_scope is 0")
        return
    message = "MPI ranks of a node copy messages twice (no CMA), gdb -p and py-spy cannot attach"
    yield Finding("warn", f"kernel.yama.ptrace_scope is {value}: {message}", _fix("kernel.yama.ptrace_scope", 0))
