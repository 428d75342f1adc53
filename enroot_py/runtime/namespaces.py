"""Create namespaces of a container. The user namespace maps one user to the same ID or to root, user_namespaces(7).

A program that is root in the container runs in a second user namespace within the first, where it cannot undo the
container's mounts (see nest()).
"""

from __future__ import annotations

import os
import sys

from enroot_py.base import linux
from enroot_py.base.errors import NamespaceError
from enroot_py.base.fds import Fd

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType

    from enroot_py.config.settings import Settings


def privileged(settings: Settings) -> bool:
    """Return whether root keeps all privileges, and so needs no user namespace."""
    return settings.allow_superuser and os.geteuid() == 0


def enter_user(uid: int, gid: int, *, myself: int | None = None) -> None:
    """Unshare the user namespace. The caller becomes ``uid`` and ``gid`` inside; no other user is mapped.

    The process must have one thread. ``myself`` is a descriptor of the host's /proc/self, for use after pivot_root(2),
    when /proc is the container's. Raises NamespaceError with the fix for the administrator.
    """
    outside = os.geteuid(), os.getegid()
    try:
        # map_user() writes files of /proc/self. They belong to root if the process is not dumpable: proc(5).
        linux.prctl(linux.PR_SET_DUMPABLE, 1)
        linux.unshare(linux.CLONE_NEWUSER)
        map_user(uid, gid, outside, myself)
    except OSError as e:
        raise NamespaceError(f"cannot create a user namespace: {e.strerror}", hint=advice(e)) from e


def map_user(uid: int, gid: int, outside: tuple[int, int], myself: int | None = None) -> None:
    """Map the user and group ``outside`` to ``uid`` and ``gid`` in the namespace of this process. Raises OSError."""
    prefix = "/proc/self/" if myself is None else ""
    _write(prefix + "setgroups", "deny", myself)
    _write(prefix + "uid_map", f"{uid} {outside[0]} 1", myself)
    _write(prefix + "gid_map", f"{gid} {outside[1]} 1", myself)


def own(settings: Settings) -> int:
    """Return the private namespaces that the settings select, as flags of unshare(2)."""
    flags = linux.CLONE_NEWNET if settings.unshare_net else 0
    flags |= linux.CLONE_NEWIPC if settings.unshare_ipc else 0
    flags |= linux.CLONE_NEWPID if settings.unshare_pid else 0
    return flags | (linux.CLONE_NEWUTS if settings.unshare_uts else 0)


def enter(uid: int, gid: int, *, superuser: bool) -> None:
    """Enter a new user namespace as ``uid`` and ``gid``, and a mount namespace. Raises NamespaceError.

    A ``superuser`` keeps root's privileges and gets no user namespace.
    """
    if not superuser:
        enter_user(uid, gid)
    unshare_mounts(superuser=superuser)


def unshare_mounts(flags: int = 0, *, superuser: bool) -> None:
    """Unshare the mount namespace, and others by ``flags`` of unshare(2). Raises NamespaceError.

    If another user namespace owns the host's mounts, their copies are slaves and locked, mount_namespaces(7): no change
    here reaches the host. A superuser's copies are peers of the host's mounts: make them slaves.
    """
    unshare(linux.CLONE_NEWNS | flags)
    if superuser:
        linux.mount_setattr(linux.AT_FDCWD, "/", linux.AT_RECURSIVE, 0, 0, linux.MS_SLAVE)


def nest(user: int, myself: int) -> None:
    """Enter the second user namespace, and copies of the mount and cgroup namespaces that belong to it.

    If the copy of a mount namespace belongs to another user namespace, its mounts are locked: root inside can neither
    unmount them nor change their flags, mount_namespaces(7). ``user`` is the second user namespace (a descriptor from
    isolated.enter()), or -1 to create it. ``myself`` is a descriptor of the host's /proc/self. Raises NamespaceError.
    """
    if user < 0:
        enter_user(0, 0, myself=myself)
    else:
        with Fd(user):
            linux.setns(user, linux.CLONE_NEWUSER)
    unshare(linux.CLONE_NEWNS | linux.CLONE_NEWCGROUP)


def servers() -> ModuleType | None:
    """Return the module squashfuse if this process has started a FUSE server."""
    return sys.modules.get("enroot_py.runtime.squashfuse")


def hide() -> None:
    """Hide this process from the user's processes and from root of its user namespace, until it executes a program.

    Otherwise programs in a container could reach descriptors and memory of this process, which are the host's:
    ptrace(2), "Ptrace access mode checking".
    """
    linux.prctl(linux.PR_SET_DUMPABLE, 0)


def unshare(flags: int) -> None:
    """Unshare further namespaces, owned by the present user namespace. Raises NamespaceError."""
    try:
        linux.unshare(flags)
    except OSError as e:
        raise NamespaceError(f"cannot create namespaces: {e.strerror}", hint=advice(e)) from e


def _write(path: str, text: str, directory: int | None) -> None:
    with Fd(os.open(path, os.O_WRONLY | os.O_CLOEXEC, dir_fd=directory)) as fd:
        os.write(fd, text.encode())


def advice(error: OSError) -> str:
    try:
        from enroot_py.runtime import pods
    except ImportError:  # in the container: rootfs.import_no_files() forbids imports
        return "see /proc/sys/user/max_*_namespaces and user_namespaces(7)"
    return pods.advice(error)


def confine(*, remap_root: bool) -> None:
    """Before execve(2), set no_new_privs, filter system calls and, unless ``remap_root``, drop capabilities."""
    try:
        linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
        if not remap_root:
            linux.drop_capabilities()
        linux.install_filter()
    except OSError as e:
        raise NamespaceError(f"cannot drop privileges: {e.strerror}") from e
