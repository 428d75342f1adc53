"""The record at the end of a squashfs file that an import wrote: the digest of the image, and a checksum of the file.

The record is a separate block after the file system. Readers of squashfs files ignore this block::

    penroot-import 1
    digest sha256:…
    size BYTES                 of the file without the record
    crc32 HEX                  of the file without the record

A file that was exported from a container, or modified by squashfs-tools, has no record. The checksum finds accidental
damage. Do not trust the digest: anyone who can write the file can write any digest. Therefore check() rejects a file
of another user in a sticky directory such as /tmp, where any user can create files.
"""

from __future__ import annotations

import os
import stat

from enroot_py.base import digests, superblock
from enroot_py.base.fds import Fd

_FIRST = b"penroot-import 1\n"
_BLOCK_BYTES = 4096  # mksquashfs pads files to blocks of this size


def append(fd: int, digest: str) -> None:
    """Add the record of the image ``digest`` to a squashfs file that is open. Raises OSError."""
    size = os.fstat(fd).st_size
    size += -size % _BLOCK_BYTES
    os.ftruncate(fd, size)
    data = _FIRST + f"digest {digest}\nsize {size}\ncrc32 {_checksum(fd, size):08x}\n".encode()
    data = data.ljust(_BLOCK_BYTES, b"\0")
    while data:  # a full disk may accept a part first
        written = os.pwrite(fd, data, size)
        data, size = data[written:], size + written


def digest_of(path: str) -> str:
    """Return the image digest that a squashfs file records, or "" without a record. Raises OSError."""
    with _opened(path) as fd:
        return _record(fd).get("digest", "")


def check(path: str) -> tuple[str, str]:
    """Return the image digest that a squashfs file records, and the file's fault ("is missing") or ""."""
    try:
        with _opened(path) as fd:
            fault, _ = superblock.fault(fd)
            record = _record(fd)
            if stranger := _stranger(fd, path):
                return "", f"belongs to uid {stranger}"
            if fault or not record:
                return "", fault or "has no image record"
            is_whole = _checksum(fd, int(record["size"])) == int(record["crc32"], 16)
            return record["digest"], "" if is_whole else "is damaged: checksum mismatch"
    except FileNotFoundError:
        return "", "is missing"
    except OSError as e:
        return "", f"cannot be read: {e.strerror}"


def _stranger(fd: int, path: str) -> int:
    """Return the owner of a file if another user may have created it in a sticky directory, else 0. Raises OSError."""
    owner, above = os.fstat(fd).st_uid, os.stat(os.path.dirname(path) or ".")
    return owner if above.st_mode & stat.S_ISVTX and owner not in (os.geteuid(), above.st_uid) else 0


def _opened(path: str) -> Fd:
    return Fd(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC))


def _record(fd: int) -> dict[str, str]:
    """Return the fields of the record, or {} for a missing or damaged record."""
    at = os.fstat(fd).st_size - _BLOCK_BYTES
    data = os.pread(fd, _BLOCK_BYTES, at) if at > 0 else b""
    if not data.startswith(_FIRST):
        return {}
    lines = data[len(_FIRST) :].rstrip(b"\0").decode("ascii", "replace").splitlines()
    fields = dict(line.partition(" ")[::2] for line in lines)
    is_record = digests.is_digest(fields.get("digest", "")) and fields.get("size") == str(at)
    return fields if is_record and _is_hex(fields.get("crc32", "")) else {}


def _is_hex(text: str) -> bool:
    return len(text) == 8 and not set(text) - set("0123456789abcdef")


def _checksum(fd: int, size: int) -> int:
    from enroot_py.base.compression import crc32

    crc = at = 0
    while at < size and (data := os.pread(fd, min(1 << 20, size - at), at)):
        crc = crc32(data, crc)
        at += len(data)
    return crc
