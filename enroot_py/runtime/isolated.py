"""Create private namespaces for a container (``own``), and set up their loopback device and /dev.

Only a start with private namespaces or a private /dev needs this module.
"""

from __future__ import annotations

import errno
import os

from enroot_py.base import linux, log, paths
from enroot_py.base.errors import NamespaceError
from enroot_py.base.fds import Fd
from enroot_py.runtime import fstab, mounting, namespaces, supervise
from enroot_py.runtime.mounting import Mount

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

_OWNED = {linux.CLONE_NEWNET: "net", linux.CLONE_NEWIPC: "ipc", linux.CLONE_NEWUTS: "uts"}

# The same devices as in enroot's containers, and no others.
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


def enter(
    uid: int,
    gid: int,
    own: int,
    *,
    superuser: bool,
    nested: bool = False,
    forked: Callable[[int], object] | None = None,
    beside: Callable[[], int] = lambda: 0,
) -> int:
    """Enter a user namespace (unless ``superuser``), a mount namespace, and the private namespaces ``own``.

    With ``nested``, the program will run in a second user namespace, so that it cannot undo the mounts (see
    namespaces.nest()). The network, IPC and UTS namespaces then belong to that user namespace, and the program is root
    in them. The PID namespace belongs to the first user namespace: process 1 of the PID namespace mounts /proc there,
    so that the program cannot unmount /proc.

    ``forked`` is called on both sides of the fork that makes process 1 of a PID namespace (see enter.Start). ``beside``
    is called after this process has entered the PID namespace and before it enters the other namespaces. So processes
    that ``beside`` starts end with the container. ``beside`` returns the namespaces that belong to the first user
    namespace even if the container is ``nested``. Returns a descriptor of the second user namespace if it exists
    already, else -1. Raises NamespaceError.
    """
    if not superuser:
        namespaces.enter_user(uid, gid)
    if own & linux.CLONE_NEWPID:
        _become_first(forked)
    owned = own & ~linux.CLONE_NEWPID
    outer = owned & (beside() if nested else beside() | owned)
    namespaces.unshare_mounts(outer, superuser=superuser)
    return _enter_owned(owned & ~outer) if nested and owned & ~outer else -1


def _enter_owned(flags: int) -> int:
    """Create a user namespace, and the namespaces ``flags`` that belong to it. Enter only the namespaces ``flags``.

    Returns a descriptor of the user namespace.

    A child creates them: a process that has entered a user namespace cannot return to the parent namespace, whose
    capabilities the mounts need. Raises NamespaceError.
    """
    (ready, created), (done, release) = os.pipe(), os.pipe()
    with Fd(ready), Fd(release):
        with Fd(created), Fd(done):
            child = os.fork()
            if child == 0:
                os.close(release)  # so that read(2) in the child ends with the parent
                _create_owned(flags, created, done)
        pid = os.read(ready, 32)
        try:
            if not pid:
                _, status = os.waitpid(child, 0)
                number = os.waitstatus_to_exitcode(status)
                error = OSError(number, os.strerror(number))
                hint = namespaces.advice(error)
                raise NamespaceError(f"cannot create namespaces: {error.strerror}", hint=hint) from error
            directory = f"/proc/{pid.decode()}/ns"
            for flag, name in _OWNED.items():
                if flags & flag:
                    with Fd(os.open(f"{directory}/{name}", os.O_RDONLY | os.O_CLOEXEC)) as space:
                        linux.setns(space, flag)
            user = os.open(f"{directory}/user", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as e:
            raise NamespaceError(f"cannot enter namespaces: {e.strerror}") from e
    os.waitpid(child, 0)
    return user


def _create_owned(flags: int, created: int, done: int) -> NoReturn:
    """In the child: create the namespaces, send the parent this process's PID (as in the host's /proc), and wait."""
    status = errno.EPERM
    try:
        namespaces.enter_user(0, 0)
        namespaces.unshare(flags)
        os.write(created, os.readlink("/proc/self").encode())
        os.read(done, 1)
        status = 0
    except NamespaceError as e:
        if isinstance(e.__cause__, OSError):
            status = e.__cause__.errno or status
    finally:
        os._exit(status)


def _become_first(forked: Callable[[int], object] | None) -> None:
    """Continue as process 1 of a new PID namespace. The parent stays outside, waits, and never returns."""
    namespaces.unshare(linux.CLONE_NEWPID)
    if forked:
        forked(os.fork())
        return
    child = supervise.fork()
    if child:
        namespaces.hide()
        status = supervise.wait(child)
        if module := namespaces.servers():
            module.report_killed()
        os._exit(status)


def mounts_of(own: int, system: list[Mount]) -> list[Mount]:
    """Return the system mounts, with a new /proc or /sys for the private namespaces ``own``."""
    for flag, fstype, target, mode, option in (
        (linux.CLONE_NEWPID, "proc", "/proc", "rw", "--pid"),
        (linux.CLONE_NEWNET, "sysfs", "/sys", "ro", "--net"),
    ):
        if own & flag and not (fstype == "sysfs" and _is_sysfs_refused(option)):
            system = [mount for mount in system if not mount.source == mount.target == target]
            options = ("x-create=dir", mode, "nosuid", "nodev", "noexec", "private")
            system.append(Mount(fstype, target, fstype, options, -1, option))
    return system


def _is_sysfs_refused(option: str) -> bool:
    """Return whether the kernel refuses a new /sys because parts of the present /sys are covered, as in a pod.

    In that case, print a warning: the container gets the pod's /sys, read-only. It shows the names of network devices,
    but gives access to no device. See mount_namespaces(7).
    """
    try:
        with mounting.mount_filesystem("sysfs", "sysfs", [], linux.MOUNT_ATTR_RDONLY):
            return False
    except PermissionError:
        log.warn(
            f"{option}: /sys shows the network devices of {os.uname().nodename}, because parts of /sys are covered"
        )
        return True


def complete(root: int, own: int) -> None:
    """After the system mounts, set up the private namespaces ``own`` (flags of unshare(2)).

    Raises MountError, OSError.
    """
    if own & linux.CLONE_NEWNET:
        raise_loopback()
    if own & linux.CLONE_NEWIPC:
        make_dev(root, own_ipc=True)


def make_dev(root: int, *, own_ipc: bool) -> None:
    """Replace the host's /dev by a private /dev with standard devices. Raises MountError, OSError."""
    for mount in fstab.parse_file(_DEV + (_OWN_IPC if own_ipc else _HOST_IPC), {}, "the private /dev"):
        fstab.execute(mount, root)
    if os.isatty(0):
        terminal = os.readlink("/proc/self/fd/0")
        options = ("x-create=file", "bind", "rw", "nosuid", "noexec", "private")
        fstab.execute(Mount(terminal, "/dev/console", "none", options, -1, "the private /dev"), root)
    with paths.open_in(root, "/dev") as dev:
        for name, target in _LINKS.items():
            os.symlink(target, name, dir_fd=dev)


def raise_loopback() -> None:
    """Bring up the loopback device of this process's network, as ``ip link set lo up`` does. Raises OSError."""
    import fcntl
    import socket
    import struct

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as s:
        fcntl.ioctl(s, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))
