"""Let one process make a file. Other processes that need the file wait, on the same node or on nodes that share it.

The maker of NAME creates the file ``.NAME.turn`` with the maker's node, boot ID and PID, locks the file with flock(2),
and updates its time every few seconds. If flock(2) does not reach other nodes, the time shows that the maker is alive.
"""

from __future__ import annotations

import _signal
import os
import stat
import time

from enroot_py.base import holders, locks, log, making, waits
from enroot_py.base.fds import Fd
from enroot_py.base.holders import Holder

_KIND = "turn"
_HEARTBEAT_S = 5.0
_EXPIRED_AFTER_S = 60.0
_NOTICE_AFTER_S = 0.5
_POLL_S = 0.1
_OPEN = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class Turn:
    """The turn to make the file ``path``. Use it in a ``with``, in the main thread, because a turn uses SIGALRM.

    Entering waits while another process of this user has the turn, unless that process is stopped or shows no sign of
    life. If the turn file cannot be created, for example in a read-only directory, entering succeeds without a turn.
    """

    def __init__(self, path: str) -> None:
        directory, name = os.path.split(path)
        self._target = path
        self._path = f"{directory}/.{making.shortened(name)}.{_KIND}"
        self._fd: Fd | None = None

    def __enter__(self) -> Turn:
        while True:
            try:
                self._take()
                return self
            except FileExistsError:
                pass
            except OSError as e:
                log.debug(f"cannot make {self._path}: {e.strerror}")
                return self
            try:
                with Fd(os.open(self._path, _OPEN)) as fd:
                    if why := self._await(fd):
                        log.warn(f"{why}: not waiting for it")
                        return self
            except FileNotFoundError:
                continue
            except OSError as e:
                log.debug(f"cannot open {self._path}: {e.strerror}")
                return self

    def _take(self) -> None:
        """Create and lock the turn file. Raises OSError; FileExistsError if another process has the turn."""
        with Fd(os.open(self._path, _OPEN | os.O_CREAT | os.O_EXCL, 0o600)) as fd:
            try:
                locks.attempt(fd)
                os.write(fd, holders.this_process().dumps())
            except OSError:  # for example, the disk is full
                os.unlink(self._path)
                raise
            self._fd = fd.keep()
        self._before = _signal.signal(_signal.SIGALRM, self._beat)
        _signal.setitimer(_signal.ITIMER_REAL, _HEARTBEAT_S, _HEARTBEAT_S)

    def _beat(self, number: int, frame: object) -> None:
        if self._fd is not None:
            try:
                os.utime(self._fd)
            except OSError:
                return  # the next signal tries again

    def _await(self, fd: int) -> str:
        """Wait until the turn is free, and return "". Return the reason if the wait ends early."""
        if (owner := os.fstat(fd).st_uid) != os.geteuid():
            return f"uid {owner} is making {self._target}"
        watch = waits.Watch(fd, f"making {self._target}", _EXPIRED_AFTER_S)
        began = changed_at = time.monotonic()
        mtime_ns, noticed = 0, False
        while locks.is_at(fd, self._path):
            now = time.monotonic()
            holder = _holder(fd)
            if (latest := os.fstat(fd).st_mtime_ns) != mtime_ns:
                mtime_ns, changed_at = latest, now
            if _is_dead(fd, expired=now - changed_at >= _EXPIRED_AFTER_S):
                if holder:
                    making.discard(self._target, holder.node, holder.pid)
                _remove(fd, self._path)
                return ""
            if now - began >= _NOTICE_AFTER_S:
                if holder and holder.is_here:
                    if why := watch.look():
                        return why
                elif holder and not noticed:
                    noticed = True
                    log.info(f"waiting for {holder}, which is making {self._target}")
            time.sleep(_POLL_S)
        return ""

    def __exit__(self, *_: object) -> None:
        if self._fd is None:
            return
        _signal.setitimer(_signal.ITIMER_REAL, 0)
        _signal.signal(_signal.SIGALRM, self._before or _signal.SIG_DFL)
        with self._fd as fd:
            try:
                _remove(fd, self._path)
            except OSError as e:
                log.debug(f"cannot remove {self._path}: {e.strerror}")


def _remove(fd: int, path: str) -> None:
    """Remove the turn file that is open as ``fd``, but not the turn file of a successor at ``path``. Raises OSError."""
    if not locks.is_at(fd, path):
        return
    trash = making.hidden(path, making.TRASH)
    try:
        os.rename(path, trash)
        try:
            if not locks.is_at(fd, trash):  # a process of another node has just taken the turn
                os.link(trash, path)
        finally:
            os.unlink(trash)
    except (FileNotFoundError, FileExistsError):
        return  # another process has removed the turn file, or has created a new one


def sweep(directory: str) -> None:
    """Remove the turn files of killed processes of this node."""
    try:
        names = [name for name in os.listdir(directory) if name.startswith(".") and name.endswith("." + _KIND)]
    except OSError:
        return
    for name in names:
        path = f"{directory}/{name}"
        try:
            with Fd(os.open(path, _OPEN)) as fd:
                status = os.fstat(fd)
                is_mine = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
                if is_mine and _is_dead(fd, expired=False):
                    _remove(fd, path)
        except OSError as e:
            log.debug(f"cannot remove {path}: {e.strerror}")


def _holder(fd: int) -> Holder | None:
    return holders.loads(os.pread(fd, holders.MAX_BYTES, 0))


def _is_dead(fd: int, *, expired: bool) -> bool:
    """Return whether the maker has ended. For an unknown maker, or on another node, return ``expired``."""
    holder = _holder(fd)
    if holder is None or not holder.is_here:
        return expired
    # Keep this lock. Otherwise two processes could remove the turn, and the second one would remove a successor's turn.
    free = locks.attempt(fd)
    if free is None:  # no locks on this file system
        return holder.is_gone
    return free
