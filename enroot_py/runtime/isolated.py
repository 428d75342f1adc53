"""What a container with namespaces of its own needs besides them: a loopback, a /dev.

Not on the start path of a container without.
"""

from __future__ import annotations

import os

from enroot_py.base import linux, log, paths
from enroot_py.runtime import mounts
from enroot_py.runtime.mounts import Mount

# As enroot's containers have it. What no single device needs stays outside.
_DEV = """\
none            /dev            none    x-detach,nofail,silent
tmpfs           /dev            tmpfs   x-create=dir,rw,nosuid,noexec,mode=755,slave
/dev/zero       /dev/zero       none    x-create=file,bind,rw,nosuid,noexec,private
/dev/null       /dev/null       none    x-create=file,bind,rw,nosuid,noexec,private
/dev/full       /dev/full       none    x-create=file,bind,rw,nosuid,noexec,private
/dev/urandom    /dev/urandom    none    x-create=file,bind,rw,nosuid,noexec,private
/dev/random     /dev/random     none    x-create=file,bind,rw,nosuid,noexec,private
/dev/tty        /dev/tty        none    x-create=file,bind,rw,nosuid,noexec,private
devpts          /dev/pts        devpts  x-create=dir,rw,nosuid,noexec,newinstance,ptmxmode=0666,mode=620,slave
/dev/hugepages  /dev/hugepages  none    x-create=dir,bind,rw,nosuid,noexec,nodev,rslave,nofail,silent
/dev/log        /dev/log        none    x-create=file,bind,rw,nosuid,noexec,nodev,private,nofail,silent
"""
_OWN_IPC = """\
tmpfs           /dev/shm        tmpfs   x-create=dir,rw,nosuid,noexec,nodev,mode=1777,private
mqueue          /dev/mqueue     mqueue  x-create=dir,rw,nosuid,noexec,nodev,private,nofail,silent
"""
_HOST_IPC = """\
/dev/shm        /dev/shm        none    x-create=dir,bind,rw,nosuid,noexec,nodev,rslave,nofail
/dev/mqueue     /dev/mqueue     none    x-create=dir,bind,rw,nosuid,noexec,nodev,rslave,nofail,silent
"""
_LINKS = {
    "fd": "/proc/self/fd",
    "ptmx": "pts/ptmx",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
}
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 0x1  # netdevice(7)


def mounts_of(namespaces: int, system: list[Mount]) -> list[Mount]:
    """The mounts of the system, with the file systems that show these ``namespaces`` in place of the host's."""
    for flag, fstype, target, mode, option in (
        (linux.CLONE_NEWPID, "proc", "/proc", "rw", "--pid"),
        (linux.CLONE_NEWNET, "sysfs", "/sys", "ro", "--net"),
    ):
        if namespaces & flag and not (fstype == "sysfs" and _is_revealing(option)):
            system = [mount for mount in system if not mount.source == mount.target == target]
            options = f"x-create=dir,{mode},nosuid,nodev,noexec,private"
            system.append(Mount(fstype, target, fstype, options, -1, option))
    return system


def _is_revealing(option: str) -> bool:
    """Whether the kernel refuses a new /sys, as parts of the one here are covered, in a pod: mount_namespaces(7).

    Then that of the pod stays, read-only: it shows the names of network devices, and gives none of them.
    """
    try:
        with mounts.mount_filesystem("sysfs", "sysfs", [], linux.MOUNT_ATTR_RDONLY):
            return False
    except PermissionError:
        log.warn(f"{option}: /sys shows the network devices of {os.uname().nodename}: parts of it are covered here")
        return True


def complete(root: int, namespaces: int) -> None:
    """Furnish the new ``namespaces``, flags of unshare(2), of a container whose system mounts are done.

    Raises MountError, OSError.
    """
    if namespaces & linux.CLONE_NEWNET:
        raise_loopback()
    if namespaces & linux.CLONE_NEWIPC:
        make_dev(root, own_ipc=True)


def make_dev(root: int, *, own_ipc: bool) -> None:
    """Replace /dev of the host by one with the devices that every program expects. Raises MountError, OSError."""
    for mount in mounts.parse_file(_DEV + (_OWN_IPC if own_ipc else _HOST_IPC), {}, "/dev of its own"):
        mount.execute(root)
    if os.isatty(0):
        terminal = os.readlink("/proc/self/fd/0")
        options = "x-create=file,bind,rw,nosuid,noexec,private"
        Mount(terminal, "/dev/console", "none", options, -1, "/dev of its own").execute(root)
    with paths.open_in(root, "/dev") as dev:
        for name, target in _LINKS.items():
            os.symlink(target, name, dir_fd=dev)


def raise_loopback() -> None:
    """``ip link set lo up`` in the network namespace of this process. Raises OSError."""
    import fcntl
    import socket
    import struct

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as s:
        fcntl.ioctl(s, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))
