"""Host files in a container: copy them, or follow their changes.

Not on the start path of a read-only container over layers, which has the files bound and no process beside it.
"""

from __future__ import annotations

import os

from enroot_py import LIBRARY
from enroot_py.base import signals
from enroot_py.base.fds import Fd
from enroot_py.runtime.mounting import Mount

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

FILES = ("/etc/hosts", "/etc/hostname", "/etc/resolv.conf")
_PROGRAM = "penroot-follow"


def copied(system: Iterable[Mount], targets: Iterable[str], scratch: str, *, writable: bool) -> list[Mount]:
    """Return the mounts of the system with a private copy of those of FILES that are mounted on ``targets``.

    With ``writable``, the container may change the copies. They lie in ``scratch``, a tmpfs of the container. A later
    mount on a copy stays. The kernel would detach a mount on a file of the host when the host replaces the file.
    """
    wanted = {target for target in targets if target in FILES}
    mounts = []
    for mount in system:
        if mount.binds and mount.source == mount.target and mount.source in wanted:
            copy = f"{scratch}/{os.path.basename(mount.source)}"
            try:
                flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC  # a FIFO must not block the start
                with Fd(os.open(mount.source, flags)) as original, open(copy, "wb") as f:
                    f.write(original.content())
            except OSError:  # the mount reports the error, unless it has nofail
                mounts.append(mount)
                continue
            os.chmod(copy, 0o644)
            mode = "rw" if writable else "ro"
            options = ("x-create=file", "bind", mode, "nosuid", "nodev", "noexec", "private")
            mount = Mount(copy, mount.target, "none", options, mount.passno, mount.origin)
        mounts.append(mount)
    return mounts


def follow(*, child: bool) -> int:
    """Let a process show the container of this process, or of a child, the files that replace FILES.

    It ends with this process. To be called before any namespace is entered. Returns the process to wait for, or 0.
    """
    return _spawn(["--child"] * child, [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDWR, 0)])


def follow_spaces(spaces: Mapping[str, int], lifetime: int) -> None:
    """Follow the host files for the container with the namespaces ``spaces``, until the pipe ``lifetime`` closes."""
    if "user" not in spaces:
        return  # root that keeps its privileges
    import fcntl

    # Out of the way of the numbers that the program expects.
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (lifetime, spaces["user"], spaces["mnt"])]
    try:
        _spawn(["--spaces"], [(os.POSIX_SPAWN_DUP2, fd, number) for fd, number in zip(high, (0, 3, 4), strict=True)])
    finally:
        for fd in high:
            os.close(fd)


def _spawn(options: list[str], actions: list[tuple[object, ...]]) -> int:
    """Start the program with /dev/null as its output; return 0 if it cannot be started, as nothing depends on it."""
    path = f"{LIBRARY}/libexec/{_PROGRAM}"
    actions += [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0), (os.POSIX_SPAWN_DUP2, 1, 2)]
    try:
        return os.posix_spawn(path, [_PROGRAM, *options, *FILES], {}, file_actions=actions, setsigmask=signals.UNHEARD)
    except OSError:  # not installed, or no process left
        return 0
