"""The root file system of a container, mounted at one place in a new mount namespace.

An overlay over layer trees, over a FUSE-mounted squashfs, or over a plain
directory; a writable plain directory is used as it is. Changes of a container
that is not writable go to a tmpfs which nobody else sees.
"""

import errno
import os

from enroot_py import linux, mounts, paths
from enroot_py.errors import ContainerError, ImageError, NamespaceError

_WINDOW = 128 << 10  # bytes, the read-ahead window of a FUSE mount
_AHEAD = 8 << 20  # bytes of a program that are read ahead
_PAGE = 4096  # bytes of the options of mount(2), the last one a NUL
# glibc gives each block that the server decompresses back to the kernel, and takes it anew
# for the next one, unless told otherwise, mallopt(3): a fifth of the server's time.
_SERVER_ENVIRON = {
    "PATH": "/usr/bin:/bin",
    "MALLOC_MMAP_THRESHOLD_": "8388608",
    "MALLOC_TRIM_THRESHOLD_": "134217728",
    "MALLOC_TOP_PAD_": "1048576",
}
_UNHEARD = ("SIGHUP", "SIGINT", "SIGQUIT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGPIPE", "SIGTSTP")
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
    """The process that serves a squashfs image to /dev/fuse, and what it serves as a detached mount.

    To be made in a mount namespace that the container then leaves for one of its
    own: the server stays there, so that it pins nothing, and ends when the kernel
    ends the connection, with the last process of the container. It starts while
    the caller goes on.
    """

    def __init__(self, image: str) -> None:
        """Raises ImageError where no FUSE server is installed, NamespaceError where /dev/fuse is closed to us."""
        self.image = image
        program = _server_program(image)
        try:
            # The fd must belong to the user namespace of the mount, fuse(4).
            fuse = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        except OSError as e:
            raise NamespaceError(
                f"cannot open /dev/fuse: {e.strerror}",
                hint=f"on {os.uname().nodename} as root: modprobe fuse; chmod 666 /dev/fuse; or: penroot create IMAGE",
            ) from e
        options = [f"fd={fuse}", "rootmode=40000", f"user_id={os.geteuid()}", f"group_id={os.getegid()}"]
        options += ["allow_other", "default_permissions"]
        attributes = _ATTRIBUTES | linux.MOUNT_ATTR_RDONLY
        self._mount = mounts.mount_filesystem("fuse.squashfuse", "squashfuse", options, attributes)
        self._starter = _spawn([program, image, "/dev/fd/3"], fuse)
        os.close(fuse)

    def attach(self, target: str) -> None:
        """Mount what is served, now that the server runs. Raises ImageError where it does not."""
        try:
            _, status = os.waitpid(self._starter, 0)
        except ChildProcessError:  # a new PID namespace came between: it is our parent's
            status = 0
        if status:
            raise ImageError(f"cannot mount {self.image}: squashfuse failed", hint=f"unsquashfs -s {self.image}")
        attach(self._mount, target)


def _spawn(command: "list[str]", fuse: int) -> int:
    """Start a FUSE server that becomes a daemon, with ``fuse`` as descriptor 3; the process to wait for.

    Not by fork(2), which costs a Python process a millisecond.
    """
    import _signal

    actions = [(os.POSIX_SPAWN_DUP2, fuse, 3), (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDWR, 0)]
    actions += [(os.POSIX_SPAWN_DUP2, 0, 1), (os.POSIX_SPAWN_DUP2, 0, 2)]
    # Whoever waits for the end of a pipe that we were given shall not wait for the server.
    actions += [(os.POSIX_SPAWN_CLOSE, fd) for fd in map(int, os.listdir("/proc/self/fd")) if fd > 3]
    # What ends or stops the container leaves alone what serves it.
    blocked = [getattr(_signal, name) for name in _UNHEARD]
    return os.posix_spawn(command[0], command, _SERVER_ENVIRON, file_actions=actions, setsigmask=blocked)


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


def mount(source: Source, scratch: str, server: "Server | None", *, writable: bool, native: bool = True) -> int:
    """Mount ``source`` on ``scratch``/root and return that directory as a file descriptor.

    A squashfs image has its ``server``. Overlays are the kernel's, or not
    ``native``. Raises ContainerError, ImageError.
    """
    root = scratch + "/root"
    if source.shared >= 0:
        attach(source.shared, root)
        return os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    upper, work = source.upper, source.work
    lowerdirs, options = source.lowerdirs, ["userxattr"]
    if source.directory:
        lowerdirs = (source.directory,)
    if server is not None:
        server.attach(scratch + "/lower")
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

            if source.upper and writable:
                fuseoverlay.note(upper)
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


def read_ahead(root: int, program: str, search: str) -> None:
    """Have the server of an image decompress a program that will run, while this process goes on.

    Otherwise that comes page by page when it is executed. Of a dynamic program also
    its loader, and the C library beside that. ``search`` is the PATH.
    """
    for directory in ("",) if "/" in program else search.split(":"):
        try:
            fd = paths.open_in(root, f"{directory}/{program}", os.O_RDONLY)
        except OSError:
            continue
        break
    else:
        return
    _read_ahead(fd)
    start = os.pread(fd, 4096, 0)
    os.close(fd)
    name = start.find(b"/lib")  # PT_INTERP of elf(5): linkers put it into the first page
    loader = os.fsdecode(start[name : start.find(b"\0", name)])
    if start.startswith(b"\x7fELF") and "/ld-" in loader:
        try:
            fd = paths.open_in(root, loader, os.O_RDONLY)
            real = os.readlink(f"/proc/self/fd/{fd}").removeprefix(os.readlink(f"/proc/self/fd/{root}"))
            _read_ahead(fd)
            os.close(fd)
            fd = paths.open_in(root, real.rpartition("/")[0] + "/libc.so.6", os.O_RDONLY)
        except OSError:
            return
        _read_ahead(fd)
        os.close(fd)


def _read_ahead(fd: int) -> None:
    # The kernel takes no more than one window of a call.
    for offset in range(0, min(os.fstat(fd).st_size, _AHEAD), _WINDOW):
        os.posix_fadvise(fd, offset, _WINDOW, os.POSIX_FADV_WILLNEED)


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
