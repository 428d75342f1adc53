"""System calls under the names of their man pages.

Most functions wrap one call. They know nothing of containers, and raise OSError with errno, and with the path if the
call has one. Calls that Python offers (memfd_create, pidfd_open, waitid, sched_setaffinity, setxattr) are not here: use
them from os.
"""

from __future__ import annotations

import os
import sys

from enroot_py.base._linux import ffi, lib
from enroot_py.base.fds import Fd

FLOOR = "5.12"  # the oldest Linux that works: mount_setattr(2) is the newest call without a fallback

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_NULL = ffi.NULL
_ENCODING = sys.getfilesystemencoding(), sys.getfilesystemencodeerrors()  # the same as in os.fsencode()

# clone(2)
CLONE_PARENT = 0x00008000
CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

# mount(2)
MS_RDONLY = 0x1
MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_BIND = 0x1000
MS_MOVE = 0x2000
MS_REC = 0x4000
MS_UNBINDABLE = 0x20000
MS_PRIVATE = 0x40000
MS_SLAVE = 0x80000
MS_SHARED = 0x100000
MNT_DETACH = 0x2

# open_tree(2), move_mount(2), fsopen(2), fsconfig(2), fsmount(2), mount_setattr(2)
OPEN_TREE_CLONE = 0x1
OPEN_TREE_CLOEXEC = os.O_CLOEXEC
MOVE_MOUNT_F_EMPTY_PATH = 0x4
MOVE_MOUNT_T_EMPTY_PATH = 0x40
FSOPEN_CLOEXEC = 0x1
FSMOUNT_CLOEXEC = 0x1
FSCONFIG_SET_FLAG = 0
FSCONFIG_SET_STRING = 1
FSCONFIG_CMD_CREATE = 6
MOUNT_ATTR_RDONLY = 0x1
MOUNT_ATTR_NOSUID = 0x2
MOUNT_ATTR_NODEV = 0x4
MOUNT_ATTR_NOEXEC = 0x8
MOUNT_ATTR_NOATIME = 0x10
MOUNT_ATTR_STRICTATIME = 0x20
MOUNT_ATTR_NODIRATIME = 0x80
MOUNT_ATTR__ATIME = 0x70
AT_FDCWD = -100
AT_EMPTY_PATH = 0x1000
AT_RECURSIVE = 0x8000

# openat2(2)
RESOLVE_NO_XDEV = 0x01
RESOLVE_NO_MAGICLINKS = 0x02
RESOLVE_NO_SYMLINKS = 0x04
RESOLVE_BENEATH = 0x08
RESOLVE_IN_ROOT = 0x10

# renameat2(2)
RENAME_EXCHANGE = 2

# flock(2)
LOCK_EX = 2
LOCK_NB = 4

# close_range(2)
CLOSE_RANGE_CLOEXEC = 0x4

# prctl(2), capabilities(7)
PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_CAPBSET_DROP = 24
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_RAISE = 2
CAP_SYS_ADMIN = 21


def _check(result: int, *paths: str | None) -> int:
    if result < 0:
        error = ffi.errno
        raise OSError(error, os.strerror(error), *paths[:1])
    return result


def _descriptor(result: int, *paths: str | None) -> Fd:
    return Fd(_check(result, *paths))


def _text(value: str | None) -> bytes:
    return _NULL if value is None else value.encode(*_ENCODING)


def unshare(flags: int) -> None:
    """unshare(2)"""
    _check(lib.unshare(flags))


def clone3(flags: int) -> int:
    """clone3(2) as a fork(2) into new namespaces. The caller must have only one thread."""
    return _check(lib.linux_clone3(flags))


def setns(fd: int, nstype: int) -> None:
    """setns(2)"""
    _check(lib.setns(fd, nstype))


def mount(source: str | None, target: str, fstype: str | None, flags: int, data: str | None = None) -> None:
    """mount(2)"""
    _check(lib.mount(_text(source), _text(target), _text(fstype), flags, _text(data)), target)


def umount2(target: str, flags: int) -> None:
    """umount2(2)"""
    _check(lib.umount2(_text(target), flags), target)


def pidfd_getfd(pidfd: int, fd: int) -> Fd:
    """pidfd_getfd(2)"""
    return _descriptor(lib.linux_pidfd_getfd(pidfd, fd))


def open_tree(dirfd: int, path: str, flags: int) -> Fd:
    """open_tree(2)"""
    return _descriptor(lib.linux_open_tree(dirfd, _text(path), flags), path)


def move_mount(from_dirfd: int, from_path: str, to_dirfd: int, to_path: str, flags: int) -> None:
    """move_mount(2)"""
    _check(lib.linux_move_mount(from_dirfd, _text(from_path), to_dirfd, _text(to_path), flags), to_path)


def fsopen(fstype: str, flags: int) -> Fd:
    """fsopen(2)"""
    return _descriptor(lib.linux_fsopen(_text(fstype), flags), fstype)


def fsconfig(fd: int, command: int, key: str | None, value: str | None, aux: int = 0) -> None:
    """fsconfig(2)"""
    _check(lib.linux_fsconfig(fd, command, _text(key), _text(value), aux), key)


def fsmount(fd: int, flags: int, attributes: int) -> Fd:
    """fsmount(2)"""
    return _descriptor(lib.linux_fsmount(fd, flags, attributes))


def mount_setattr(dirfd: int, path: str, flags: int, attr_set: int, attr_clr: int, propagation: int) -> None:
    """mount_setattr(2)"""
    _check(lib.linux_mount_setattr(dirfd, _text(path), flags, attr_set, attr_clr, propagation), path)


def openat2(dirfd: int, path: str, flags: int, mode: int, resolve: int) -> Fd:
    """openat2(2)"""
    return _descriptor(lib.linux_openat2(dirfd, _text(path), flags, mode, resolve), path)


def renameat2(old_dirfd: int, old: str, new_dirfd: int, new: str, flags: int) -> None:
    """renameat2(2)"""
    _check(lib.renameat2(old_dirfd, _text(old), new_dirfd, _text(new), flags), old)


def pivot_root(new_root: str, put_old: str) -> None:
    """pivot_root(2)"""
    _check(lib.linux_pivot_root(_text(new_root), _text(put_old)), new_root)


def flock(fd: int, operation: int) -> bool:
    """flock(2), without importing fcntl, which takes 0.1 ms. Returns False if another process has the lock."""
    try:
        _check(lib.flock(fd, operation))
    except BlockingIOError:
        return False
    return True


def syncfs(fd: int) -> None:
    """syncfs(2)"""
    _check(lib.syncfs(fd))


def close_range(first: int, last: int, flags: int) -> None:
    """close_range(2)"""
    _check(lib.linux_close_range(first, last, flags))


def close_others(kept: Iterable[int]) -> None:
    """Close all descriptors except ``kept``. Call it in a child that uses no file objects of its parent."""
    numbers = sorted({*kept})
    for before, after in zip((-1, *numbers), (*numbers, 0x7FFFFFFF), strict=True):
        if before + 1 < after:
            close_range(before + 1, after - 1, 0)


def prctl(operation: int, a: int = 0, b: int = 0, c: int = 0, d: int = 0) -> int:
    """prctl(2)"""
    return _check(lib.linux_prctl(operation, a, b, c, d))


def capset(effective: int, permitted: int, inheritable: int) -> None:
    """capset(2); each set is a mask of bits 1 << CAP_x"""
    _check(lib.linux_capset(effective, permitted, inheritable))


def capget_permitted() -> int:
    """Return the permitted set of capget(2) as a mask of bits 1 << CAP_x"""
    out = ffi.new("uint64_t *")
    _check(lib.linux_capget_permitted(out))
    return int(out[0])


def boot_id() -> str:
    """Return the boot ID, which changes at each boot: random(4)"""
    with open("/proc/sys/kernel/random/boot_id") as f:
        return f.read().strip()


def drop_capabilities() -> None:
    """Drop all capabilities of the bounding set and all other sets: capabilities(7)"""
    _check(lib.penroot_drop_capabilities())


def install_filter() -> None:
    """seccomp(2) with the filter of c_shims/seccomp.h; needs PR_SET_NO_NEW_PRIVS"""
    _check(lib.penroot_install_filter())


def withhold_descriptors() -> None:
    """Make execve(2) close directories, namespaces and O_PATH descriptors: see c_shims/seccomp.h.

    If stdin, stdout or stderr is such a descriptor, /dev/null replaces it at once.
    """
    _check(lib.penroot_withhold_descriptors())


def renew_keyring() -> None:
    """keyctl(2), KEYCTL_JOIN_SESSION_KEYRING: replace the session keyring by a new one, if the kernel has keyrings"""
    _check(lib.penroot_renew_keyring())


def digest(path: str) -> str:
    """Return size and FNV-1a hash of a regular file as one string (c_shims/digest.h), or "" if it cannot be read."""
    word = ffi.new("char[]", 40)  # PENROOT_DIGEST_BYTES
    return "" if lib.penroot_digest_format(_text(path), word) < 0 else ffi.string(word).decode()


def start_background(path: str, argv: Sequence[str], fds: Sequence[int], delay_ms: int, *, orphan: bool) -> int:
    """Execute a program in the background. ``fds``, in ascending order, become the program's descriptors from 3 on.

    Nothing is executed if the first of ``fds`` becomes readable, or its other end is closed, within ``delay_ms``.
    Returns the PID to wait for. This is the program's PID. With ``orphan``, it is the PID of an intermediate process,
    which ends at once. A process can call this only once: see c_shims/background.h.
    """
    words = [ffi.new("char[]", os.fsencode(word)) for word in (path, *argv)]
    memory = words[0], ffi.new("char *[]", [*words[1:], _NULL]), ffi.new("int[]", fds)
    _in_use.append((words, memory))
    return _check(lib.penroot_start_background(*memory, len(fds), delay_ms, orphan), path)


def fork_below(path: str, name: str, word: str, fd: int) -> int:
    """Start a program with ``fd`` as descriptor 3. The program's child is a fork(2) of this process: c_shims/guard.h

    The program's arguments are ``name``, the PID of the child, and ``word``. Returns the PID of the program, or 0 in
    the child. Block all signals before the call.
    """
    return _check(lib.penroot_fork_below(_text(path), name.encode(), word.encode(), fd), path)


_in_use: list[object] = []  # memory that the processes of start_background() read until execve(2)
