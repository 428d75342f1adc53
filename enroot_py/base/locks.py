"""Lock open files and directories with flock(2). A lock ends when its descriptors are closed. On the start path."""

from __future__ import annotations

import errno
import os

# Errors of flock(2) on file systems without locks. EBADF is the error for a directory on NFS.
NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EBADF)


def flock(fd: int, *, shared: bool = False) -> bool:
    """Lock an open file until its descriptors are closed. Return False if another process has the lock.

    Raises OSError.
    """
    import fcntl  # here, because most starts need no lock

    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def attempt(fd: int) -> bool | None:
    """Lock an open file. Return False if another process has the lock, None if its file system has no locks.

    Raises OSError.
    """
    try:
        return flock(fd)
    except OSError as e:
        if e.errno not in NO_LOCKS:
            raise
        return None


def flock_within(fd: int, seconds: float, *, shared: bool = False) -> bool:
    """Wait at most ``seconds`` for the lock of an open file. Return whether it is locked. Raises OSError.

    Call this in the main thread: it uses SIGALRM.
    """
    if flock(fd, shared=shared):
        return True
    import _signal
    import fcntl
    import time

    waiting, began = [True], time.monotonic()

    def ring(number: int, frame: object) -> None:
        if waiting:
            waiting.clear()
            raise TimeoutError

    before = _signal.signal(_signal.SIGALRM, ring)
    # Repeat the signal: a signal just before flock(2) does not interrupt the call.
    left, interval = _signal.setitimer(_signal.ITIMER_REAL, seconds, seconds)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        waiting.clear()
        return True
    except TimeoutError:
        return False
    finally:
        _signal.setitimer(_signal.ITIMER_REAL, 0)
        _signal.signal(_signal.SIGALRM, before or _signal.SIG_DFL)
        if left:  # restore the caller's timer
            _signal.setitimer(_signal.ITIMER_REAL, max(0.001, left - (time.monotonic() - began)), interval)


def is_at(fd: int, path: str) -> bool:
    """Return whether the open file is still at ``path``. Another process may have moved it before it was locked."""
    try:
        at_path = os.lstat(path)
    except FileNotFoundError:
        return False
    opened = os.fstat(fd)
    return (opened.st_dev, opened.st_ino) == (at_path.st_dev, at_path.st_ino)
