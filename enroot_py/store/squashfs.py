"""Squashfs images: the superblock says whether a file is one, and all of it.

Sources: the kernel's squashfs documentation, "SQUASHFS FILESYSTEM DESIGN", and
fs/squashfs/squashfs_fs.h. On the start path: no import here but os.
"""

from __future__ import annotations

import os

from enroot_py.base.errors import ImageError

SUPERBLOCK = 96  # bytes
_MAGIC = b"hsqs"


def check(path: str) -> None:
    """Look at the superblock. Raises ImageError for a file that is no squashfs image, or not all of one."""
    try:
        with open(path, "rb", buffering=0, opener=_open_at_once) as f:
            block = f.read(SUPERBLOCK) or b""
            size = os.fstat(f.fileno()).st_size
    except OSError as e:
        missing = isinstance(e, (FileNotFoundError, NotADirectoryError))
        hint = f"it must exist on the node {os.uname().nodename}" if missing else "give a squashfs file of your own"
        raise ImageError(f"cannot read the image {path}: {e.strerror}", hint=hint) from e
    if block[:4] != _MAGIC:
        raise ImageError(f"not a squashfs image: {path}", hint="penroot import makes one from a registry's image")
    if len(block) < SUPERBLOCK:
        raise ImageError(f"the image {path} is truncated: {size} bytes", hint="import or copy it again")
    major = int.from_bytes(block[28:30], "little")
    if major != 4:
        raise ImageError(
            f"the image {path} is squashfs {major}, not 4", hint="write it again with a current mksquashfs"
        )
    used = int.from_bytes(block[40:48], "little")
    if used > size:
        raise ImageError(f"the image {path} is truncated: {size} of {used} bytes", hint="import or copy it again")


def _open_at_once(path: str, flags: int) -> int:
    """An opener for open() that does not wait for a writer of a FIFO: without one it is empty."""
    return os.open(path, flags | os.O_NONBLOCK)


def checksum(path: str) -> str:
    """The SHA-256 of an image file. Raises OSError."""
    from hashlib import sha256

    checksum = sha256()
    with open(path, "rb", buffering=0) as f:
        while data := f.read(1 << 20):
            checksum.update(data)
    return checksum.hexdigest()
