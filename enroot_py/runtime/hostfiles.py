"""Copy host files into a container, or show later changes of host files there. Every start imports this module."""

from __future__ import annotations

import os

from enroot_py import LIBRARY
from enroot_py.base import linux, log
from enroot_py.base.fds import Fd
from enroot_py.runtime.mounting import Mount

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

FILES = ("/etc/hosts", "/etc/hostname", "/etc/resolv.conf")
ROOT = "the root file system"  # stands for the file system of fuse-overlayfs
_MAX_SERVERS = 16  # the limit of follow.c
DELAY_MS = 200  # starting penroot-follow later saves short-lived containers 4 % of their time
_PROGRAM = "penroot-follow"
_PATH = f"{LIBRARY}/libexec/{_PROGRAM}"


def copied(system: Iterable[Mount], targets: Iterable[str], scratch: str, *, writable: bool) -> list[Mount]:
    """Return the system mounts, with private copies in place of the FILES that are mounted on ``targets``.

    The copies lie in ``scratch``, a tmpfs of the container. With ``writable``, the container can change them. When the
    host replaces a file, the kernel removes a mount of the file and every mount on top of it. A copy stays.
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
            except OSError:  # the mount reports the error, unless it has nofail,silent
                mounts.append(mount)
                continue
            os.chmod(copy, 0o644)
            mode = "rw" if writable else "ro"
            options = ("x-create=file", "bind", mode, "nosuid", "nodev", "noexec", "private")
            mount = Mount(copy, mount.target, "none", options, mount.passno, mount.origin)
        mounts.append(mount)
    return mounts


def follow(*, child: bool, changes: bool, servers: Mapping[str, str], shared: int = -1) -> int:
    """Start penroot-follow for the container of this process or of its ``child``.

    penroot-follow ends with this process. With ``changes``, it shows new versions of FILES in the container.
    ``servers`` maps an image file or ROOT to the program of its FUSE server: penroot-follow prints a line if a server
    is killed. ``shared`` is a pidfd of the first server if another container started it, or -1. Call this before
    entering a namespace. Returns the process to wait for, or 0 if penroot-follow cannot be started: the container works
    without it.
    """
    options, fds = ["--child"] * child, []
    try:
        fds.append(os.pidfd_open(os.getpid()))
        for served, program in [*servers.items()][:_MAX_SERVERS]:
            end, lifelines[served] = os.pipe()
            fds.append(end)
            options += ["--server", f"[WARN] {log.printable(killed(program, served))}\n"]
        if shared >= 0:
            fds.append(os.dup(shared))
        options += digests() if changes else []
        delay_ms = 0 if child else DELAY_MS
        return linux.start_background(_PATH, (_PROGRAM, str(os.getpid()), *options), fds, delay_ms, orphan=True)
    except OSError:  # no descriptor or process left
        return 0
    finally:
        for fd in fds:
            os.close(fd)


# image file of a FUSE server, or ROOT -> end of a pipe that only the server and this process hold open
lifelines: dict[str, int] = {}


def note_start(lifeline: int) -> None:
    """Ask penroot-follow, through the pipe ``lifeline``, to report the death of the server. Do nothing for -1."""
    try:
        if lifeline >= 0:
            os.write(lifeline, b"+")
    except BrokenPipeError:
        return


def note_shared(served: str, *, joined: bool) -> None:
    """Close the lifeline of a shared server, so that no later server of the same file inherits it.

    If this container has ``joined`` the server, first ask penroot-follow to report the server's death.
    """
    lifeline = lifelines.pop(served, -1)
    if lifeline < 0:
        return
    with Fd(lifeline):
        try:
            if joined:
                os.write(lifeline, b"=")
        except BrokenPipeError:
            return


def killed(program: str, served: str, how: str = "") -> str:
    """Return the message for a killed FUSE server. ``how`` is "" or the signal."""
    event = f"{program} of {served} was killed{how} while the container ran"
    return f"{event}: its programs could read no more files (out of memory? see --mem and dmesg)"


def follow_spaces(spaces: Mapping[str, int], lifetime: int, shown: list[str]) -> None:
    """Show later changes of host files in the container with these namespaces, until the pipe ``lifetime`` closes.

    ``shown`` is what digests() returned before the container was created.
    """
    if "user" not in spaces:
        return  # a superuser without a user namespace
    import fcntl

    fds: list[int] = []
    try:
        # start_background() needs descriptors in ascending order.
        for fd in (lifetime, spaces["user"], spaces["mnt"]):
            fds.append(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, fds[-1] if fds else 3))
        linux.start_background(_PATH, (_PROGRAM, "0", *shown), fds, 0, orphan=False)
    finally:
        for fd in fds:
            os.close(fd)


def digests() -> list[str]:
    """Return the readable FILES, each followed by the digest of its text."""
    return [word for path in FILES if (digest := linux.digest(path)) for word in (path, digest)]
