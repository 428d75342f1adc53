"""Paths beneath a root: no symlink and no ``..`` of an image leads outside.

Every function takes ``root``, an open directory, and resolves with openat2(2)
RESOLVE_IN_ROOT, as chroot(2) would.
"""

import errno
import os
import stat

from enroot_py import linux

_MAXSYMLINKS = 40  # path_resolution(7)
_LARGEST = 16 << 20  # bytes of a file of an image that is read into memory, as its /etc/passwd


def open_in(root: int, path: str, flags: int = os.O_PATH, mode: int = 0) -> int:
    """Open ``path`` beneath ``root``. Raises OSError."""
    return linux.openat2(root, path.lstrip("/") or ".", flags | os.O_CLOEXEC, mode, linux.RESOLVE_IN_ROOT)


def exists(root: int, path: str) -> bool:
    try:
        os.close(open_in(root, path))
    except OSError:
        return False
    return True


def read(root: int, path: str, limit: int = _LARGEST) -> bytes:
    """The content of a regular file beneath ``root``, of up to ``limit`` bytes. Raises OSError.

    Nothing is waited for, as a FIFO would have it, and no device is read.
    """
    fd = open_in(root, path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    with open(fd, "rb") as f:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "is not a regular file", path)
        content = f.read(limit + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"is larger than {limit >> 20} MiB", path)
    return content


def create(root: int, path: str, *, directory: bool, mode: int = 0o755, _depth: int = 0) -> int:
    """Open ``path`` beneath ``root`` with O_PATH; make it, with ``mode``, and its parents where they are missing.

    A dangling symlink is followed: what it points to is made. Raises OSError.
    """
    try:
        return open_in(root, path)
    except FileNotFoundError:
        pass
    if _depth > _MAXSYMLINKS:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
    parent_path, _, name = path.strip("/").rpartition("/")
    if name == "..":
        raise OSError(errno.EXDEV, "'..' leads through a directory that does not exist", path)
    parent = create(root, parent_path or ".", directory=True, _depth=_depth + 1)
    try:
        try:
            if directory:
                os.mkdir(name, mode, dir_fd=parent)
            else:
                os.mknod(name, stat.S_IFREG | mode & 0o666, dir_fd=parent)
        except FileExistsError:
            try:
                target = os.readlink(name, dir_fd=parent)
            except OSError:
                return open_in(root, path)  # somebody else made it in the meantime
            if not target.startswith("/"):
                target = f"{parent_path}/{target}"
            return create(root, target, directory=directory, mode=mode, _depth=_depth + 1)
        return os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    finally:
        os.close(parent)


def foreign_group(error: BaseException) -> str:
    """The way out where ``error`` means a group that the container's user namespace has not, which has one; else ""."""
    if not isinstance(error, OSError) or error.errno != errno.EOVERFLOW:
        return ""
    way_out = "newgrp to that, or give each group its own: $(id -g) in ENROOT_CACHE_PATH and ENROOT_DATA_PATH"
    return f"the files of the image or container are of another group than this process: {way_out}"


def write(root: int, path: str, content: bytes, mode: int = 0o644) -> None:
    """Put a file beneath ``root`` by rename, so that a reader sees the old or the new one. Raises OSError."""
    parent_path, _, name = path.strip("/").rpartition("/")
    parent = create(root, parent_path or ".", directory=True)
    temporary = f".{name}.{os.getpid()}"
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode, dir_fd=parent)
        try:
            with open(fd, "wb") as f:
                f.write(content)
            os.rename(temporary, name, src_dir_fd=parent, dst_dir_fd=parent)
        except BaseException:
            os.unlink(temporary, dir_fd=parent)
            raise
    finally:
        os.close(parent)
