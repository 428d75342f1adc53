"""Describe a mount as data, and execute it later beneath a container's root. fstab.py parses lines of fstab(5).

Options that mount(8) lacks: x-create=dir|file|auto creates the target, x-move and x-detach move and detach a mount.
"""

from __future__ import annotations

import errno
import os
import stat
from _collections_abc import Callable

from enroot_py.base import linux, paths
from enroot_py.base.errors import ConfigError, MountError
from enroot_py.base.fds import Fd
from enroot_py.config.words import nearest

_SET = {
    "ro": linux.MOUNT_ATTR_RDONLY,
    "nosuid": linux.MOUNT_ATTR_NOSUID,
    "nodev": linux.MOUNT_ATTR_NODEV,
    "noexec": linux.MOUNT_ATTR_NOEXEC,
    "noatime": linux.MOUNT_ATTR_NOATIME,
    "nodiratime": linux.MOUNT_ATTR_NODIRATIME,
    "strictatime": linux.MOUNT_ATTR_STRICTATIME,
}
# word -> the earlier word of the same line that it cancels. No word clears a flag that is locked in this mount
# namespace, mount_namespaces(7).
_UNSET = {"rw": "ro", "suid": "nosuid", "dev": "nodev", "exec": "noexec", "atime": "noatime", "diratime": "nodiratime"}
_PROPAGATION = {
    "shared": linux.MS_SHARED,
    "slave": linux.MS_SLAVE,
    "private": linux.MS_PRIVATE,
    "unbindable": linux.MS_UNBINDABLE,
}
_SPREADING = (*_PROPAGATION, *("r" + word for word in _PROPAGATION))
IGNORED = frozenset(
    "defaults auto noauto user nouser users nousers owner noowner group nogroup loud async relatime norelatime "
    "nostrictatime iversion noiversion mand nomand lazytime nolazytime".split()
)
_WORDS = frozenset(
    "bind rbind remount nofail silent x-move x-detach x-create=dir x-create=file x-create=auto sync dirsync".split()
)
KNOWN = frozenset((*_SET, *_UNSET, *_WORDS, *_SPREADING))

_SYNONYMS = {"readonly": "ro", "read-only": "ro", "writable": "rw"}  # words of other tools
SQUASHFS = "sqsh"  # a type that only penroot has
_OF_SQUASHFS = frozenset((*_SET, *_SPREADING, *"exec x-create=dir x-create=auto nofail silent".split()))

BIND = ("rbind", "x-create=auto")  # the default options of SOURCE:TARGET
_CHANGING = frozenset(("remount", "x-move", "x-detach"))
SEPARATORS = "a space in a path is \\040, a colon \\072"
TRUSTED = "if you trust the image, set ENROOT_IMAGE_FSTAB=host or use --mount"

# path of a squashfs file -> function that mounts the file and returns the directory (filled by data.py)
served: dict[str, Callable[[], str]] = {}


# target of each attached mount -> device and inode of the root of the mount
_attached: dict[str, tuple[int, int]] = {}


class LeftOut(OSError):
    """Raised to refuse a mount that an image requests. The container starts without the mount."""

    def __init__(self, why: str) -> None:
        super().__init__(errno.EXDEV, why)


class Mount:
    """One line of fstab; ``target`` is a path beneath the container's root.

    If the source lies beneath the container's root, ``inside`` is its path there, else "". A mount that the image
    requests is ``confined`` (see confine()). ``detached`` is the descriptor of an existing detached mount, or -1.
    """

    __slots__ = (
        "source",
        "target",
        "fstype",
        "options",
        "passno",
        "origin",
        "words",
        "attributes",
        "propagation",
        "data",
        "inside",
        "confined",
        "detached",
    )

    def __init__(
        self,
        source: str,
        target: str,
        fstype: str = "none",
        options: tuple[str, ...] = (),
        passno: int = 0,
        origin: str = "",
    ) -> None:
        self.source = source
        self.target = target
        self.fstype = fstype
        self.options = options
        self.passno = passno
        self.origin = origin
        self.attributes = 0
        self.propagation = 0
        self.inside = ""
        self.confined = False
        self.detached = -1
        self.words: set[str] = set()
        self.data: list[str] = []
        for word in options:
            bare = word.removeprefix("r")
            if word in _SET:
                self.attributes |= _SET[word]
            elif word in _UNSET:
                self.attributes &= ~_SET[_UNSET[word]]
            elif word in _WORDS:
                self.words.add(word)
            elif word in _PROPAGATION:
                self.propagation = _PROPAGATION[word]
            elif bare in _PROPAGATION:
                self.propagation = _PROPAGATION[bare]
                self.words.add("r-propagation")
            elif word not in IGNORED:
                self.data.append(word)
        if self.data and self.fstype == "none":
            suggestion = _SYNONYMS.get(self.data[0]) or nearest(self.data[0], KNOWN)
            hint = f"did you mean {suggestion}?" if suggestion else "known are " + ", ".join(sorted(KNOWN))
            raise ConfigError(f"{origin or self.describe()}: unknown mount option {self.data[0]!r}", hint=hint)
        if self.fstype == SQUASHFS:
            self._check_squashfs()

    def _check_squashfs(self) -> None:
        """Raise ConfigError for an option that does not work with the type sqsh."""
        self.words.add("x-create=dir")
        for word in self.options:
            if word not in _OF_SQUASHFS and word not in IGNORED:
                why = "is mounted read-only" if word == "rw" else f"cannot be mounted with {word!r}"
                hint = "options of sqsh are " + ", ".join(sorted(_OF_SQUASHFS))
                raise ConfigError(f"{self.origin or self.describe()}: a squashfs file {why}", hint=hint)

    def confine(self) -> None:
        """Restrict an image's mount to a tmpfs or a volume of the image. Raises ConfigError."""
        is_volume = self.binds and self.fstype == "none" and self.inside
        if not (is_volume or self.fstype == "tmpfs" and not self.binds) or self.words & _CHANGING:
            message = f"{self.origin}: an image may mount a tmpfs and its own directories, not {self.source!r}"
            raise ConfigError(message, hint=TRUSTED)
        self.confined = True
        self.attributes |= linux.MOUNT_ATTR_NOSUID | linux.MOUNT_ATTR_NODEV

    def describe(self) -> str:
        """Return the mount as one line of fstab."""
        fields = (self.source, self.target, self.fstype, ",".join(self.options) or "defaults", "0", str(self.passno))
        return " ".join(map(escape, fields))

    @property
    def _changeable(self) -> int:
        # A bind cannot change the flags for access times, which are locked in mounts from another user namespace.
        return self.attributes & ~(linux.MOUNT_ATTR__ATIME | linux.MOUNT_ATTR_NODIRATIME)

    @property
    def binds(self) -> bool:
        return "bind" in self.words or "rbind" in self.words

    def execute(self, root: int) -> None:
        """Execute this line beneath the directory ``root``, for fstab.execute(). Raises OSError, PenrootError."""
        if "x-detach" in self.words:
            with paths.open_mounted(root, self.target, _attached.get(self.target)) as mounted:
                linux.umount2(f"/proc/self/fd/{mounted}", linux.MNT_DETACH)
            return
        if self.inside and self.inside.strip("/") == self.target.strip("/"):
            os.close(self._target(root, 0o755))  # an image can lack the directory of its volume
        if "remount" in self.words or not self.creates:
            self._change(root)
            return
        if not self.confined and os.path.normpath("/" + self.target.lstrip("/")) == "/":
            raise _root_as_target()
        with self._create(root) as mount, self._open_target(root, mount) as target:
            if self.confined:
                self._check_confined(root, target)
            elif self.passno >= 0 and os.readlink(f"/proc/self/fd/{root}") == os.readlink(f"/proc/self/fd/{target}"):
                # The target is a link to /. The paths are compared, because fstat(2) could wait for a FUSE server.
                raise _root_as_target()
            attach(mount, target)
            _attached[self.target] = paths.inode(mount)

    def _check_confined(self, root: int, target: int) -> None:
        """Refuse to let an image cover a host mount such as /proc, or the root."""
        if os.path.sameopenfile(root, target):
            raise LeftOut("the target is the root directory")
        if not paths.is_own(root, target):
            raise LeftOut(f"{self.target} is mounted from {os.uname().nodename}")

    @property
    def _changes(self) -> bool:
        return "remount" in self.words or bool(self.propagation)

    @property
    def creates(self) -> bool:
        return self.binds or self.fstype != "none" or "x-move" in self.words

    def _change(self, root: int) -> None:
        """Change the flags or the propagation of an existing mount."""
        if self.source not in ("none", self.target) and not self._changes:
            raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))  # as mount(2) would
        with paths.open_in(root, self.target) as target:
            flags = linux.AT_EMPTY_PATH | (linux.AT_RECURSIVE if "r-propagation" in self.words else 0)
            linux.mount_setattr(target, "", flags, self._changeable, 0, self.propagation)

    def _create(self, root: int) -> Fd:
        """Create the mount without attaching it, and return its file descriptor."""
        if self.detached >= 0:
            return Fd(self.detached)
        if self.fstype == SQUASHFS:
            return self._open_tree(linux.AT_FDCWD, self._mount_squashfs(), 0)
        if not self.binds and "x-move" not in self.words:
            return mount_filesystem(self.fstype, self.source, self.data, self.attributes)
        if not self.inside:
            return self._open_tree(linux.AT_FDCWD, self.source, 0)
        with paths.open_in(root, self.inside) as source:
            if self.confined and not paths.is_own(root, source):
                raise LeftOut(f"{self.inside} is mounted from {os.uname().nodename}")
            return self._open_tree(source, "", linux.AT_EMPTY_PATH)

    def _mount_squashfs(self) -> str:
        """Mount a squashfs file for the container once, and return the directory. Raises PenrootError, OSError."""
        if self.source not in served:  # a server must start before this process enters the container's namespaces
            hint = "declare it with --mount, --container-mounts or in mounts.d; it cannot be added later"
            raise MountError(f"cannot mount {self.source} on {self.target}: the container exists already", hint=hint)
        return served[self.source]()

    def _open_tree(self, directory: int, path: str, empty: int) -> Fd:
        if "x-move" in self.words:
            return linux.open_tree(directory, path, linux.OPEN_TREE_CLOEXEC | empty)
        # A confined mount shows only a directory of the image, without mounts beneath it.
        recursive = linux.AT_RECURSIVE if "rbind" in self.words and not self.confined else 0
        clone = linux.OPEN_TREE_CLONE | linux.OPEN_TREE_CLOEXEC | empty
        try:
            tree = linux.open_tree(directory, path, clone | recursive)
        except OSError as e:
            # Locked submounts cannot be left out of a clone, mount_namespaces(7).
            if recursive or e.errno != errno.EINVAL:
                raise
            recursive = linux.AT_RECURSIVE
            tree = linux.open_tree(directory, path, clone | recursive)
        with tree:
            if self._changeable or self.propagation:
                flags = linux.AT_EMPTY_PATH | recursive
                linux.mount_setattr(tree, "", flags, self._changeable, 0, self.propagation)
            return tree.keep()

    def _open_target(self, root: int, mount: int) -> Fd:
        """Open the target of ``mount``. A mounted file covers a symlink itself, not the file to which it points."""
        if not stat.S_ISDIR(os.fstat(mount).st_mode):
            try:
                return paths.open_in(root, self.target, os.O_PATH | os.O_NOFOLLOW)
            except FileNotFoundError:
                pass
        return self._target(root)

    def _target(self, root: int, mode: int = 0) -> Fd:
        """Open the target. With x-create, create a missing target.

        By default, a created target has no permissions (mode 0), as in enroot: `penroot export` thereby recognises that
        the target is not part of the image. In a directory of the host, create no target for an image's mount, and none
        through a symlink.
        """
        for word in self.words:
            if word.startswith("x-create="):
                kind = word.removeprefix("x-create=")
                directory = kind == "dir" or (kind == "auto" and self._source_is_directory(root))
                make = paths.make_directory if directory else paths.make_file
                return make(root, self.target, mode, named=not self.confined)
        return paths.open_in(root, self.target)

    def _source_is_directory(self, root: int) -> bool:
        if not self.binds:
            return True
        if not self.inside:
            return stat.S_ISDIR(os.stat(self.source).st_mode)
        with paths.open_in(root, self.inside) as source:
            return stat.S_ISDIR(os.fstat(source).st_mode)


def _root_as_target() -> OSError:
    """Return the error for a mount that would cover all earlier mounts."""
    return OSError(errno.EBUSY, "the target is the root directory of the container")


def attach(mount: int, target: int) -> None:
    """Attach a detached mount to an open file or directory. Raises OSError."""
    try:
        linux.move_mount(mount, "", target, "", linux.MOVE_MOUNT_F_EMPTY_PATH | linux.MOVE_MOUNT_T_EMPTY_PATH)
    except OSError as e:
        is_directory = stat.S_ISDIR(os.fstat(target).st_mode)
        if is_directory == stat.S_ISDIR(os.fstat(mount).st_mode):
            raise
        if is_directory:  # the kernel returns EINVAL in both cases
            raise IsADirectoryError(errno.EISDIR, "the target is a directory, but the source is not") from e
        raise NotADirectoryError(errno.ENOTDIR, "the target is a file, but the source is a directory") from e


def attach_at(mount: int, path: str) -> None:
    """Attach a detached mount to a path and close its descriptor. Raises OSError."""
    with Fd(mount):
        linux.move_mount(mount, "", linux.AT_FDCWD, path, linux.MOVE_MOUNT_F_EMPTY_PATH)


def mount_filesystem(fstype: str, source: str, options: list[str], attributes: int) -> Fd:
    """Create a file system, and return its detached mount as a file descriptor.

    ``options`` are ``key=value`` or flags. Raises OSError with the kernel's message, if there is one: fsopen(2),
    "Message retrieval".
    """
    with linux.fsopen(fstype, linux.FSOPEN_CLOEXEC) as context:
        try:
            linux.fsconfig(context, linux.FSCONFIG_SET_STRING, "source", source)
            for option in options:
                key, equals, value = option.partition("=")
                if equals:
                    linux.fsconfig(context, linux.FSCONFIG_SET_STRING, key, value)
                else:
                    linux.fsconfig(context, linux.FSCONFIG_SET_FLAG, key, None)
            linux.fsconfig(context, linux.FSCONFIG_CMD_CREATE, None, None)
            return linux.fsmount(context, linux.FSMOUNT_CLOEXEC, attributes)
        except OSError as e:
            try:
                message = os.read(context, 4096).decode(errors="replace").split(" ", 1)[-1].strip()
            except OSError:
                raise e from None
            raise OSError(e.errno, f"{e.strerror} ({message})") from e


def escape(field: str) -> str:
    """Write special characters of a field in octal: those of fstab(5), and ``$`` because parse() expands it."""
    return "".join(c if c > " " and c not in "\\$\x7f" else f"\\{ord(c):03o}" for c in field)
