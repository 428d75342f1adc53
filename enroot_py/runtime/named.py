"""Find the process of a named container without looking at every process of the node.

A start writes its PID into ENROOT_RUNTIME_PATH/named-NAME, unless the file has the PID of a process that runs. The file
is only a hint: the process may have ended, and its PID may belong to another process. A reader checks whether the
process runs in the container, and otherwise searches /proc. The file stays until the container is removed.
"""

from __future__ import annotations

import os

from enroot_py.base.fds import Fd

_MAX_BYTES = 16


def note(name: str, runtime_path: str) -> None:
    """Write this process's PID as the hint of the container ``name``, unless the process of an earlier hint runs."""
    if not _pid_in(_path(name, runtime_path)):
        write(name, runtime_path, os.getpid())


def write(name: str, runtime_path: str, pid: int) -> None:
    """Write the hint. Ignore errors: without the hint, it only takes longer to find the container."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with Fd(os.open(_path(name, runtime_path), flags, 0o600)) as fd:
            os.write(fd, b"%d" % pid)
    except OSError:
        return


def forget(name: str, runtime_path: str) -> None:
    """Remove the hint of a container that is removed."""
    try:
        os.unlink(_path(name, runtime_path))
    except OSError:
        return


def _path(name: str, runtime_path: str) -> str:
    return f"{runtime_path}/named-{name}"


def candidates(name: str, runtime_path: str) -> list[int]:
    """Return the process of the hint and its children: with a PID namespace, only the children are in the container."""
    from enroot_py.base import proc

    pid = _pid_in(_path(name, runtime_path))
    return [pid, *proc.children(pid)] if pid else []


def _pid_in(path: str) -> int:
    """Return the process of a hint, or 0 if the process has ended or the PID belongs to another user."""
    try:
        with Fd(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)) as fd:
            pid = int(fd.content(_MAX_BYTES))
        os.kill(pid, 0)
    except (OSError, ValueError):
        return 0
    return pid
