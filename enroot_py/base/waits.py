"""Wait for a lock of another process: name the holder, and give up if the holder makes no progress.

Source: proc_locks(5).
"""

from __future__ import annotations

import errno
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from enroot_py.base import cgroups, locks, log, proc
from enroot_py.base.errors import PenrootError
from enroot_py.base.fds import Fd

NOTICE_AFTER_S = 2.0
STALLED_AFTER_S = 600.0
HINT = "resume that process (kill -CONT PID, scontrol resume JOB), or end it: kill -KILL PID, scancel JOB"
_OPEN = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_CHECK_INTERVAL_S = 0.5
_MAX_CHECK_GAP_S = 2.0  # a longer gap means that this process was stopped, and perhaps the holder too
_MIN_ASLEEP_CHECKS = 2  # consecutive checks, because the processes of a resumed job continue one by one
_MIN_PROGRESS_CPU_S = 0.1  # a process that only polls uses less CPU time in a minute
_STATES = {"R": "running", "S": "sleeping", "D": "waiting for a disk or a file server", "Z": "ended"}


def lock(fd: int, doing: str, *, shared: bool = False, stalled_after: float = STALLED_AFTER_S) -> str:
    """Wait for the lock of an open file or directory. Return "" when it is locked, or the reason why the wait failed.

    ``doing`` is the holder's work: "making layers/0123". The wait ends soon after the holder is stopped, or after
    ``stalled_after`` seconds without progress of the holder. Raises OSError.
    """
    if locks.flock_within(fd, NOTICE_AFTER_S, shared=shared):
        return ""
    watch = Watch(fd, doing, stalled_after)
    while not (reason := watch.look()):
        if locks.flock_within(fd, _CHECK_INTERVAL_S, shared=shared):
            return ""
    return reason


@contextmanager
def changing(path: str) -> Iterator[None]:
    """Let one process at a time change the file ``path``. Raises PenrootError, OSError.

    The lock is a private file beside ``path``, because other users can lock any file or directory that they can open.
    """
    directory, name = os.path.split(path)
    lock_path = f"{directory}/.{name}.lock"
    while True:
        with Fd(os.open(lock_path, _OPEN, 0o600)) as fd:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
                raise PermissionError(errno.EPERM, f"the lock file {lock_path} is open to other users: remove it")
            queue(fd, path)
            if locks.is_at(fd, lock_path):
                try:
                    yield
                finally:
                    os.unlink(lock_path)
                return


def queue(fd: int, path: str) -> None:
    """Wait for the lock on ``fd``, the lock file of ``path``. Return at once on a file system without locks.

    Raises OSError; PenrootError if the holder is stopped or makes no progress.
    """
    try:
        reason = lock(fd, f"changing {path}")
    except OSError as e:
        if e.errno not in locks.NO_LOCKS:
            raise
        return
    if reason:
        raise PenrootError(f"cannot change {path}: {reason}", hint=HINT)


class Watch:
    """Watch the holders of a lock while waiting for it."""

    def __init__(self, fd: int, doing: str, stalled_after: float = STALLED_AFTER_S) -> None:
        self._fd = fd
        self._doing = doing
        self._stalled_after = stalled_after
        self._looked = self._idle_s = 0.0
        self._asleep = 0  # number of consecutive checks that found a stopped or suspended holder
        # The last sign of life: mtime of the locked file, and CPU seconds of the holders.
        self._sign: tuple[int, float] = (0, 0.0)

    def look(self) -> str:
        """Return the reason to stop waiting, or "". Checks at most every half second, however often it is called.

        The first check prints the holder of the lock.
        """
        now = time.monotonic()
        if now - self._looked < _CHECK_INTERVAL_S:
            return ""
        pids = holders(self._fd)
        names = " and ".join(map(described, pids)) or "a process of another node or PID namespace"
        if not self._looked:
            log.info(f"waiting for {names}, which is {self._doing}")
        gap, self._looked = min(now - self._looked, _MAX_CHECK_GAP_S), now
        family = [*families(pids)]
        self._asleep = self._asleep + 1 if any(map(cgroups.pause_reason, family)) else 0
        if self._asleep >= _MIN_ASLEEP_CHECKS:
            return f"{names} makes no progress {self._doing}"
        self._idle_s = 0 if self._goes_on(family) else self._idle_s + gap
        if self._idle_s >= self._stalled_after:
            return f"{names} made no progress {self._doing} for {self._stalled_after:.0f} s"
        return ""

    def _goes_on(self, family: list[int]) -> bool:
        """Return whether the locked file was changed, or the holders used CPU time, since the last sign of life."""
        changed, work = self._sign
        sign = os.fstat(self._fd).st_mtime_ns, sum(map(_processor_s, family))
        if sign[0] == changed and 0 <= sign[1] - work < _MIN_PROGRESS_CPU_S:
            return False
        self._sign = sign
        return True


def holders(fd: int) -> list[int]:
    """Return the visible processes that have locked an open file."""
    status = os.fstat(fd)
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    try:
        with open("/proc/locks") as f:
            lines = [line.split() for line in f]
    except OSError:
        return []
    # For files on btrfs and overlayfs, /proc/locks and stat(2) show different devices: match by inode number.
    same = [words for words in lines if words[1] == "FLOCK" and words[5].rpartition(":")[2] == str(status.st_ino)]
    exact = [words for words in same if words[5].rpartition(":")[0] == device]
    return [pid for words in exact or same if (pid := int(words[4])) not in (0, -1, os.getpid())]


def described(pid: int) -> str:
    """Describe a process for a message: PID, program, state and job."""
    stat = proc.look(pid)
    asleep = cgroups.pause_reason(pid).removeprefix("its job is ").removeprefix("it is ")
    name, state = (stat.comm, asleep or _STATES.get(stat.state, stat.state)) if stat else ("?", "gone")
    job = _job(pid)
    return log.printable(f"process {pid} ({name}, {state}){f' of job {job}' if job else ''}")


def _job(pid: int) -> str:
    """Return the number of a process's Slurm job, else the job's SLUID, else ""."""
    try:
        with open(f"/proc/{pid}/cgroup", errors="replace") as f:
            groups = f.read()
        try:
            with open(f"/proc/{pid}/environ", "rb") as g:
                environ = g.read()
        except PermissionError:
            environ = b""  # the process belongs to another user
    except OSError:
        return ""
    return job_of(groups, environ)


def job_of(groups: str, environ: bytes) -> str:
    """Return the job number in a process's control groups or environment, else the SLUID in the groups, else "".

    Slurm 26.05 and later name control groups after the job's SLUID, unless cgroup.conf has CgroupJobIdPaths=yes.
    squeue and scancel accept both. Sources: cgroup.conf(5); print_sluid() of Slurm's sluid.c.
    """
    if match := re.search(r"/job_(\d+)", groups):
        return match[1]
    if match_ := re.search(rb"(?:^|\0)SLURM_JOB_ID=(\d+)\0", environ):
        return os.fsdecode(match_[1])
    sluid = re.search(r"/(s[0-9A-HJKMNP-TV-Z]{13})/step_", groups)
    return sluid[1] if sluid else ""


def families(pids: Iterable[int]) -> Iterator[int]:
    """Yield each process in ``pids``, and all descendants."""
    pending, seen = list(pids), set(pids)
    while pending:
        pid = pending.pop()
        yield pid
        children = {*proc.children(pid)} - seen
        seen |= children
        pending += children


def _processor_s(pid: int) -> float:
    """Return the CPU seconds of a process and its ended children, or 0 if the process has ended."""
    stat = proc.look(pid)
    return stat.processor_s(with_children=True) if stat else 0
