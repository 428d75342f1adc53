"""Overlays by fuse-overlayfs, for kernels that make none for users: ENROOT_NATIVE_OVERLAYFS=n.

The server has a mount namespace of its own, so that it does not keep the container's alive:
with the last process of that one the kernel ends the connection, and the server goes, and with
its namespace what is mounted in there. Sources: fuse-overlayfs(1), fuse(4).
"""

import os
import stat

from enroot_py import linux, mounts, squashfuse
from enroot_py.errors import ContainerError
from enroot_py.scripts import keep_capabilities

_ATTRIBUTES = linux.MOUNT_ATTR_NOSUID | linux.MOUNT_ATTR_NODEV
_FIRST = 500  # of the server's descriptors for directories; 3 is /dev/fuse


SOURCE = "fuse-overlayfs:"
NOTE = "fuse-overlayfs"  # a file in a container whose changes it wrote
_OPAQUE = (".wh..wh..opq", ".wh..opq")


def overlay(lowerdirs: "tuple[str, ...]", upper: str, work: str, name: str) -> int:
    """An overlay as a detached mount; ``lowerdirs`` from top to bottom. Raises ContainerError, OSError.

    ``name`` is a path that lists of mounts show, behind SOURCE.
    """
    program = squashfuse.installed("fuse-overlayfs")
    if not program:
        raise ContainerError(
            f"ENROOT_NATIVE_OVERLAYFS=no, but fuse-overlayfs is not installed on {os.uname().nodename}",
            hint="install the package fuse-overlayfs, or leave overlays to the kernel, 5.11 or later",
        )
    fuse = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    ready, tell = os.pipe2(os.O_CLOEXEC)
    start, go = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        try:
            # A second fork: the container's program must not find a child it never made.
            if os.fork():
                os._exit(0)
            os.close(ready)
            os.close(go)
            linux.unshare(linux.CLONE_NEWNS)
            os.write(tell, b"r")
            if os.read(start, 1):  # nothing where the mount failed
                _serve(program, fuse, lowerdirs, upper, work)
        finally:
            os._exit(127)
    os.close(tell)
    os.close(start)
    os.waitpid(pid, 0)
    try:
        if not os.read(ready, 1):
            raise ContainerError("the server of the overlay could not have a mount namespace of its own")
        options = squashfuse.mount_options(fuse)
        mount = mounts.mount_filesystem("fuse.fuse-overlayfs", SOURCE + name, options, _ATTRIBUTES)
        os.write(go, b"g")
    finally:
        os.close(ready)
        os.close(go)
        os.close(fuse)
    try:
        os.stat(f"/proc/self/fd/{mount}")  # waits until it serves
    except OSError as e:
        os.close(mount)
        raise ContainerError(
            f"{program} ended at once", hint="see whether it mounts these directories: " + ":".join(lowerdirs)
        ) from e
    return mount


def _serve(program: str, fuse: int, lowerdirs: "tuple[str, ...]", upper: str, work: str) -> None:
    import _signal

    os.setsid()
    for name in squashfuse.UNHEARD:
        _signal.signal(getattr(_signal, name), _signal.SIG_IGN)
    _signal.pthread_sigmask(_signal.SIG_SETMASK, ())
    # By descriptor: in the words of an option, ":" and "," separate.
    numbers: list[int] = []
    for directory in (*lowerdirs, upper, work):
        fd = os.open(directory, os.O_PATH | os.O_DIRECTORY)
        numbers.append(os.dup2(fd, _FIRST + len(numbers)))
    if fuse != 3:
        os.dup2(fuse, 3)
    os.set_inheritable(3, True)
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    linux.close_range(4, _FIRST - 1, 0)
    linux.close_range(numbers[-1] + 1, 0xFFFFFFFF, 0)
    os.chdir("/")
    keep_capabilities()
    paths = [f"/proc/self/fd/{number}" for number in numbers]
    options = f"lowerdir={':'.join(paths[:-2])},upperdir={paths[-2]},workdir={paths[-1]}"
    os.execve(program, [program, "-f", "-o", options, "/dev/fd/3"], {"PATH": "/usr/bin:/bin"})


def note(upper: str) -> None:
    """Remember that fuse-overlayfs writes to a container: it marks what is gone in ways of its own."""
    open(os.path.dirname(upper) + "/" + NOTE, "w").close()


def settle(container: str) -> None:
    """Write the marks of fuse-overlayfs in a container as the kernel's overlayfs does. Raises OSError.

    Source: fuse-overlayfs(1); the kernel's filesystems/overlayfs, "whiteouts and opaque directories".
    """
    for directory, _, names in os.walk(container + "/upper"):
        marks = [name for name in names if name.startswith(".wh.")]
        for name in marks:
            os.unlink(f"{directory}/{name}")
            hidden = f"{directory}/{name.removeprefix('.wh.')}"
            if name in _OPAQUE:
                os.setxattr(directory, "user.overlay.opaque", b"y")
            elif not os.path.lexists(hidden):
                os.mknod(hidden, stat.S_IFCHR, 0)
    os.unlink(f"{container}/{NOTE}")
