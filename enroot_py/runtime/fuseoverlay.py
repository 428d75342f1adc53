"""Make overlays with fuse-overlayfs if ENROOT_NATIVE_OVERLAYFS=n, for kernels that refuse overlays to users.

The server stays in the outer namespaces, like the server of a squashfs image: no process in the container can inspect
the server, and the server keeps no mount of the container in use. The kernel ends the FUSE connection with the last
process of the container, and then the server exits. Sources: fuse-overlayfs(1), fuse(4).
"""

from __future__ import annotations

import os
import stat
from _signal import SIG_IGN, SIG_SETMASK, pthread_sigmask, signal

from enroot_py.base import carried, linux, signals
from enroot_py.base.errors import ContainerError
from enroot_py.runtime import hostfiles, mounting, rootfs, squashfuse

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

    from enroot_py.runtime.rootfs import Source
    from enroot_py.runtime.squashfuse import Server

_ATTRIBUTES = linux.MOUNT_ATTR_NOSUID | linux.MOUNT_ATTR_NODEV
_FIRST_DIRECTORY_FD = 500  # the server's first descriptor of a directory; its descriptor 3 is /dev/fuse


SOURCE = "fuse-overlayfs:"
NOTE = "fuse-overlayfs"  # a file that marks a container whose changes fuse-overlayfs wrote
_OPAQUE = (".wh..wh..opq", ".wh..opq")


def mount(source: Source, server: Server | None, scratch: str, *, writable: bool) -> int:
    """Return the root file system of ``source`` as a detached mount. ``server`` serves a squashfs image, or is None.

    Raises ContainerError, ImageError, OSError.
    """
    program = carried.installed("fuse-overlayfs")
    if not program:
        raise ContainerError(
            f"ENROOT_NATIVE_OVERLAYFS=no, but fuse-overlayfs is not installed on {os.uname().nodename}",
            hint="install the package fuse-overlayfs, or set ENROOT_NATIVE_OVERLAYFS=yes",
        )
    lowerdirs = (source.directory,) if source.directory else source.lowerdirs
    upper, work = source.upper, source.work
    if upper and writable:
        _note(upper)
    else:
        lowerdirs = (upper, *lowerdirs) if upper else lowerdirs
        upper, work = scratch + "/upper", scratch + "/work"
    if server is not None:
        server.wait()
        lowerdirs = (*lowerdirs, scratch + "/lower")
    with squashfuse.open_device("ENROOT_NATIVE_OVERLAYFS=yes") as fuse:
        name = SOURCE + (source.directory or source.upper or source.label or source.image)
        mount = mounting.mount_filesystem("fuse.fuse-overlayfs", name, squashfuse.mount_options(fuse), _ATTRIBUTES)
        with mount:
            pid = os.fork()
            if pid == 0:
                try:
                    # Fork twice: the container's program must not inherit an unknown child.
                    if os.fork():
                        _await_server(fuse, mount)
                    # The server mounts the layers in a private namespace, which ends with the server.
                    linux.unshare(linux.CLONE_NEWNS)
                    rootfs.mount_scratch(scratch)
                    if server is not None:
                        server.attach(scratch + "/lower")
                    _serve(program, fuse, lowerdirs, upper, work)
                finally:
                    os._exit(127)
            mount.keep()
    with mount:
        try:
            failure = "ended at once" if squashfuse.wait_for(pid) else ""
        except TimeoutError as e:
            failure = str(e)
        if failure:
            hint = "try to mount these directories by hand: " + ":".join(lowerdirs)
            raise ContainerError(f"{program} {failure}", hint=hint)
        hostfiles.note_start(hostfiles.lifelines.get(hostfiles.ROOT, -1))
        return mount.keep()


def _await_server(fuse: int, mount: int) -> NoReturn:
    """Exit with 0 when the server answers, or with 1 when the server has ended and /dev/fuse is closed."""
    try:
        os.close(fuse)
        os.stat(f"/proc/self/fd/{mount}")
        os._exit(0)
    except OSError:
        os._exit(1)


def _serve(program: str, fuse: int, lowerdirs: tuple[str, ...], upper: str, work: str) -> None:
    os.setsid()
    for number in signals.UNHEARD:
        signal(number, SIG_IGN)
    pthread_sigmask(SIG_SETMASK, ())
    # Pass descriptors, because ":" and "," in a path would separate options.
    numbers: list[int] = []
    for directory in (*lowerdirs, upper, work):
        fd = os.open(directory, os.O_PATH | os.O_DIRECTORY)
        numbers.append(os.dup2(fd, _FIRST_DIRECTORY_FD + len(numbers)))
    if fuse != 3:
        os.dup2(fuse, 3)
    os.set_inheritable(3, True)
    first = 4
    if (lifeline := hostfiles.lifelines.get(hostfiles.ROOT, -1)) >= 0:
        os.set_inheritable(os.dup2(lifeline, first), True)
        first += 1
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    linux.close_range(first, _FIRST_DIRECTORY_FD - 1, 0)
    linux.close_range(numbers[-1] + 1, 0xFFFFFFFF, 0)
    os.chdir("/")
    paths = [f"/proc/self/fd/{number}" for number in numbers]
    options = f"lowerdir={':'.join(paths[:-2])},upperdir={paths[-2]},workdir={paths[-1]}"
    os.execve(program, [program, "-f", "-o", options, "/dev/fd/3"], {"PATH": "/usr/bin:/bin"})


def _note(upper: str) -> None:
    """Record that fuse-overlayfs writes to a container: it marks deleted files in another way than the kernel."""
    open(os.path.dirname(upper) + "/" + NOTE, "w").close()


def settle(container: str) -> None:
    """Convert fuse-overlayfs's marks for deleted files to the marks of the kernel's overlayfs. Raises OSError.

    Source: fuse-overlayfs(1); the kernel's filesystems/overlayfs, "whiteouts and opaque directories".
    """
    closed = []  # directories whose owner lacks a permission, such as mount points
    for directory, below, names in os.walk(container + "/upper"):
        for path in (f"{directory}/{name}" for name in below):
            mode = os.lstat(path).st_mode
            if stat.S_ISDIR(mode) and mode & 0o700 != 0o700:
                closed.append((path, mode & 0o7777))
                os.chmod(path, mode | 0o700)
        marks = [name for name in names if name.startswith(".wh.")]
        for name in marks:
            os.unlink(f"{directory}/{name}")
            hidden = f"{directory}/{name.removeprefix('.wh.')}"
            if name in _OPAQUE:
                os.setxattr(directory, "user.overlay.opaque", b"y")
            elif not os.path.lexists(hidden):
                os.mknod(hidden, stat.S_IFCHR, 0)
    for path, mode in closed:
        os.chmod(path, mode)
    os.unlink(f"{container}/{NOTE}")
