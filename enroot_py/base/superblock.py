"""Read the superblock of a squashfs file, to check that the file is squashfs and complete.

Sources: the kernel's squashfs documentation, "SQUASHFS FILESYSTEM DESIGN", and
fs/squashfs/squashfs_fs.h. On the start path, so this module imports only os.
"""

from __future__ import annotations

import os

SIZE_BYTES = 96
_MAGIC = b"hsqs"
_LAST_COMPRESSION = 6  # zstd
# If root is the only owner, the ID table has this metadata block: a header (size 4, flag "not compressed"), and the
# ID 0. No program compresses a block of four bytes.
_ONLY_ROOT = b"\x04\x80" + bytes(4)


def fault(fd: int, offset: int = 0) -> tuple[str, str]:
    """Return the fault of a newly opened squashfs file, and the fix. Both are "" if the file has no fault.

    The squashfs begins at ``offset``: in a bundle (features/bundle), other data precedes it. Raises OSError.
    """
    try:
        block, size = (
            os.pread(fd, SIZE_BYTES, offset) if offset else os.read(fd, SIZE_BYTES),
            os.fstat(fd).st_size - offset,
        )
    except BlockingIOError:  # a FIFO whose writer writes nothing
        block, size = b"", 0
    if block[:4] != _MAGIC:
        return "is not a squashfs file", "make one with penroot import or mksquashfs"
    again = "import or copy it again"
    if len(block) < SIZE_BYTES:
        return f"is truncated: {size} bytes", again
    major = int.from_bytes(block[28:30], "little")
    if major != 4:
        return f"is squashfs {major}, not 4", "write it again with a current mksquashfs"
    used = int.from_bytes(block[40:48], "little")
    return (f"is truncated: {size} of {used} bytes", again) if used > size else ("", "")


def compression_fault(fd: int, offset: int = 0) -> tuple[str, str]:
    """Return the fault and the fix if the compression of a squashfs file is unknown. Both are "" if it is known.

    Raises OSError.
    """
    compression = int.from_bytes(os.pread(fd, 2, offset + 20), "little")
    if 1 <= compression <= _LAST_COMPRESSION:
        return "", ""
    return f"has the unknown compression {compression}", "write it again: mksquashfs -comp lz4"


def is_all_root(fd: int, offset: int = 0) -> bool:
    """Return whether user and group of every file in the squashfs at ``offset`` are root. Raises OSError."""
    block = os.pread(fd, SIZE_BYTES, offset)
    if int.from_bytes(block[26:28], "little") != 1:  # number of distinct IDs
        return False
    index = os.pread(fd, 8, offset + int.from_bytes(block[48:56], "little"))
    return os.pread(fd, len(_ONLY_ROOT), offset + int.from_bytes(index, "little")) == _ONLY_ROOT
