"""Verbs for running containers: ``exec`` and ``ps``."""

from __future__ import annotations

import os
from _signal import SIGKILL
from time import sleep

from enroot_py.base.errors import ContainerError, UsageError
from enroot_py.base.fds import Fd
from enroot_py.config.settings import load
from enroot_py.runtime import processes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from enroot_py.config.settings import Settings

_PAUSE_S, _KILL_ATTEMPTS = 0.02, 3000  # a minute in total: a process may wait for a disk
_HINT = "penroot list --fancy shows your running containers"


def seconds(text: str | None, option: str) -> float | None:
    """Parse the value of an option that takes seconds. Raises UsageError."""
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1
    if not 0 <= value < 1e9:
        raise UsageError(f"{option} {text}: not a number of seconds", hint=f"give seconds, such as {option} 30")
    return value


def execute(
    target: str,
    words: tuple[str, ...],
    env: tuple[str, ...],
    workdir: str | None,
    user: str | None,
    timeout: str | None,
    interactive: bool,
    tty: bool,
) -> int:
    """Run ``penroot exec``. ``interactive`` and ``tty``, known from docker, have no effect. Raises PenrootError."""
    from enroot_py.runtime import joining

    timeout_s = seconds(timeout, "--timeout")
    return joining.execute_in(
        target, words, env, load(), workdir=workdir or "", user=user or "", timeout_s=timeout_s or None
    )


def find(name: str, settings: Settings) -> int:
    """Return the PID to join for a container's name, a PID or a Slurm JOBID[.STEPID]. Raises ContainerError."""
    pid = processes.find(name, settings)
    if processes.is_inside(pid, settings):
        return pid
    raise ContainerError(f"process {name} is not in one of your containers", hint=_HINT)


def open_space(pid: int) -> Fd | None:
    """Open the mount namespace of a process. While it is open, the kernel does not reuse its inode number."""
    try:
        return Fd(os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)) if pid else None
    except OSError:  # the process has ended
        return None


def kill_in(spaces: list[Fd]) -> None:
    """Kill all processes in the mount namespaces ``spaces``, and close these descriptors."""
    numbers = {os.fstat(space).st_ino for space in spaces}
    for _ in range(_KILL_ATTEMPTS if numbers else 0):
        by_number = processes.by_mount_namespace()
        pids = [pid for number in numbers & by_number.keys() for pid in by_number[number]]
        if not pids:
            break
        for pid in pids:
            try:
                os.kill(pid, SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
        sleep(_PAUSE_S)
    for space in spaces:
        os.close(space)


def ps(name: str | None, json: bool) -> int:
    """Print the processes of a running container. Without a name, list the running containers. Raises PenrootError."""
    from enroot_py.cli import listing

    settings = load()
    if name is None:
        text = listing.in_json(settings, idle=False) if json else listing.short_table(settings, idle=False)
    else:
        space = processes.inode(find(name, settings), "mnt")
        pids = processes.by_mount_namespace().get(space, [])
        text = listing.of_processes(name, sorted(pids), space, as_json=json)
    listing.write(text)
    return 0
