"""Check squashfs images by their superblock. Starts of squashfs images import this module."""

from __future__ import annotations

import os

from enroot_py.base import superblock
from enroot_py.base.errors import ImageError


def check(path: str, offset: int = 0) -> None:
    """Check the superblock. Raises ImageError for a file that is truncated or is not a squashfs image."""
    try:
        with open(path, "rb", buffering=0, opener=_open_at_once) as f:
            problem, hint = superblock.fault(f.fileno(), offset)
            if not problem:
                problem, hint = superblock.compression_fault(f.fileno(), offset)
    except OSError as e:
        missing = isinstance(e, (FileNotFoundError, NotADirectoryError))
        hint = (
            f"it must exist on the node {os.uname().nodename}" if missing else "use a squashfs file that you can read"
        )
        raise ImageError(f"cannot read the image {path}: {e.strerror}", hint=hint) from e
    _refuse(path, problem, hint)


def check_open(fd: int, path: str) -> None:
    """Check the superblock of an open regular file. Raises ImageError, OSError."""
    _refuse(path, *superblock.fault(fd))


def _refuse(path: str, problem: str, hint: str) -> None:
    if problem:
        raise ImageError(f"the image {path} {problem}", hint=hint)


def _open_at_once(path: str, flags: int) -> int:
    """Open without waiting for the writer of a FIFO; a FIFO without a writer reads as empty."""
    return os.open(path, flags | os.O_NONBLOCK)


def checksum(path: str) -> str:
    """Return the SHA-256 of an image file. Raises OSError."""
    from hashlib import sha256

    checksum = sha256()
    with open(path, "rb", buffering=0) as f:
        while data := f.read(1 << 20):
            checksum.update(data)
    return checksum.hexdigest()
