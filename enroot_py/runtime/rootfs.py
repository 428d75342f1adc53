"""The root file system of a container, mounted at one place in a new mount namespace.

The root is an overlay over layer trees, over a FUSE-mounted squashfs, or over a plain directory. A writable plain
directory is used as it is. A private tmpfs holds the files that a start writes to a read-only container, and all
changes of a writable container that does not keep its changes.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from _frozen_importlib import BuiltinImporter, FrozenImporter

from enroot_py.base import linux, log, trusted
from enroot_py.base.errors import ContainerError, NamespaceError
from enroot_py.runtime import mounting

TYPE_CHECKING = False
if TYPE_CHECKING:
    from enroot_py.config.settings import Settings
    from enroot_py.runtime.squashfuse import Server

_MOUNT_OPTIONS_BYTES = 4096  # a page, with the final NUL: mount(2)
_MAX_LABEL_BYTES = 80  # of Source.label, the name of a step's container
_MAX_PATH_END_BYTES = 80  # enough for the part of a path below the directory of the image store
_WRITTEN = ("etc",)  # directories that every start writes to
_USED = (*_WRITTEN, "proc", "sys", "dev", "tmp", "bin")  # directories that every start uses
_ATTRIBUTES = linux.MOUNT_ATTR_NOSUID | linux.MOUNT_ATTR_NODEV


class Source:
    """The source of a root file system: layer directories (topmost first), a squashfs image, or a plain directory.

    The image begins at ``offset`` of its file: in a bundle (features/bundle), a script comes before the image. The
    image is the lowest layer, below ``lowerdirs``. A container that keeps its changes has the directory ``changes``,
    with the changes in ``upper``. Any other writable container keeps its changes in memory. If the container runs
    already, ``shared`` is a detached mount of its root, else -1. If the container ``lends`` its root to later steps,
    enter() sets ``shared``. If the FUSE server of the image runs already, ``served`` is a detached mount of the image,
    else -1. mountinfo shows ``label`` as the source of the overlay, to name a container that has no directory. With
    ``is_volatile``, the changes disappear with the container, so the kernel does not write them to the disk at the end.
    """

    __slots__ = (
        "name",
        "lowerdirs",
        "image",
        "offset",
        "directory",
        "changes",
        "shared",
        "lends",
        "served",
        "label",
        "is_volatile",
    )

    def __init__(
        self,
        name: str,
        *,
        lowerdirs: tuple[str, ...] = (),
        image: str = "",
        directory: str = "",
        changes: str = "",
    ) -> None:
        self.name = name
        self.lowerdirs = lowerdirs
        self.image = image
        self.offset = 0
        self.directory = directory
        self.changes = changes
        self.shared = -1
        self.lends = False
        self.served = -1
        self.label = ""
        self.is_volatile = False

    @property
    def upper(self) -> str:
        """Return the upper directory, or "" if the container does not keep its changes."""
        return self.changes and self.changes + "/upper"

    @property
    def work(self) -> str:
        """Return the workdir of the overlay with ``upper``, or ""."""
        return self.changes and self.changes + "/work"

    @property
    def facts(self) -> dict[str, str]:
        """Return the fields of an event record (features/records) that name this source."""
        if self.directory or self.upper:
            return {"container": self.name}
        return {"image": self.image} if self.image else {}

    def mount_point(self, scratch: str) -> str:
        """Return the mount point beneath ``scratch``/root. Hooks take the container's name from the end of the path."""
        return f"{scratch}/root/{self.name if self.directory or self.upper else 'overlay'}"

    def describe(self) -> str:
        if self.image:
            return f"overlay over squashfs {self.image}"
        if self.directory:
            return f"directory {self.directory}"
        return f"overlay over {len(self.lowerdirs)} layers"


def make_scratch(settings: Settings) -> str:
    """Return the directory on which a start mounts file systems, in its mount namespace. Raises ContainerError.

    Other users cannot replace this directory. If they could replace ENROOT_RUNTIME_PATH, return a private directory.
    """
    path = settings.runtime_path
    try:
        trusted.place(path, make=True, strict=True)
        return path
    except OSError as e:
        error = e
    if error.errno == errno.EPERM:
        try:
            private = trusted.temporary(settings.temp_path)
        except OSError as e:
            error = e
        else:
            log.warn(f"not using ENROOT_RUNTIME_PATH={path}, which {error.strerror}: using {private}")
            return private
    from enroot_py.base import filesystems

    raise ContainerError(
        f"cannot create {path}: {error.strerror}", hint=filesystems.hint_for(error, path, "ENROOT_RUNTIME_PATH")
    ) from error


def mount_scratch(scratch: str) -> None:
    """Cover an existing directory with an empty file system, in a private mount namespace.

    This is the first mount of a start. Raises NamespaceError if the kernel forbids mounts.
    """
    try:
        mounting.attach_at(mounting.mount_filesystem("tmpfs", "tmpfs", ["mode=700"], _ATTRIBUTES), scratch)
    except PermissionError as e:
        raise _refused(f"mount a file system on {scratch}", e) from e
    for name in ("root", "lower", "upper", "work"):
        os.mkdir(f"{scratch}/{name}", 0o755)


def hide(scratch: str) -> None:
    """Exclude ``scratch`` from later recursive binds: a bind of /tmp does not include it."""
    linux.mount_setattr(linux.AT_FDCWD, scratch, 0, 0, 0, linux.MS_UNBINDABLE)


def mount(source: Source, scratch: str, server: Server | None, *, writable: bool, made: int = -1) -> int:
    """Mount ``source`` on its mount point and return a descriptor of the mount point.

    ``server`` serves a squashfs image, or is None. ``made`` is a detached mount of the root if it exists already, or
    -1. Raises ContainerError, ImageError.
    """
    root = source.mount_point(scratch)
    os.mkdir(root, 0o755)
    if made >= 0:
        mounting.attach_at(made, root)
        return os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    upper, work = source.upper, source.work
    lowerdirs, options = source.lowerdirs, ["userxattr"]
    if source.directory:
        lowerdirs = (source.directory,)
    if server is not None:
        server.attach(scratch + "/lower")
        lowerdirs = (*lowerdirs, scratch + "/lower")
        options.append("xino=off")  # FUSE inode numbers leave no bits for layer numbers
    if upper and writable and source.is_volatile:
        options.append("volatile")
    if not (upper and writable):
        if upper:
            lowerdirs = (upper, *lowerdirs)
        upper, work = scratch + "/upper", scratch + "/work"
        make_upper(lowerdirs[0], upper, _USED if server is not None else _WRITTEN)
    try:
        direct = source.directory and writable
        made = bind(source.directory) if direct else overlay(lowerdirs, upper, work, options, source.label)
        mounting.attach_at(made, root)
    except OSError as e:
        message = f"cannot mount the root filesystem of {source.name}: {e.strerror}"
        raise ContainerError(message, hint=_advice(e, upper)) from e
    return os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)


def make_upper(lower: str, upper: str, names: tuple[str, ...]) -> None:
    """Create directories in ``upper``, a tmpfs, with the modes that they have in ``lower``. This saves time.

    With a FUSE server, each directory in ``upper`` saves requests that wake the server: six for attributes and flags
    when a hook writes into the directory, and one for the origin of a directory that only one layer has. Without a
    server, the kernel need not copy the directory at the first write. Skip directories that the image lacks, or that
    belong to another user.
    """
    own_ids = os.geteuid(), os.getegid()
    for name in names:
        try:
            state = os.lstat(f"{lower}/{name}")
        except OSError:
            continue
        if stat.S_ISDIR(state.st_mode) and (state.st_uid, state.st_gid) == own_ids:
            os.mkdir(f"{upper}/{name}")
            if (mode := stat.S_IMODE(state.st_mode)) != 0o755:
                os.chmod(f"{upper}/{name}", mode)


def overlay(lowerdirs: tuple[str, ...], upper: str, work: str, options: list[str], label: str = "") -> int:
    """Create an overlay as a detached mount; ``lowerdirs`` from top to bottom. Raises OSError.

    Without ``upper``, the overlay is read-only. ``label`` becomes the source of the mount. Long paths are passed as
    descriptors, which proc_pid_mountinfo(5) then shows. So the source of the mount also has the ends of the first long
    paths. Reference: the kernel's filesystems/overlayfs.
    """
    if not upper and len(lowerdirs) == 1:
        return bind(lowerdirs[0])
    with _ShortNames() as names:
        every = [f"lowerdir+={names.short(path)}" for path in lowerdirs]
        source = names.source(label)
        if upper:
            every += [f"upperdir={names.short(upper)}", f"workdir={names.short(work)}"]
        try:
            return mounting.mount_filesystem("overlay", source, options + every, _ATTRIBUTES)
        except OSError as e:
            if e.errno != errno.EINVAL:
                raise
    # Kernels before 6.7 lack lowerdir+: pass all directories in one option.
    return overlay_by_mount(lowerdirs, upper, work, options, label)


class _ShortNames:
    """Short names for directories, valid within the ``with`` block."""

    def __init__(self) -> None:
        self._ends: list[str] = []
        self._held: list[int] = []

    def __enter__(self) -> _ShortNames:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._held:
            os.close(fd)

    def short(self, path: str, limit: int = 255) -> str:
        """Return a name of at most ``limit`` bytes: ``path``, or a descriptor's name. fsconfig(2) accepts 255 bytes.

        The name has no backslash, because only some options of fsconfig(2) treat a backslash as a quote.
        """
        if len(os.fsencode(path)) <= limit and "\\" not in path:
            return path
        self._ends.append(os.fsdecode(os.fsencode(path)[-_MAX_PATH_END_BYTES:]))
        self._held.append(os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
        return f"/proc/self/fd/{self._held[-1]}"

    def source(self, label: str) -> str:
        """Return the source for the overlay: the label and the ends of the first long paths."""
        ends = self._ends[: 2 if label else 3]  # at most 255 bytes in all
        return ":".join(filter(None, (label[:_MAX_LABEL_BYTES], *ends))) or "overlay"


def overlay_by_mount(lowerdirs: tuple[str, ...], upper: str, work: str, options: list[str], label: str = "") -> int:
    """Do the same as overlay() with mount(2). Raises OSError."""
    with _ShortNames() as names:
        limit = _MOUNT_OPTIONS_BYTES // (len(lowerdirs) + 3) - 1  # all options together must fit into a page
        joined = ":".join(escape(names.short(path, limit)) for path in lowerdirs)
        source = names.source(label)
        every = [*options, f"lowerdir={joined}"]
        if upper:
            every += [f"upperdir={escape(names.short(upper, limit))}", f"workdir={escape(names.short(work, limit))}"]
        return _overlay_by_mount(source, ",".join(every), lowerdirs[0])


def _overlay_by_mount(source: str, data: str, over: str) -> int:
    """Create an overlay by mount(2), whose options may fill a page, and return it as a detached mount."""
    linux.mount(source, over, "overlay", linux.MS_NOSUID | linux.MS_NODEV, data)
    with linux.open_tree(linux.AT_FDCWD, over, linux.OPEN_TREE_CLOEXEC) as mounted:
        tree = linux.open_tree(mounted, "", linux.OPEN_TREE_CLOEXEC | linux.OPEN_TREE_CLONE | linux.AT_EMPTY_PATH)
        linux.umount2(f"/proc/self/fd/{mounted}", linux.MNT_DETACH)
    return tree


def escape(path: str) -> str:
    """Escape a path for the options of an overlay, where ``:`` and ``,`` are separators."""
    return path.replace("\\", "\\\\").replace(":", "\\:").replace(",", "\\,")


def bind(directory: str) -> int:
    """Clone a directory with the mounts beneath it as a detached mount."""
    flags = linux.OPEN_TREE_CLONE | linux.OPEN_TREE_CLOEXEC | linux.AT_RECURSIVE
    with linux.open_tree(linux.AT_FDCWD, directory, flags) as tree:
        linux.mount_setattr(tree, "", linux.AT_EMPTY_PATH, _ATTRIBUTES, 0, 0)
        return tree.keep()


def lend(root: str) -> int:
    """Clone the root mount without the mounts beneath it. Call this before seal(), and before mounts are locked.

    Two overlays with one upperdir have undefined behaviour, but one overlay can be mounted twice: the kernel's
    filesystems/overlayfs, "Sharing and copying layers". Returns -1 for a plain directory in which the host has mounts,
    because a clone cannot leave them out. Raises OSError.
    """
    try:
        return linux.open_tree(linux.AT_FDCWD, root, linux.OPEN_TREE_CLONE | linux.OPEN_TREE_CLOEXEC)
    except OSError as e:
        if e.errno != errno.EINVAL:
            raise
        return -1


def seal(root: str) -> None:
    """Make the root mount read-only; mounts beneath it keep their flags."""
    linux.mount_setattr(linux.AT_FDCWD, root, 0, linux.MOUNT_ATTR_RDONLY, 0, 0)


def switch(root: str) -> None:
    """Make ``root`` the root directory and drop the old one (pivot_root(2), "new_root and put_old may be the same").

    Raises NamespaceError, OSError.
    """
    os.chdir(root)
    try:
        linux.pivot_root(".", ".")
    except PermissionError as e:
        raise _refused("change the root directory", e) from e
    except OSError as e:
        if e.errno != errno.EINVAL or not is_on_initramfs():
            raise
        _cover_initramfs()
        return
    import_no_files()
    linux.umount2(".", linux.MNT_DETACH)
    os.chdir("/")


def is_on_initramfs() -> bool:
    """Return whether the root directory is the initial RAM file system, which pivot_root(2) cannot replace."""
    from enroot_py.base import mountinfo

    roots = [mount for mount in mountinfo.read() if mount.target == "/"]
    return bool(roots) and roots[-1].is_first


def _cover_initramfs() -> None:
    """Mount the working directory over / and make it the root, as switch_root(8) does. Raises OSError.

    chroot(2) alone confines no program, but a mount over / does: a path through "/", ".." or setns(2) ends at the
    topmost mount of /. Removing that mount needs CAP_SYS_ADMIN in the user namespace that owns the mount namespace. A
    program in a container lacks this capability, and namespaces that the program creates lock the mount:
    mount_namespaces(7).
    """
    linux.mount(".", "/", None, linux.MS_MOVE)
    import_no_files()
    os.chroot(".")
    os.chdir("/")


def import_no_files() -> None:
    """Stop importing modules from files. Call this before an image's files replace the node's.

    Otherwise this process could run a module of the image, with the node's descriptors and before it is confined.
    """
    sys.meta_path[:] = [BuiltinImporter, FrozenImporter]


def _refused(action: str, error: OSError) -> NamespaceError:
    """Return an error for a call that a seccomp filter or a security module forbids."""
    from enroot_py.runtime import pods

    return NamespaceError(f"cannot {action} in a user namespace: {error.strerror}", hint=pods.advice(error))


def _advice(error: OSError, upper: str) -> str:
    if error.errno == errno.ENODEV:
        return f"the kernel of {os.uname().nodename} has no overlayfs: modprobe overlay"
    if error.errno == errno.EPERM:
        return f"overlayfs needs Linux {linux.FLOOR} or later without root; this is {os.uname().release}"
    if error.errno == errno.EINVAL:
        from enroot_py.runtime import pods

        if pods.is_on_overlay(upper):
            return f"{upper} {pods.ON_OVERLAY}, and cannot hold changes: {pods.volume('ENROOT_DATA_PATH')}"
        return f"{upper} cannot hold changes (NFS and Lustre cannot): set ENROOT_DATA_PATH to a local file system"
    if error.errno in (errno.ENOENT, errno.ESTALE):
        return "a layer of the image is missing in the store: import the image again"
    return ""
