"""The root file system of a container, mounted at one place in a new mount namespace.

An overlay over layer trees, over a FUSE-mounted squashfs, or over a plain
directory; a writable plain directory is used as it is. Changes of a container
that is not writable go to a tmpfs which nobody else sees.
"""

import errno
import os

from enroot_py import linux, mounts
from enroot_py.errors import ContainerError, ImageError, NamespaceError

_PAGE = 4096  # bytes of the options of mount(2), the last one a NUL
_ATTRIBUTES = linux.MOUNT_ATTR_NOSUID | linux.MOUNT_ATTR_NODEV


class Source:
    """What a root file system is made of: directories from top to bottom, or one squashfs image.

    ``upper`` and ``work`` are the directories of a container that keeps its
    changes; without them a writable container keeps them in memory. ``shared``
    is the detached mount of the same container where it runs already, or -1.
    """

    __slots__ = ("name", "lowerdirs", "image", "directory", "upper", "work", "shared")

    def __init__(
        self,
        name: str,
        *,
        lowerdirs: "tuple[str, ...]" = (),
        image: str = "",
        directory: str = "",
        upper: str = "",
        work: str = "",
    ) -> None:
        self.name = name
        self.lowerdirs = lowerdirs
        self.image = image
        self.directory = directory
        self.upper = upper
        self.work = work
        self.shared = -1

    def describe(self) -> str:
        if self.image:
            return f"overlay over squashfs {self.image}"
        if self.directory:
            return f"directory {self.directory}"
        return f"overlay over {len(self.lowerdirs)} layers"


class Server:
    """The process that serves a squashfs image to /dev/fuse; forked before the mount namespace is unshared.

    It stays in the old mount namespace, so that it pins nothing, and ends when
    the kernel ends the connection: with the last process of the new one.
    """

    def __init__(self, image: str) -> None:
        """Raises ImageError where no FUSE server is installed, NamespaceError where /dev/fuse is closed to us."""
        program = _server_program(image)
        try:
            # The fd must belong to the user namespace of the mount, fuse(4).
            self._fuse = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        except OSError as e:
            raise NamespaceError(
                f"cannot open /dev/fuse: {e.strerror}",
                hint=f"on {os.uname().nodename} as root: modprobe fuse; chmod 666 /dev/fuse; or: penroot create IMAGE",
            ) from e
        start, self._go = os.pipe2(os.O_CLOEXEC)
        pid = os.fork()
        if pid == 0:
            try:
                self._serve(program, image, start)
            finally:
                os._exit(127)
        os.close(start)
        os.waitpid(pid, 0)

    def _serve(self, program: str, image: str, start: int) -> None:
        import _signal

        # A second fork: the container's program must not find a child it never made.
        if os.fork():
            os._exit(0)
        os.setsid()
        for name in ("SIGHUP", "SIGINT", "SIGQUIT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGPIPE", "SIGTSTP"):
            _signal.signal(getattr(_signal, name), _signal.SIG_IGN)
        _signal.pthread_sigmask(_signal.SIG_SETMASK, ())
        os.close(self._go)
        if not os.read(start, 1):  # the parent failed before the mount
            os._exit(0)
        null = os.open("/dev/null", os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        if self._fuse != 3:
            os.dup2(self._fuse, 3)
        os.set_inheritable(3, True)
        linux.close_range(4, 0xFFFFFFFF, 0)
        os.chdir("/")
        os.execve(program, [program, "-f", image, "/dev/fd/3"], {"PATH": "/usr/bin:/bin"})

    def mount(self) -> int:
        """Mount what is served, detached; the server starts. Returns the mount as a file descriptor."""
        options = [f"fd={self._fuse}", "rootmode=40000", f"user_id={os.geteuid()}", f"group_id={os.getegid()}"]
        options += ["allow_other", "default_permissions"]
        mount = mounts.mount_filesystem("fuse.squashfuse", "squashfuse", options, _ATTRIBUTES | linux.MOUNT_ATTR_RDONLY)
        os.write(self._go, b"g")
        os.close(self._go)
        os.close(self._fuse)
        return mount


def _server_program(image: str) -> str:
    for name in ("squashfuse_ll", "squashfuse"):
        for directory in ("/usr/bin", "/usr/local/bin", "/bin"):
            if os.access(f"{directory}/{name}", os.X_OK):
                return f"{directory}/{name}"
    raise ImageError(
        f"cannot mount {image}: squashfuse is not installed on {os.uname().nodename}",
        hint=f"install the package squashfuse, or unpack the image: penroot create {image}",
    )


def mount_scratch(scratch: str) -> None:
    """Cover an existing directory with an empty file system, in a mount namespace of our own."""
    attach(mounts.mount_filesystem("tmpfs", "tmpfs", ["mode=700"], _ATTRIBUTES), scratch)
    for name in ("root", "lower", "upper", "work"):
        os.mkdir(f"{scratch}/{name}", 0o755)


def hide(scratch: str) -> None:
    """Leave ``scratch`` out of recursive binds from now on: a mount of /tmp does not bring what lies in it."""
    linux.mount_setattr(linux.AT_FDCWD, scratch, 0, 0, 0, linux.MS_UNBINDABLE)


def mount(source: Source, scratch: str, *, writable: bool, native: bool = True) -> int:
    """Mount ``source`` on ``scratch``/root and return that directory as a file descriptor.

    A squashfs image is mounted on ``scratch``/lower already. Overlays are the kernel's, or not
    ``native``. Raises ContainerError.
    """
    root = scratch + "/root"
    if source.shared >= 0:
        attach(source.shared, root)
        return os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    upper, work = source.upper, source.work
    lowerdirs, options = source.lowerdirs, ["userxattr"]
    if source.directory:
        lowerdirs = (source.directory,)
    if source.image:
        lowerdirs = (scratch + "/lower",)
        options.append("xino=off")  # FUSE gives it no room for layer numbers
    if not (upper and writable):
        if upper:
            lowerdirs = (upper, *lowerdirs)
        upper, work = scratch + "/upper", scratch + "/work"
    try:
        if source.directory and writable:
            made = bind(source.directory)
        elif native:
            made = overlay(lowerdirs, upper, work, options)
        else:
            from enroot_py import fuseoverlay

            made = fuseoverlay.overlay(lowerdirs, upper, work, source.directory or source.upper or source.image)
        attach(made, root)
    except OSError as e:
        message = f"cannot mount the root filesystem of {source.name}: {e.strerror}"
        raise ContainerError(message, hint=_advice(e, upper)) from e
    return os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)


def overlay(lowerdirs: "tuple[str, ...]", upper: str, work: str, options: "list[str]") -> int:
    """An overlay as a detached mount; ``lowerdirs`` from top to bottom. Raises OSError.

    Without ``upper`` it is read-only. Source: the kernel's filesystems/overlayfs.
    """
    if not upper and len(lowerdirs) == 1:
        return bind(lowerdirs[0])
    with _Names() as names:
        every = [f"lowerdir+={names.short(path)}" for path in lowerdirs]
        if upper:
            every += [f"upperdir={names.short(upper)}", f"workdir={names.short(work)}"]
        try:
            return mounts.mount_filesystem("overlay", "overlay", options + every, _ATTRIBUTES)
        except OSError as e:
            if e.errno != errno.EINVAL:
                raise
    # Kernels before 6.7 know no lowerdir+: one option with all of them.
    return overlay_by_mount(lowerdirs, upper, work, options)


class _Names:
    """Names of directories that are short enough, while the ``with`` lasts."""

    def __init__(self) -> None:
        self._held: list[int] = []

    def __enter__(self) -> "_Names":
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._held:
            os.close(fd)

    def short(self, path: str, limit: int = 255) -> str:
        """A name of at most ``limit`` bytes: a string of fsconfig(2) ends at 255, a descriptor's name is short."""
        if len(os.fsencode(path)) <= limit:
            return path
        self._held.append(os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
        return f"/proc/self/fd/{self._held[-1]}"


def overlay_by_mount(lowerdirs: "tuple[str, ...]", upper: str, work: str, options: "list[str]") -> int:
    """What overlay() does, by mount(2). Raises OSError."""
    with _Names() as names:
        limit = _PAGE // (len(lowerdirs) + 3) - 1  # all options together may fill a page
        joined = ":".join(escape(names.short(path, limit)) for path in lowerdirs)
        every = [*options, f"lowerdir={joined}"]
        if upper:
            every += [f"upperdir={escape(names.short(upper, limit))}", f"workdir={escape(names.short(work, limit))}"]
        return _overlay_by_mount(",".join(every), lowerdirs[0])


def _overlay_by_mount(data: str, over: str) -> int:
    """An overlay by mount(2), whose options may fill a page, taken off again as a detached mount."""
    linux.mount("overlay", over, "overlay", linux.MS_NOSUID | linux.MS_NODEV, data)
    tree = linux.open_tree(linux.AT_FDCWD, over, linux.OPEN_TREE_CLOEXEC | linux.OPEN_TREE_CLONE)
    linux.umount2(over, linux.MNT_DETACH)
    return tree


def escape(path: str) -> str:
    """A path in the option string of an overlay, where ``:`` and ``,`` separate."""
    return path.replace("\\", "\\\\").replace(":", "\\:").replace(",", "\\,")


def bind(directory: str) -> int:
    """The directory and all that is mounted beneath it, as a detached mount."""
    flags = linux.OPEN_TREE_CLONE | linux.OPEN_TREE_CLOEXEC | linux.AT_RECURSIVE
    tree = linux.open_tree(linux.AT_FDCWD, directory, flags)
    linux.mount_setattr(tree, "", linux.AT_EMPTY_PATH, _ATTRIBUTES, 0, 0)
    return tree


def attach(mount: int, target: str) -> None:
    """Attach a detached mount and close its descriptor."""
    try:
        linux.move_mount(mount, "", linux.AT_FDCWD, target, linux.MOVE_MOUNT_F_EMPTY_PATH)
    finally:
        os.close(mount)


def seal(root: str) -> None:
    """Make the root mount itself read-only; what is mounted beneath keeps its own flags."""
    linux.mount_setattr(linux.AT_FDCWD, root, 0, linux.MOUNT_ATTR_RDONLY, 0, 0)


def switch(root: str) -> None:
    """Make ``root`` the root directory and drop the old one (pivot_root(2), "new_root and put_old may be the same")."""
    os.chdir(root)
    linux.pivot_root(".", ".")
    linux.umount2(".", linux.MNT_DETACH)
    os.chdir("/")


def _advice(error: OSError, upper: str) -> str:
    if error.errno == errno.ENODEV:
        return f"the kernel of {os.uname().nodename} has no overlayfs: modprobe overlay"
    if error.errno == errno.EPERM:
        return f"overlayfs needs Linux 5.11 or later without root; this is {os.uname().release}"
    if error.errno == errno.EINVAL:
        return f"{upper} cannot hold changes (NFS and Lustre cannot): set ENROOT_DATA_PATH to a local file system"
    if error.errno in (errno.ENOENT, errno.ESTALE):
        return "a layer of its image is gone from the store: import the image again"
    return ""
