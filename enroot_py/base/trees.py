"""Make private directories, and remove directory trees. On the start path: only errno, os and fds are imported."""

from __future__ import annotations

import errno
import os

from enroot_py.base.fds import Fd

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
ACLS = ("system.posix_acl_default", "system.posix_acl_access")
_MAX_OPEN_DIRECTORIES = 64


def make(path: str, mode: int) -> None:
    """Make a directory in the caller's group and without an inherited ACL. Raises OSError.

    The container's user namespace maps only the caller's user and group. Overlayfs can neither create files in a
    directory of an unmapped group nor copy an ACL with unmapped IDs.
    """
    os.mkdir(path, mode)
    try:
        drop_acl(path, mode)
        state = os.stat(path)
        if state.st_gid != os.getegid():
            os.chown(path, -1, os.getegid())
            os.chmod(path, state.st_mode & 0o777)  # without set-group-ID: subdirectories would inherit the group
    except PermissionError:
        return  # the file system has one group for all files, for example with the mount option gid=
    except FileNotFoundError:
        return  # making.sweep() of another process removed the new directory: the caller's open(2) fails


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
        os.chmod(path, mode & ~umask)  # mkdir(2) applied the ACL instead of the umask


def remove(path: str) -> None:
    """Remove a directory and its content. Raises OSError."""
    above, name = os.path.split(path)
    with Fd(os.open(above, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as parent:
        remove_in(parent, name)


def remove_in(parent: int, name: bytes | str) -> None:
    """Remove the directory ``name`` in ``parent`` and its content. Raises OSError.

    Crosses no mount point and follows no symlink. shutil.rmtree does not work here: directories may lack u+rwx, and a
    tree may be deeper than the limits of descriptors and of Python's stack allow.
    """
    os.chmod(name, 0o700, dir_fd=parent)
    with Fd(os.open(name, _DIRECTORY, dir_fd=parent)) as top:
        device = os.fstat(top).st_dev
        while not _clear(top, top, device, _MAX_OPEN_DIRECTORIES):
            pass
    os.rmdir(name, dir_fd=parent)


def _clear(directory: int, top: int, device: int, depth: int) -> bool:
    """Remove the content of a directory. Return False if directories deeper than ``depth`` were moved to ``top``."""
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
