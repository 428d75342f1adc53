"""Places that another user could have made, shaped or swapped: opened once, looked at, and used by descriptor.

What lies in a directory that others can write to, as /tmp, or under a name that others
can guess, is believed only if it belongs to us or to root and nobody else can write to it.
On the start path: no import but os, errno and stat.
"""

import errno
import os
import stat

_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def directory(path: str, *, parent: "int | None" = None) -> int:
    """Open a directory that only its owner can write to; the owner is the caller or root.

    The last component may be a symbolic link of such an owner. Raises OSError, whose strerror
    says what is not as it must be: see open(2), symlink(7).
    """
    try:
        fd = os.open(path, _OPEN | os.O_DIRECTORY, dir_fd=parent)
    except OSError as e:
        if e.errno not in (errno.ELOOP, errno.ENOTDIR):  # ENOTDIR: of a link with O_DIRECTORY
            raise
        link = os.stat(path, dir_fd=parent, follow_symlinks=False)
        if not stat.S_ISLNK(link.st_mode):
            raise
        _check_owner(link, path)
        fd = os.open(path, (_OPEN & ~os.O_NOFOLLOW) | os.O_DIRECTORY, dir_fd=parent)
    return _checked(fd, path)


def file(name: str, *, parent: "int | None" = None) -> int:
    """Open a regular file for reading that only its owner can write to; the owner is the caller or root.

    No symbolic link is followed in the last component, and nothing is waited for. Raises OSError as directory() does.
    """
    fd = os.open(name, _OPEN, dir_fd=parent)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "is not a regular file", name)
    except OSError:
        os.close(fd)
        raise
    return _checked(fd, name)


def _checked(fd: int, path: str) -> int:
    try:
        found = os.fstat(fd)
        _check_owner(found, path)
        if found.st_mode & 0o002 or found.st_mode & 0o020 and not _is_own_group(found):
            raise PermissionError(errno.EPERM, f"can be written by others (mode {found.st_mode & 0o7777:o})", path)
    except OSError:
        os.close(fd)
        raise
    return fd


def _check_owner(found: os.stat_result, path: str) -> None:
    me = os.geteuid()
    if found.st_uid not in (me, 0):
        raise PermissionError(errno.EPERM, f"belongs to uid {found.st_uid}, not to uid {me} or root", path)


def _is_own_group(found: os.stat_result) -> bool:
    """Whether the group is the user's private one, with the number of the user, as umask 002 goes with."""
    return found.st_gid == found.st_uid
