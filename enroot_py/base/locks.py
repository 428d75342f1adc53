"""flock(2): locks of open files and directories, which end with their processes. On the start path."""

from __future__ import annotations

import errno
import os

from enroot_py.base import log

# What flock(2) raises where a file system has no locks; EBADF of a directory on NFS.
NONE = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EBADF)


def flock(fd: int, *, shared: bool = False, wait: bool = False) -> bool:
    """Lock an open file until its descriptors are closed; False where others have it and there is no ``wait``.

    Raises OSError.
    """
    import fcntl  # not for every start

    how = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(fd, how if wait else how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def queue(fd: int, path: str) -> None:
    """Lock what is open at ``path`` when others are done with it; at once where there are no locks. Raises OSError."""
    try:
        if not flock(fd):
            log.info(f"waiting for who has locked {path}: fuser -v {path} tells")
            flock(fd, wait=True)
    except OSError as e:
        if e.errno not in NONE:
            raise


def is_at(fd: int, path: str) -> bool:
    """Whether what is open is at ``path``: before it was locked it may have been renamed or removed."""
    try:
        there = os.lstat(path)
    except FileNotFoundError:
        return False
    here = os.fstat(fd)
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)
