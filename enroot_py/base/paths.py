"""Resolve paths beneath a root, so that no symlink and no ``..`` of an image leads outside.

``root`` is an open directory. Paths are resolved as after chroot(2) into it, by openat2(2) with RESOLVE_IN_ROOT.

Directories of the host ("host trees") are mounted beneath the root too. An image may have symlinks into them, such as
/etc -> /dev/shm, or a link to /proc/self/environ. Therefore these functions read and create files only on the root's
mount or on a tmpfs of the container. A read, or a call with ``named``, may use a path in a host tree if no component of
the path is a symlink, because then the user chose the path, not the image.
"""

from __future__ import annotations

import errno
import os
import stat

from enroot_py.base import linux, trusted
from enroot_py.base.errors import ContainerError
from enroot_py.base.fds import Fd

_MAXSYMLINKS = 40  # path_resolution(7)
_MAX_FILE_BYTES = 16 << 20  # limit for reading a file of an image into memory, such as /etc/passwd
_MAX_SKELETON_FILES = 2000
_OPEN = os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def open_in(root: int, path: str, flags: int = os.O_PATH, resolve: int = 0) -> Fd:
    """Open ``path`` beneath ``root``. ``resolve`` adds restrictions of openat2(2). Raises OSError."""
    resolve |= linux.RESOLVE_IN_ROOT
    return linux.openat2(root, path.lstrip("/") or ".", flags | os.O_CLOEXEC, 0, resolve)


def inode(fd: int) -> tuple[int, int]:
    """Return the device and inode number of an open file."""
    state = os.fstat(fd)
    return state.st_dev, state.st_ino


def open_mounted(root: int, path: str, known: tuple[int, int] | None) -> Fd:
    """Open ``path``, where something is mounted. Follow symlinks only if the opened file has the inode() ``known``.

    Raises OSError.
    """
    try:
        return open_in(root, path, os.O_PATH, linux.RESOLVE_NO_SYMLINKS)
    except OSError as e:
        if e.errno != errno.ELOOP:
            raise
    with open_in(root, path) as mounted:
        if inode(mounted) != known:
            raise OSError(errno.EXDEV, "a symlink of the image leads to another mount")
        return mounted.keep()


def exists(root: int, path: str) -> bool:
    try:
        with open_in(root, path):
            return True
    except OSError:
        return False


def version(status: os.stat_result) -> tuple[int, ...]:
    """Return the fields of inode(7) that change when a file is written or replaced."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def state(root: int, path: str) -> tuple[int, ...]:
    """Return version() of the file ``path`` beneath ``root``, or () if the file is missing."""
    try:
        with open_in(root, path) as fd:
            status = os.fstat(fd)
            return version(status)
    except OSError:
        return ()


class Foreign(OSError):
    """A container path that leads into a host mount, where no file may be read or created."""

    def __init__(self, path: str) -> None:
        super().__init__(errno.EXDEV, f"it leads into a mount of {os.uname().nodename}", path)


def is_own(root: int, fd: int) -> bool:
    """Return whether an open file is on the mount of ``root``, on a volume, or on a tmpfs of the container.

    A volume is a bind mount of a directory in the container. A tmpfs of the container is mounted only beneath ``root``.
    Call this only outside the container, because it trusts /proc.
    """
    number, base_number = _mount_id(fd), _mount_id(root)
    if number == base_number:
        return True
    from enroot_py.base import mountinfo

    mounted = {mount.number: mount for mount in mountinfo.read()}
    if number not in mounted or base_number not in mounted:
        return False
    mount, base = mounted[number], mounted[base_number]
    if mount.device == base.device:  # a volume
        return _is_beneath(mount.root, base.root)
    shown = (each.target for each in mounted.values() if each.device == mount.device)
    return mount.fstype == "tmpfs" and all(_is_beneath(target, base.target) for target in shown)


def _mount_id(fd: int) -> int:
    with open(f"/proc/self/fdinfo/{fd}", "rb") as f:
        return int(f.read().partition(b"mnt_id:")[2].split()[0])


def _is_beneath(path: str, directory: str) -> bool:
    return path == directory or path.startswith(directory.rstrip("/") + "/")


def check_own(root: int, path: str, *, named: bool = False, entered: bool = False) -> bool:
    """Return whether the existing ``path`` belongs to the container.

    For a path in a host mount, return False if ``named`` is set and no component is a symlink; otherwise raise Foreign.
    Set ``entered`` in a process that has entered the container, because /proc is not trusted there. Raises OSError.
    """
    try:
        with open_in(root, path, os.O_PATH, linux.RESOLVE_NO_XDEV):
            return True
    except OSError as e:
        if e.errno != errno.EXDEV:
            raise
    if not entered:
        with open_in(root, path) as fd:
            if is_own(root, fd):
                return True
    try:
        if named:
            with open_in(root, path, os.O_PATH, linux.RESOLVE_NO_SYMLINKS):
                return False
    except OSError as e:
        if e.errno != errno.ELOOP:
            raise
    raise Foreign(path)


def open_regular(root: int, path: str, flags: int = os.O_RDONLY) -> int:
    """Open a regular file beneath ``root`` without blocking on a FIFO and without opening a device.

    Refuses a host file that a symlink leads to, and any host file for writing. Raises OSError.
    """
    try:
        # The root's mount is nodev: no device can be opened there.
        fd = open_in(root, path, flags | _OPEN, linux.RESOLVE_NO_XDEV)
    except OSError as e:
        if e.errno != errno.EXDEV:
            raise
        check_own(root, path, named=flags & os.O_ACCMODE == os.O_RDONLY)
        os.close(trusted.regular(open_in(root, path), path))  # O_PATH first: opening a device can have side effects
        fd = open_in(root, path, flags | _OPEN)
    return trusted.regular(fd, path)


def read(root: int, path: str, limit: int = _MAX_FILE_BYTES) -> bytes:
    """Read a regular file of at most ``limit`` bytes beneath ``root``. Raises OSError like open_regular()."""
    with Fd(open_regular(root, path)) as fd:
        content = fd.content(limit + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"is larger than {limit >> 20} MiB", path)
    return content


def text(root: int, path: str) -> str:
    """Return the text of an optional file of the image, such as /etc/rc; "" if missing. Raises ContainerError."""
    try:
        return os.fsdecode(read(root, path))
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as e:
        message = f"cannot read {path} of the image: {e.strerror}"
        raise ContainerError(message, hint=f"mount another file over it: penroot start --mount FILE:{path}") from e


def make_directory(root: int, path: str, mode: int = 0o755, *, named: bool = False, entered: bool = False) -> Fd:
    """Open the directory ``path`` beneath ``root`` with O_PATH. Create missing directories of ``path``.

    Creates the target of a dangling symlink. Creates nothing in a directory for which check_own() raises Foreign.
    Raises OSError.
    """
    return _Maker(root, named=named, entered=entered).make(path, mode, directory=True)


def make_file(root: int, path: str, mode: int = 0o755, *, named: bool = False, entered: bool = False) -> Fd:
    """Open the file ``path`` beneath ``root`` with O_PATH, or create it: see make_directory(). Raises OSError."""
    return _Maker(root, named=named, entered=entered).make(path, mode, directory=False)


class _Maker:
    """Create the missing components of a path beneath a root, by the rules of check_own()."""

    def __init__(self, root: int, *, named: bool, entered: bool) -> None:
        self._root = root
        self._named = named
        self._entered = entered

    def make(self, path: str, mode: int, *, directory: bool, depth: int = 0) -> Fd:
        try:
            return open_in(self._root, path)
        except FileNotFoundError:
            pass
        if depth > _MAXSYMLINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        above, _, name = path.strip("/").rpartition("/")
        if name == "..":
            raise OSError(errno.EXDEV, "'..' leads through a directory that does not exist", path)
        with self.make(above or ".", 0o755, directory=True, depth=depth + 1) as parent:
            if not check_own(self._root, above, named=self._named, entered=self._entered):
                mode |= 0o755  # in a host tree: the new entry outlives the container, so make it accessible
            try:
                if directory:
                    os.mkdir(name, mode, dir_fd=parent)
                else:
                    os.mknod(name, stat.S_IFREG | mode & 0o666, dir_fd=parent)
            except FileExistsError:
                try:
                    target = os.readlink(name, dir_fd=parent)
                except OSError:
                    return open_in(self._root, path)  # another process has created it meanwhile
                follower = _Maker(self._root, named=False, entered=self._entered)
                target = target if target.startswith("/") else f"{above}/{target}"
                return follower.make(target, mode, directory=directory, depth=depth + 1)
            return Fd(os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent))


def copy(root: int, source: str, target: str) -> None:
    """Copy the content of the directory ``source`` into the new directory ``target``, both beneath ``root``.

    For /etc/skel: copies files, directories and symlinks up to fixed limits. Raises OSError.
    """
    check_own(root, source)
    pending, room, number = [""], _MAX_FILE_BYTES, 0
    while pending:
        place = pending.pop()
        with open_in(root, source + place, os.O_RDONLY | os.O_DIRECTORY) as directory:
            for name in sorted(os.listdir(directory)):
                path, state = f"{place}/{name}", os.stat(name, dir_fd=directory, follow_symlinks=False)
                number += 1
                if number > _MAX_SKELETON_FILES or path.count("/") > _MAXSYMLINKS or state.st_size > room:
                    raise OSError(errno.EFBIG, "it is too large to copy", source)
                if stat.S_ISDIR(state.st_mode):
                    os.close(make_directory(root, target + path, state.st_mode & 0o777 | 0o700))
                    pending.append(path)
                elif stat.S_ISLNK(state.st_mode):
                    _link(root, os.readlink(name, dir_fd=directory), target + path)
                elif stat.S_ISREG(state.st_mode):
                    write(root, target + path, read(directory, name), state.st_mode & 0o777)
                    room -= state.st_size


def _link(root: int, content: str, path: str) -> None:
    above, _, name = path.rpartition("/")
    with make_directory(root, above) as parent:
        check_own(root, above)
        try:
            os.symlink(content, name, dir_fd=parent)
        except FileExistsError:
            pass


def foreign_group(error: BaseException) -> str:
    """Return a hint for EOVERFLOW, the error for a group that the container's user namespace does not map, else ""."""
    if not isinstance(error, OSError) or error.errno != errno.EOVERFLOW:
        return ""
    fix = "run newgrp GROUP, or use $(id -g) in ENROOT_CACHE_PATH and ENROOT_DATA_PATH"
    return f"the files of the image or container belong to another group than this process: {fix}"


def write(root: int, path: str, content: bytes, mode: int = 0o644) -> None:
    """Write a file beneath ``root`` by rename, so that a reader sees the old or the new content.

    Raises OSError, also for a path in a host tree.
    """
    above, _, name = path.strip("/").rpartition("/")
    # The same temporary name for all files, because each new name costs a request to the FUSE server.
    temporary = f".penroot.{os.getpid()}"
    with make_directory(root, above or ".") as parent:
        check_own(root, above)
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode, dir_fd=parent)
        try:
            with Fd(fd):
                while content:
                    content = content[os.write(fd, content) :]
            os.rename(temporary, name, src_dir_fd=parent, dst_dir_fd=parent)
        except BaseException:
            os.unlink(temporary, dir_fd=parent)
            raise
