"""Split a layer's blob into tar entries while it is decompressed and hashed.

Sources: pax(1) of POSIX ("ustar Interchange Format", "pax Header Block"); GNU tar's
manual, "Basic Tar Format" and "Sparse Formats".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from struct import Struct

from enroot_py.base.compression import Decompressed, adler32
from enroot_py.base.errors import ImageError

_BLOCK_BYTES = 512
_ZEROS = bytes(_BLOCK_BYTES)
# name mode+uid+gid size mtime typeflag linkname magic+version devmajor devminor prefix
_HEADER = Struct("100s 24s 12s 12s 8x c 100s 8s 64x 8s 8s 155s 12x")
_NO_PAX: Mapping[bytes, bytes] = {}
_MAX_SHOWN_CHARS = 400  # length of a name in a message
_MAX_EXTENSION_BYTES = 4 << 20  # one pax header or GNU long name
_MAX_SEGMENTS = 1 << 19  # segments of a sparse file
_MAX_GLOBAL_RECORDS = 1000  # pax records for all entries: git archive writes one


class Tar(Decompressed):
    """A tar stream read once, with the hashes of the blob and the tar. Use it in a ``with``."""

    def entries(self) -> Iterator[Entry]:
        """Yield each entry. The caller may read the entry's data before it asks for the next entry."""
        global_pax: Mapping[bytes, bytes] = _NO_PAX  # pax "g": for all later entries
        entry_pax: Mapping[bytes, bytes] = _NO_PAX  # pax "x" and GNU long names: for the next entry only
        long_name = long_link = None
        while True:
            block = self.read(_BLOCK_BYTES)
            if len(block) < _BLOCK_BYTES:
                if block.strip(b"\0"):
                    raise self.truncated()
                return
            if block == _ZEROS:
                return
            _check_sum(block, self.size)
            kind = block[156:157]
            if kind in b"xgLK":
                size = _number(block[124:136])
                if not 0 <= size <= _MAX_EXTENSION_BYTES:
                    raise ImageError(f"bad tar extension header: {size} bytes, the limit is {_MAX_EXTENSION_BYTES}")
                data = self.exactly(size)
                self.exactly(-size % _BLOCK_BYTES)
                if kind == b"x":
                    entry_pax = dict(_pax(data))
                elif kind == b"g":
                    global_pax = {**global_pax, **dict(_pax(data))}
                    if len(global_pax) > _MAX_GLOBAL_RECORDS:  # each entry gets a copy of all
                        raise ImageError(f"more than {_MAX_GLOBAL_RECORDS} global pax records in the layer's tar")
                elif kind == b"L":
                    long_name = data.split(b"\0", 1)[0]
                else:
                    long_link = data.split(b"\0", 1)[0]
                continue
            entry = _entry(
                block,
                _effective_pax(global_pax, entry_pax) if global_pax or entry_pax else _NO_PAX,
                long_name,
                long_link,
            )
            entry_pax, long_name, long_link = _NO_PAX, None, None
            if kind == b"S":
                _old_sparse(entry, block, self.exactly)  # the entry's size does not include these headers
            before = self.position()
            if entry.pax and entry.pax.get(b"GNU.sparse.major") == b"1":
                _sparse_map_in_data(entry, self.exactly)
            yield entry
            stored_bytes = entry.stored_bytes
            if stored_bytes:
                left = stored_bytes - (self.position() - before)
                if left < 0:
                    raise ImageError(f"{shown(entry.path)}: the sparse map is longer than the data")
                self.skip(left)
                # Skip the padding. At the end of the tar it may be missing: umoci insert omits it, and Go's reader
                # accepts this.
                self.read(-stored_bytes % _BLOCK_BYTES)


@dataclass(slots=True)
class Entry:
    """One entry of a tar. ``path`` is as written in the tar.

    ``size`` is the size of the file. ``stored_bytes`` is the number of its bytes in the tar, which differs for a sparse
    file.
    """

    path: bytes
    kind: bytes
    mode: int
    uid: int
    gid: int
    mtime: int  # nanoseconds
    size: int
    stored_bytes: int
    link: bytes
    device: tuple[int, int]
    pax: Mapping[bytes, bytes]
    segments: list[tuple[int, int]] | None = None  # of a sparse file: (offset, length)

    def xattrs(self) -> Iterator[tuple[bytes, bytes]]:
        for key, value in self.pax.items():
            if key.startswith(b"SCHILY.xattr."):
                yield key[len(b"SCHILY.xattr.") :], value


def shown(path: bytes) -> str:
    """Return a name for a message, on one line and shortened."""
    text = "/" + path.lstrip(b"/").decode("utf-8", "backslashreplace").replace("\n", "\\n")
    half = _MAX_SHOWN_CHARS // 2
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:half]}…{text[-half:]}"


def _check_sum(block: bytes, at: int) -> None:
    field = block[148:156]
    # The low half of Adler-32 is 1 plus the sum of all bytes, modulo 65521: RFC 1950. It is ten times as fast as sum().
    if (adler32(block) - 1 - _expected_sum(field)) & 0xFFFF == 0:
        return
    expected = _number(field)
    unsigned = sum(block) - sum(field) + 8 * 32
    if expected != unsigned and expected != unsigned - 256 * sum(b > 127 for b in block[:148] + block[156:]):
        raise ImageError(f"the layer is not a tar: bad header checksum before byte {at}")


@lru_cache(4096)
def _expected_sum(field: bytes) -> int:
    """Return the sum that the bytes of a header with this checksum field must have.

    The checksum counts the field as eight spaces. The returned sum counts the field's bytes.
    """
    return _number(field) + sum(field) - 8 * 32


@lru_cache(4096)
def _mode_and_owner(fields: bytes) -> tuple[int, int, int]:
    return _number(fields[:8]) & 0o7777, _number(fields[8:16]), _number(fields[16:])


@lru_cache(4096)
def _number(raw: bytes) -> int:
    """Parse a number: in base 256 (GNU and star) if the first byte is 0x80 or 0xFF, else octal."""
    if raw[0] == 0x80:
        return int.from_bytes(raw[1:], "big")
    if raw[0] == 0xFF:
        return int.from_bytes(raw, "big", signed=True)
    digits = raw.lstrip(b"\0 ").split(b"\0", 1)[0].rstrip(b" ")  # some writers align fields to the right
    if digits.strip(b"01234567"):
        raise ImageError(f"the layer is not a tar: bad number {digits!r} in a header")
    return int(digits or b"0", 8)


def _decimal(raw: bytes) -> int:
    if not raw.isdigit() or len(raw) > 20:
        raise ImageError(f"bad number {raw[:32]!r} in a pax header")
    return int(raw)


def _pax(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the records ``LENGTH KEY=VALUE\\n``. The repeated keys of a sparse map of format 0.0 become one record."""
    at = 0
    numbers: list[bytes] = []
    while at < len(data) and data[at] != 0:
        space = data.find(b" ", at, at + 21)
        length = _decimal(data[at:space]) if space > at else 0
        record = data[space + 1 : at + length - 1]
        if not 0 < space - at + 2 < length <= len(data) - at or data[at + length - 1] != ord("\n"):
            raise ImageError("the layer's tar has a damaged pax header")
        key, equals, value = record.partition(b"=")
        if not equals:
            raise ImageError("the layer's tar has a damaged pax header")
        if key in (b"GNU.sparse.offset", b"GNU.sparse.numbytes"):
            numbers.append(value)
        else:
            yield key, value
        at += length
    if numbers:
        yield b"GNU.sparse.map", b",".join(numbers)


def _effective_pax(global_pax: Mapping[bytes, bytes], entry_pax: Mapping[bytes, bytes]) -> Mapping[bytes, bytes]:
    """Return the pax records of an entry. An empty value deletes an earlier one: pax(1), "Header Block"."""
    return {key: value for key, value in {**global_pax, **entry_pax}.items() if value or key.startswith(b"GNU.")}


def _entry(block: bytes, pax: Mapping[bytes, bytes], long_name: bytes | None, long_link: bytes | None) -> Entry:
    name, owners, size_field, mtime_field, kind, link, magic, major, minor, prefix = _HEADER.unpack(block)
    name = name.split(b"\0", 1)[0]
    link = link.split(b"\0", 1)[0] if link[0] else b""
    if prefix[0] and magic[:6] == b"ustar\0":
        name = prefix.split(b"\0", 1)[0] + b"/" + name
    path = long_name or name
    link = long_link or link
    size, mtime = _number(size_field), None
    mode, owner, group = _mode_and_owner(owners)
    if pax:
        path = pax.get(b"GNU.sparse.name") or pax.get(b"path") or path
        link = pax.get(b"linkpath") or link
        if b"\0" in path or b"\0" in link:
            raise ImageError(f"the layer's tar has a name with a NUL: {shown(path)}")
        size = _decimal(pax[b"size"]) if b"size" in pax else size
        mtime = _nanoseconds(pax[b"mtime"]) if b"mtime" in pax else None
        owner = _decimal(pax[b"uid"]) if b"uid" in pax else owner
        group = _decimal(pax[b"gid"]) if b"gid" in pax else group
    if size < 0:
        raise ImageError(f"{shown(path)}: negative size {size}")
    if kind in (b"0", b"\0", b"7"):
        kind = b"5" if path.endswith(b"/") and not size else b"0"
    if mtime is None:
        mtime = _number(mtime_field) * 10**9
    if not -(2**62) <= mtime <= 2**62:
        mtime = max(-(2**62), min(mtime, 2**62))
    entry = Entry(
        path,
        kind,
        mode,
        owner,
        group,
        mtime,
        size,
        size if kind in b"0S" else 0,
        link,
        (_number(major), _number(minor)) if kind in b"34" else (0, 0),
        pax,
    )
    if b"GNU.sparse.map" in pax:
        numbers = [_decimal(n) for n in pax[b"GNU.sparse.map"].split(b",") if n]
        entry.size = _decimal(pax.get(b"GNU.sparse.size", b"%d" % size))
        entry.segments = list(zip(numbers[::2], numbers[1::2], strict=False))
        _check_segments(entry, len(entry.segments))
    return entry


def _nanoseconds(text: bytes) -> int:
    """Parse decimal seconds with a fraction: pax(1), mtime."""
    whole, _, fraction = text.partition(b".")
    sign = -1 if whole.startswith(b"-") else 1
    return sign * (_decimal(whole.lstrip(b"-") or b"0") * 10**9 + _decimal(fraction[:9].ljust(9, b"0")))


def _old_sparse(entry: Entry, block: bytes, read: Callable[[int], bytes]) -> None:
    """Read the sparse map of typeflag S: four segments in the header, 21 in each extension block."""
    entry.kind = b"0"
    entry.size = _number(block[483:495])
    entry.segments = []
    table, more = block[386:482], block[482]
    while True:
        for at in range(0, len(table), 24):
            if table[at]:
                entry.segments.append((_number(table[at : at + 12]), _number(table[at + 12 : at + 24])))
        _check_segments(entry, len(entry.segments))
        if not more:
            return
        block = read(_BLOCK_BYTES)
        table, more = block[:504], block[504]


def _check_segments(entry: Entry, count: int) -> None:
    """Raise ImageError for too many segments: each takes 120 bytes of memory."""
    if count > _MAX_SEGMENTS:
        raise ImageError(f"{shown(entry.path)}: the sparse map has {count} segments or more")


def _sparse_map_in_data(entry: Entry, read: Callable[[int], bytes]) -> None:
    """Read the sparse map of GNU format 1.0: the data begins with lines of decimal numbers, in whole blocks."""
    entry.size = _decimal(entry.pax.get(b"GNU.sparse.realsize", b""))
    text = read(_BLOCK_BYTES)
    count = _decimal(text.split(b"\n", 1)[0])
    _check_segments(entry, count)
    blocks, lines = [text], text.count(b"\n")
    while lines < 2 * count + 1:
        blocks.append(read(_BLOCK_BYTES))
        lines += blocks[-1].count(b"\n")
    numbers = [_decimal(n) for n in b"".join(blocks).split(b"\n")[1 : 2 * count + 1]]
    entry.segments = list(zip(numbers[::2], numbers[1::2], strict=True))
