"""Directories of our own: made, and removed with all that is in them. On the start path: no import but os."""

from __future__ import annotations

import errno
import os

from enroot_py.base.fds import Fd

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
ACLS = ("system.posix_acl_default", "system.posix_acl_access")
_DEPTH = 64  # directories that are open at a time


def make(path: str, mode: int) -> None:
    """Make a directory in the caller's group and without an ACL, whatever its parent hands on. Raises OSError.

    The container's user namespace maps only the caller's user and group. Overlayfs makes nothing in a directory whose
    group is not there, and copies no ACL that names one.
    """
    os.mkdir(path, mode)
    try:
        drop_acl(path, mode)
        state = os.stat(path)
        if state.st_gid != os.getegid():
            os.chown(path, -1, os.getegid())
            os.chmod(path, state.st_mode & 0o777)  # no set-group-ID, which would hand it on further
    except PermissionError:
        return  # a file system with one group for all, as by its option gid=
    except FileNotFoundError:
        return  # swept away this moment, as it was not locked yet: whoever opens it sees that


def drop_acl(path: str, mode: int) -> None:
    """Remove the ACL that a new directory inherited: acl(5). Raises OSError."""
    dropped = False
    for name in ACLS:
        try:
            os.removexattr(path, name)
            dropped = True
        except OSError as e:
            if e.errno not in (errno.ENODATA, errno.EOPNOTSUPP):
                raise
    if dropped:
        umask = os.umask(0o077)
        os.umask(umask)
        os.chmod(path, mode & ~umask)  # mkdir(2) has let the ACL decide


def remove(path: str) -> None:
    """Remove a directory and all beneath it. Raises OSError."""
    above, name = os.path.split(path)
    with Fd(os.open(above, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as parent:
        remove_in(parent, name)


def remove_in(parent: int, name: bytes | str) -> None:
    """Remove a directory in an open one and all beneath it, on one file system and following nothing. Raises OSError.

    Not shutil.rmtree: directories may lack u+rwx, and be deeper than there are descriptors
    or Python has stack.
    """
    os.chmod(name, 0o700, dir_fd=parent)
    with Fd(os.open(name, _DIRECTORY, dir_fd=parent)) as top:
        device = os.fstat(top).st_dev
        while not _clear(top, top, device, _DEPTH):
            pass
    os.rmdir(name, dir_fd=parent)


def _clear(directory: int, top: int, device: int, depth: int) -> bool:
    """Remove what is in a directory; False if some of it, too deep, was moved up into ``top`` instead."""
    done = True
    with os.scandir(directory) as entries:
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.name, dir_fd=directory)
                continue
            if entry.stat(follow_symlinks=False).st_dev != device:
                raise OSError(errno.EBUSY, "something is mounted there", entry.name)
            os.chmod(entry.name, 0o700, dir_fd=directory)
            if not depth:
                os.rename(entry.name, f".{os.urandom(8).hex()}", src_dir_fd=directory, dst_dir_fd=top)
                done = False
                continue
            with Fd(os.open(entry.name, _DIRECTORY, dir_fd=directory)) as below:
                done = _clear(below, top, device, depth - 1) and done
            os.rmdir(entry.name, dir_fd=directory)
    return done
