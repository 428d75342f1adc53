"""Find the process of a named container without looking at every process of the node.

A start of a container writes its PID into ENROOT_RUNTIME_PATH/named/NAME, unless a container of that name runs already.
The file is a hint: the process may have ended, or be another one. Whoever reads it asks the kernel whether the process
runs in the container, and looks through /proc otherwise.
"""

from __future__ import annotations

import os

from enroot_py.base import proc
from enroot_py.base.fds import Fd

_MAX_BYTES = 64


def note(name: str, runtime_path: str) -> None:
    """Note that this process starts the container ``name``."""
    path = f"{runtime_path}/named/{name}"
    if not _pid_in(path):
        write(name, runtime_path, os.getpid())


def write(name: str, runtime_path: str, pid: int) -> None:
    """Write the hint. Without it, finding the container takes longer."""
    path = f"{runtime_path}/named/{name}"
    try:
        content = f"{pid} {proc.Stat(pid).started}".encode()
        try:
            fd = _create(path)
        except FileNotFoundError:
            os.mkdir(os.path.dirname(path), 0o700)
            fd = _create(path)
        with Fd(fd):
            os.write(fd, content)
    except OSError:
        return


def _create(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def candidates(name: str, runtime_path: str) -> list[int]:
    """Return the process of the hint and its children, which are in the container if it has a PID namespace."""
    pid = _pid_in(f"{runtime_path}/named/{name}")
    return [pid, *proc.children(pid)] if pid else []


def _pid_in(path: str) -> int:
    """Return the process of a hint, or 0 if it has ended."""
    try:
        with Fd(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)) as fd:
            pid, started = map(int, fd.content(_MAX_BYTES).split())
    except (OSError, ValueError):
        return 0
    stat = proc.look(pid)
    return pid if stat and stat.started == started and stat.state not in "ZX" else 0
