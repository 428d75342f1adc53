"""Find settings of the machine or the pod that keep users from starting containers.

This module is imported only for ``penroot doctor`` and ``pyxis-py check``, and after a failure. All these print the
same hints.
"""

from __future__ import annotations

import errno
import os

from enroot_py import LIBRARY
from enroot_py.base import filesystems, mountinfo

# The kernel refuses an upperdir on an overlay, where it could not make whiteouts: the kernel's filesystems/overlayfs.
ON_OVERLAY = "is on an overlay file system, such as the root of a pod or a live image"
MACHINE = "on the machine of this pod"

_FILTERED = "2"  # Seccomp in proc_pid_status(5)


def advice(error: OSError, proc: str = "/proc") -> str:
    """Return a hint for refused namespaces or mounts, from the ``error`` and from the settings in ``proc``."""
    node = os.uname().nodename
    # If a container runtime made /proc/sys read-only, root of the pod cannot change it.
    location = f"{MACHINE} ({node})" if is_read_only(f"{proc}/sys") else f"on {node}"
    for path, bad, command in (
        ("user/max_user_namespaces", "0", "sysctl -w user.max_user_namespaces=65536"),
        ("kernel/unprivileged_userns_clone", "0", "sysctl -w kernel.unprivileged_userns_clone=1"),
        (
            "kernel/apparmor_restrict_unprivileged_userns",
            "1",
            f"sed {_apparmor_profile()} > /etc/apparmor.d/penroot && "
            "apparmor_parser --replace /etc/apparmor.d/penroot; "
            "or, for all programs, sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
        ),
    ):
        if _text(f"{proc}/sys/{path}") == bad:
            return f"{location}, as root: {command}"
    if error.errno in (errno.ENOSPC, errno.EUSERS):
        return f"too many namespaces on {node}: see /proc/sys/user/max_*_namespaces and user_namespaces(7)"
    if error.errno == errno.EACCES:
        profile = _profile(proc)
        subject = f"AppArmor's profile {profile}" if profile else "a security module, such as AppArmor or SELinux,"
        return f"{subject} refuses it on {node}: set appArmorProfile: {{type: Unconfined}} in a pod's securityContext"
    if error.errno in (errno.EPERM, errno.ENOSYS) and _status(proc, "Seccomp") == _FILTERED:
        return (
            f"a seccomp filter refuses it on {node}: set seccompProfile: {{type: Unconfined}} in a pod's "
            "securityContext, or use a profile that allows unshare, setns, pivot_root and the calls that mount"
        )
    if error.errno == errno.EPERM:
        return f"not allowed on {node}: a chroot, a container's seccomp filter or a security module forbids it"
    return ""


def too_revealing() -> str:
    """Return a hint if parts of /proc are covered, because the kernel then refuses a new /proc: mount_namespaces(7).

    Returns "" otherwise. A mount on an empty directory of the kernel, such as binfmt_misc, covers nothing.
    """
    covers = ("tmpfs", "devtmpfs", "proc")
    if not any(mount.target.startswith("/proc/") and mount.fstype in covers for mount in mountinfo.read()):
        return ""
    return (
        "parts of /proc are covered here, as in a pod: set privileged: true in its securityContext, or "
        "procMount: Unmasked there and hostUsers: false in its spec"
    )


def is_made() -> bool:
    """Return whether a container runtime has made /dev."""
    return filesystems.kind("/dev") != "devtmpfs"


def without_fuse(instead: str) -> str:
    """Return a hint for a /dev/fuse that cannot be opened. ``instead`` is an alternative without /dev/fuse."""
    if not is_made():
        return f"on {os.uname().nodename} as root: modprobe fuse; chmod 666 /dev/fuse; or: {instead}"
    return f"this pod needs the device /dev/fuse, from a device plugin or with privileged: true; without it: {instead}"


def volume(setting: str) -> str:
    """Return a hint for a ``setting`` whose path is on an overlay, as in a pod or a live image."""
    if not is_made():
        return f"use another file system for {setting}, such as a disk or a tmpfs"
    return f"use a volume of the pod for {setting}, such as an emptyDir"


def is_on_overlay(path: str) -> bool:
    return filesystems.kind(path) == "overlay"


def cgroups_are_read_only(path: str = "/proc/self/mountinfo") -> bool:
    """Return whether the mountinfo file ``path`` has control groups, all mounted read-only."""
    mounts = [mount for mount in mountinfo.read(path) if mount.fstype in ("cgroup", "cgroup2")]
    return bool(mounts) and all("ro" in mount.options for mount in mounts)


def is_read_only(path: str) -> bool:
    try:
        return bool(os.statvfs(path).f_flag & os.ST_RDONLY)
    except OSError:
        return False


def _text(path: str) -> str:
    """Return the content of a file of /proc, or "" if unreadable."""
    try:
        with open(path, errors="replace") as f:
            return f.read().strip("\0\n ")
    except OSError:
        return ""


def _status(proc: str, key: str) -> str:
    fields = (line.partition(":") for line in _text(f"{proc}/self/status").splitlines())
    return next((value.strip() for name, _, value in fields if name == key), "")


def _profile(proc: str) -> str:
    """Return the name of the AppArmor profile that is enforced on this process, or "": apparmor(7)."""
    text = _text(f"{proc}/self/attr/apparmor/current") or _text(f"{proc}/self/attr/current")
    return text.removesuffix(" (enforce)") if text.endswith(" (enforce)") else ""


def _apparmor_profile() -> str:
    """Return the arguments with which sed(1) prints penroot's AppArmor profile for the present path of penroot.

    The profile is below share/ if penroot is installed, below configs/ in a source tree.
    """
    from enroot_py.base import versions  # rarely needed

    prefix = os.path.dirname(os.path.dirname(versions.link()))
    profile = f"{prefix}/share/penroot/apparmor/penroot"
    if not os.path.exists(profile):
        prefix, profile = LIBRARY, f"{LIBRARY}/configs/apparmor/penroot"
    return f"s,@PREFIX@,{prefix}, {profile}"
