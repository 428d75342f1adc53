"""A layer's blob read once, as a stream: decompressed, hashed in both forms, split into tar entries.

Sources: pax(1) of POSIX ("ustar Interchange Format", "pax Header Block"); GNU tar's
manual, "Basic Tar Format" and "Sparse Formats"; RFC 1952 (gzip) and RFC 8878 (zstd).
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from queue import Empty, Queue
from struct import Struct
from threading import Thread
from typing import Any, Protocol

from isal import isal_zlib  # 2.5 times as fast as zlib

from enroot_py.errors import ImageError

crc32: Callable[..., int] = isal_zlib.crc32  # (data, value so far)
_adler32: Callable[[bytes], int] = isal_zlib.adler32

_BLOCK = 512
_ZEROS = bytes(_BLOCK)
# name mode+uid+gid size mtime typeflag linkname magic+version devmajor devminor prefix
_HEADER = Struct("100s 24s 12s 12s 8x c 100s 8s 64x 8s 8s 155s 12x")
_NO_PAX: Mapping[bytes, bytes] = {}
_CHUNK = 1 << 18
_PIECE = 1 << 20  # bytes of decompressed data at a time, and of a file that one call writes
_IOV_MAX = 1024
_AHEAD = 2  # pieces that wait to be written, and to be hashed
_SHOWN = 400  # characters of a name
_MAX_EXTENSION = 4 << 20  # bytes of one pax header or GNU long name
_MAX_SEGMENTS = 1 << 19  # of a sparse file
_MAX_GLOBAL = 1000  # pax records that hold for all entries: git archive writes one


def crc32_of_zeros(count: int, crc: int = 0) -> int:
    """crc32() of so many zeros, in no time however many: they multiply the register by x**8 each, modulo the CRC's
    polynomial. Source: RFC 1952, "CRC-32"; bit 31 is x**0, as there."""
    factor, power = 1 << 31, 1 << 23  # x**0, x**8
    while count:
        if count & 1:
            factor = _times(factor, power)
        power, count = _times(power, power), count >> 1
    return _times(crc ^ 0xFFFFFFFF, factor) ^ 0xFFFFFFFF


def _times(a: int, b: int) -> int:
    """The product of two polynomials modulo that of CRC-32."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (0xEDB88320 if b & 1 else 0)
    return product


class Stream(Protocol):
    """What a blob is read from."""

    def read(self, size: int, /) -> bytes: ...


class _Decoder:
    """One member or frame. What comes of some data comes in pieces of about _PIECE, whatever it was made to be."""

    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder

    @property
    def eof(self) -> bool:
        return bool(self._decoder.eof)

    @property
    def unused_data(self) -> bytes:
        return bytes(self._decoder.unused_data)

    def pieces(self, data: bytes) -> Iterator[bytes]:
        raise NotImplementedError


class _Hash(Protocol):
    def update(self, data: bytes, /) -> None: ...


class _Gzip(_Decoder):
    def __init__(self) -> None:
        super().__init__(isal_zlib.decompressobj(wbits=31))

    def pieces(self, data: bytes) -> Iterator[bytes]:
        more = True
        while more and not self._decoder.eof:
            out = bytes(self._decoder.decompress(data, _PIECE))
            yield out
            data = bytes(self._decoder.unconsumed_tail)
            more = bool(data) or len(out) == _PIECE


class _Limited(_Decoder):
    """BZ2Decompressor and LZMADecompressor, which keep what they have no room for."""

    def pieces(self, data: bytes) -> Iterator[bytes]:
        yield self._decoder.decompress(data, _PIECE)
        while not (self._decoder.eof or self._decoder.needs_input):
            yield self._decoder.decompress(b"", _PIECE)


class _Zstd(_Decoder):
    """Gives the decoder, which knows no limit, some blocks at a time: RFC 8878, "Blocks"; 128 KiB come out of one."""

    def __init__(self) -> None:
        import zstandard

        # Frames say how much memory they want; 128 MiB is what "zstd --long" makes.
        super().__init__(zstandard.ZstdDecompressor(max_window_size=1 << 27).decompressobj())
        self._header = b""  # of the frame or of a block, as far as it has come
        self._in_frame = False
        self._left = 0  # bytes of the block
        self._last = False

    def pieces(self, data: bytes) -> Iterator[bytes]:
        start = 0
        for end in self._ends(data):
            yield self._decoder.decompress(data[start:end])
            start = end

    def _ends(self, data: bytes) -> Iterator[int]:
        """Where to cut the data; the last end is its own."""
        at = blocks = 0
        while at < len(data) and not self._last:
            if self._left:
                step = min(self._left, len(data) - at)
                at, self._left = at + step, self._left - step
                continue
            self._header += data[at : at + 1]
            at += 1
            if not self._in_frame:
                if len(self._header) >= 5 and len(self._header) == _zstd_header_size(self._header[4]):
                    self._in_frame, self._header = True, b""
            elif len(self._header) == 3:
                said, self._header = int.from_bytes(self._header, "little"), b""
                self._last = bool(said & 1)
                self._left = 1 if said >> 1 & 3 == _ZSTD_RLE else said >> 3
                blocks += 1
                if blocks * _ZSTD_BLOCK >= _PIECE:
                    yield at
                    blocks = 0
        yield len(data)


_ZSTD_BLOCK = 128 << 10  # bytes that come out of one at most
_ZSTD_RLE = 1  # block type: one byte, so many times


def _zstd_header_size(descriptor: int) -> int:
    """Bytes of a frame header with its magic: RFC 8878, "Frame_Header_Descriptor"."""
    single = descriptor >> 5 & 1
    content_size = (single, 2, 4, 8)[descriptor >> 6]
    return 5 + (1 - single) + (0, 1, 2, 4)[descriptor & 3] + content_size


def _bzip2() -> _Decoder:
    import bz2

    return _Limited(bz2.BZ2Decompressor())


def _xz() -> _Decoder:
    import lzma

    return _Limited(lzma.LZMADecompressor(memlimit=256 << 20))


_ZSTD_SKIPPABLE = tuple(bytes((n,)) + b"\x2a\x4d\x18" for n in range(0x50, 0x60))
# Media types lie (enroot d0402e0): only the first bytes count.
_MAGIC: tuple[tuple[tuple[bytes, ...], str, Callable[[], _Decoder]], ...] = (
    ((b"\x1f\x8b",), "gzip", _Gzip),
    ((b"\x28\xb5\x2f\xfd", *_ZSTD_SKIPPABLE), "zstd", _Zstd),  # pzstd begins with a skippable frame
    ((b"BZh",), "bzip2", _bzip2),
    ((b"\xfd7zXZ\x00",), "xz", _xz),
)


def compression(start: bytes) -> str:
    """The name of what compressed data that begins with these eight bytes, or ``none``."""
    return next((name for magic, name, _ in _MAGIC if start.startswith(magic)), "none")


class Tar:
    """A tar stream read once, with the hashes of both its forms. Use it in a ``with``.

    One thread reads and decompresses ahead by a few chunks, another hashes: both let go
    of Python's lock, so one large layer keeps three CPUs busy, and takes no longer than its
    decompression. The digests are complete when drain() has returned.
    """

    def __init__(self, stream: Stream, progress: Callable[[int], None] | None = None) -> None:
        self._stream = stream
        self._progress = progress
        self._blob_hash = sha256()
        self._tar_hash = sha256()
        self.blob_size = 0
        self.size = 0
        self._ahead: Queue[bytes | BaseException | None] = Queue(_AHEAD)
        self._to_hash: Queue[tuple[_Hash, bytes] | None] = Queue(_AHEAD)
        self._over = False
        self._thread: Thread | None = None
        self._chunk = b""
        self._at = 0  # what of the chunk has been read

    def __enter__(self) -> "Tar":
        return self

    def __exit__(self, *_: object) -> None:
        """Stop reading; the stream is the caller's again."""
        self._over = True
        while self._thread is not None and self._thread.is_alive():
            with contextlib.suppress(Empty):
                self._ahead.get_nowait()
            self._thread.join(0.01)

    def _read_ahead(self) -> None:
        last: BaseException | None = None
        hashing = Thread(target=self._hash, daemon=True)
        hashing.start()
        try:
            for chunk in self._decompress():
                self._to_hash.put((self._tar_hash, chunk))
                if self._over:
                    break
                self._ahead.put(chunk)
        except BaseException as e:  # it is the reader's to raise
            last = e
        self._to_hash.put(None)
        hashing.join()
        self._ahead.put(last)

    def _hash(self) -> None:
        while (work := self._to_hash.get()) is not None:
            digest, data = work
            digest.update(data)

    def blob_digest(self) -> str:
        return "sha256:" + self._blob_hash.hexdigest()

    def diff_id(self) -> str:
        return "sha256:" + self._tar_hash.hexdigest()

    def _raw(self) -> bytes:
        data = self._stream.read(_CHUNK)
        self._to_hash.put((self._blob_hash, data))
        self.blob_size += len(data)
        if self._progress is not None:
            self._progress(self.blob_size)
        return data

    def _decompress(self) -> Iterator[bytes]:
        data = self._raw()
        while data and len(data) < 8 and (more := self._raw()):
            data += more
        kind = next(((name, make) for magic, name, make in _MAGIC if data.startswith(magic)), None)
        if kind is None:
            while data:
                yield data
                data = self._raw()
            return
        name, make = kind
        decoder: _Decoder | None = None
        while data:
            if decoder is None:
                # A blob may be several members or frames, one after the other (RFC 1952, RFC 8878).
                data = data.lstrip(b"\0") if name in ("gzip", "xz") else data
                if len(data) < 8 and (more := self._raw()):
                    data += more
                    continue
                if not data:
                    break
                if name == "zstd" and data.startswith(_ZSTD_SKIPPABLE):
                    data = self._skip_frame(data)
                    continue
                decoder = make()
            yield from self._pieces(decoder, data, name)
            data = b""
            if decoder.eof:
                data = decoder.unused_data
                decoder = None
            data = data or self._raw()
        if decoder is not None:
            raise ImageError(f"the {name} data of the layer is truncated after {self.blob_size} bytes")

    def _skip_frame(self, data: bytes) -> bytes:
        size = int.from_bytes(data[4:8], "little")
        data = data[8:]
        while len(data) < size:
            size -= len(data)
            data = self._raw()
            if not data:
                raise ImageError(f"the zstd data of the layer is truncated after {self.blob_size} bytes")
        return data[size:] or self._raw()

    @staticmethod
    def _pieces(decoder: _Decoder, data: bytes, name: str) -> Iterator[bytes]:
        pieces = decoder.pieces(data)
        while True:
            try:
                piece = next(pieces, None)
            except MemoryError:
                raise
            except Exception as e:  # each library has its own error class
                raise ImageError(f"the {name} data of the layer is damaged: {e}") from e
            if piece is None:
                return
            if piece:
                yield piece

    def _next(self) -> bool:
        if self._thread is None:
            self._thread = Thread(target=self._read_ahead, daemon=True)
            self._thread.start()
        elif self._over:
            return False
        chunk = self._ahead.get()
        if chunk is None or isinstance(chunk, BaseException):
            self._over = True
            if chunk is not None:
                raise chunk
            return False
        self.size += len(chunk)
        self._chunk, self._at = chunk, 0
        return True

    def _position(self) -> int:
        return self.size - len(self._chunk) + self._at

    def read(self, size: int) -> bytes:
        """The next ``size`` bytes; fewer only at the end."""
        at, end = self._at, self._at + size
        if end <= len(self._chunk):
            self._at = end
            return self._chunk[at:end]
        return b"".join(self.pieces(size))

    def pieces(self, size: int) -> Iterator[memoryview]:
        """The next ``size`` bytes as they come; fewer only at the end."""
        while size > 0 and (self._at < len(self._chunk) or self._next()):
            piece = memoryview(self._chunk)[self._at : self._at + size]
            self._at += len(piece)
            size -= len(piece)
            yield piece

    def _skip(self, size: int) -> None:
        if self._at + size <= len(self._chunk):
            self._at += size
        elif size != sum(map(len, self.pieces(size))):
            raise self._truncated()

    def _exactly(self, size: int) -> bytes:
        data = self.read(size)
        if len(data) != size:
            raise self._truncated()
        return data

    def _truncated(self) -> ImageError:
        return ImageError(f"the layer's tar is truncated after {self.size} bytes")

    def copy(self, size: int, fd: int, offset: int) -> int:
        """Write the next ``size`` bytes to a file at ``offset``; returns their CRC-32.

        In large units that begin at a multiple of their size: the kernel caches what a call
        writes in folios as large as their place allows, and is quicker to read them.
        """
        at, end = self._at, self._at + size
        if end <= len(self._chunk):  # most files are small
            self._at = end
            data = memoryview(self._chunk)[at:end]
            if not size or os.pwrite(fd, data, offset) == size:
                return crc32(data)
            self._at = at
        crc, amount = 0, 0  # bytes held
        held: list[memoryview] = []
        for piece in self.pieces(size):
            size -= len(piece)
            crc = crc32(piece, crc)
            held.append(piece)
            amount += len(piece)
            rest = (offset + amount) % _PIECE if size else 0
            if rest < amount:
                if rest:
                    held[-1], piece = piece[:-rest], piece[-rest:]
                _write(fd, held, offset)
                offset += amount - rest
                held, amount = [piece] if rest else [], rest
        if size:
            raise self._truncated()
        return crc

    def drain(self) -> None:
        """Read to the end, for the hashes cover what follows the tar's end mark too."""
        self._chunk, self._at = b"", 0
        while self._next():
            pass

    # -- headers

    def entries(self) -> Iterator["Entry"]:
        """Yield each entry. Its data is there to be read until the next one is asked for."""
        common: Mapping[bytes, bytes] = _NO_PAX  # pax: "g" holds for all that follow
        own: Mapping[bytes, bytes] = _NO_PAX  # "x", and GNU long names: for the next only
        long_name = long_link = None
        while True:
            block = self.read(_BLOCK)
            if len(block) < _BLOCK:
                if block.strip(b"\0"):
                    raise self._truncated()
                return
            if block == _ZEROS:
                return
            _check_sum(block, self.size)
            kind = block[156:157]
            if kind in b"xgLK":
                size = _number(block[124:136])
                if not 0 <= size <= _MAX_EXTENSION:
                    raise ImageError(f"a tar extension header of {size} bytes")
                data = self._exactly(size)
                self._exactly(-size % _BLOCK)
                if kind == b"x":
                    own = dict(_pax(data))
                elif kind == b"g":
                    common = {**common, **dict(_pax(data))}
                    if len(common) > _MAX_GLOBAL:  # each entry is given all of them
                        raise ImageError(f"more than {_MAX_GLOBAL} global pax records in the layer's tar")
                elif kind == b"L":
                    long_name = data.split(b"\0", 1)[0]
                else:
                    long_link = data.split(b"\0", 1)[0]
                continue
            entry = _entry(block, _in_force(common, own) if common or own else _NO_PAX, long_name, long_link)
            own, long_name, long_link = _NO_PAX, None, None
            if kind == b"S":
                _old_sparse(entry, block, self._exactly)  # these headers are not counted in its size
            before = self._position()
            if entry.pax and entry.pax.get(b"GNU.sparse.major") == b"1":
                _sparse_map_in_data(entry, self._exactly)
            yield entry
            stored = entry.stored
            if stored:
                left = stored - (self._position() - before)
                if left < 0:
                    raise ImageError(f"{shown(entry.path)}: a sparse map that is longer than its data")
                self._skip(left)
                self.read(-stored % _BLOCK)  # at the very end it may be missing: umoci insert, GNU tar and Go's reader


@dataclass(slots=True)
class Entry:
    """One entry of a tar. ``path`` is as written; ``size`` is the file's, ``stored`` that of its data here."""

    path: bytes
    kind: bytes
    mode: int
    uid: int
    gid: int
    mtime: int  # nanoseconds
    size: int
    stored: int
    link: bytes
    device: tuple[int, int]
    pax: Mapping[bytes, bytes]
    segments: list[tuple[int, int]] | None = None  # of a sparse file: (offset, length)

    def xattrs(self) -> Iterator[tuple[bytes, bytes]]:
        for key, value in self.pax.items():
            if key.startswith(b"SCHILY.xattr."):
                yield key[len(b"SCHILY.xattr.") :], value


def _write(fd: int, pieces: Sequence[memoryview], offset: int) -> None:
    """Write all of them, one after the other. Raises OSError."""
    # pwritev(2) takes IOV_MAX of them, and may write less than it is given.
    if len(pieces) > _IOV_MAX or os.pwritev(fd, pieces, offset) != sum(map(len, pieces)):
        for piece in pieces:
            while len(piece):
                written = os.pwrite(fd, piece, offset)
                offset += written
                piece = piece[written:]


def shown(path: bytes) -> str:
    """A name for a message: in one line, and not all of a long one."""
    text = "/" + path.lstrip(b"/").decode("utf-8", "backslashreplace").replace("\n", "\\n")
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]}…{text[-_SHOWN // 2 :]}"


def _check_sum(block: bytes, at: int) -> None:
    field = block[148:156]
    # The low half of Adler-32 is 1 plus the sum of all bytes, modulo 65521, in a tenth of the time of sum(): RFC 1950.
    if (_adler32(block) - 1 - _sum_that_says(field)) & 0xFFFF == 0:
        return
    want = _number(field)
    unsigned = sum(block) - sum(field) + 8 * 32
    if want != unsigned and want != unsigned - 256 * sum(b > 127 for b in block[:148] + block[156:]):
        raise ImageError(f"the layer is no tar: bad header checksum before byte {at}")


@lru_cache(4096)
def _sum_that_says(field: bytes) -> int:
    """Of all bytes of a header with this checksum, which is counted there as eight spaces."""
    return _number(field) + sum(field) - 8 * 32


@lru_cache(4096)
def _mode_and_owner(fields: bytes) -> tuple[int, int, int]:
    return _number(fields[:8]) & 0o7777, _number(fields[8:16]), _number(fields[16:])


@lru_cache(4096)
def _number(raw: bytes) -> int:
    """Octal, or base 256 where the first byte says so (GNU and star)."""
    if raw[0] == 0x80:
        return int.from_bytes(raw[1:], "big")
    if raw[0] == 0xFF:
        return int.from_bytes(raw, "big", signed=True)
    digits = raw.lstrip(b"\0 ").split(b"\0", 1)[0].rstrip(b" ")  # some fill a field from the right
    if digits.strip(b"01234567"):
        raise ImageError(f"the layer is no tar: bad number {digits!r} in a header")
    return int(digits or b"0", 8)


def _decimal(raw: bytes) -> int:
    if not raw.isdigit() or len(raw) > 20:
        raise ImageError(f"bad number {raw[:32]!r} in a pax header")
    return int(raw)


def _pax(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Records ``LENGTH KEY=VALUE\\n``. Sparse maps of format 0.0 repeat keys: they are joined by commas."""
    at = 0
    numbers: list[bytes] = []
    while at < len(data) and data[at] != 0:
        space = data.find(b" ", at, at + 21)
        length = _decimal(data[at:space]) if space > at else 0
        record = data[space + 1 : at + length - 1]
        if not 0 < space - at + 2 < length <= len(data) - at or data[at + length - 1] != ord("\n"):
            raise ImageError("a damaged pax header in the layer's tar")
        key, equals, value = record.partition(b"=")
        if not equals:
            raise ImageError("a damaged pax header in the layer's tar")
        if key in (b"GNU.sparse.offset", b"GNU.sparse.numbytes"):
            numbers.append(value)
        else:
            yield key, value
        at += length
    if numbers:
        yield b"GNU.sparse.map", b",".join(numbers)


def _in_force(common: Mapping[bytes, bytes], own: Mapping[bytes, bytes]) -> Mapping[bytes, bytes]:
    """The pax records of an entry. An empty value takes back what was said before: pax(1), "Header Block"."""
    return {key: value for key, value in {**common, **own}.items() if value or key.startswith(b"GNU.")}


def _entry(block: bytes, pax: Mapping[bytes, bytes], long_name: bytes | None, long_link: bytes | None) -> Entry:
    name, owners, size_, mtime_, kind, link, magic, major, minor, prefix = _HEADER.unpack(block)
    name = name.split(b"\0", 1)[0]
    link = link.split(b"\0", 1)[0] if link[0] else b""
    if prefix[0] and magic[:6] == b"ustar\0":
        name = prefix.split(b"\0", 1)[0] + b"/" + name
    path = long_name or name
    link = long_link or link
    size, mtime = _number(size_), None
    mode, owner, group = _mode_and_owner(owners)
    if pax:
        path = pax.get(b"GNU.sparse.name") or pax.get(b"path") or path
        link = pax.get(b"linkpath") or link
        if b"\0" in path or b"\0" in link:
            raise ImageError(f"a name with a NUL in the layer's tar: {shown(path)}")
        size = _decimal(pax[b"size"]) if b"size" in pax else size
        mtime = _nanoseconds(pax[b"mtime"]) if b"mtime" in pax else None
        owner = _decimal(pax[b"uid"]) if b"uid" in pax else owner
        group = _decimal(pax[b"gid"]) if b"gid" in pax else group
    if size < 0:
        raise ImageError(f"{shown(path)}: negative size {size}")
    if kind in (b"0", b"\0", b"7"):
        kind = b"5" if path.endswith(b"/") and not size else b"0"
    if mtime is None:
        mtime = _number(mtime_) * 10**9
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
    """A decimal number of seconds with a fraction: pax(1), mtime."""
    whole, _, fraction = text.partition(b".")
    sign = -1 if whole.startswith(b"-") else 1
    return sign * (_decimal(whole.lstrip(b"-") or b"0") * 10**9 + _decimal(fraction[:9].ljust(9, b"0")))


def _old_sparse(entry: Entry, block: bytes, read: Callable[[int], bytes]) -> None:
    """The map of typeflag S: four segments in the header, 21 in each extension block."""
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
        block = read(_BLOCK)
        table, more = block[:504], block[504]


def _check_segments(entry: Entry, count: int) -> None:
    """They are held in memory, 120 bytes each."""
    if count > _MAX_SEGMENTS:
        raise ImageError(f"{shown(entry.path)}: a sparse map of {count} segments or more")


def _sparse_map_in_data(entry: Entry, read: Callable[[int], bytes]) -> None:
    """GNU format 1.0: the data begins with the map, decimal numbers each on a line, in whole blocks."""
    entry.size = _decimal(entry.pax.get(b"GNU.sparse.realsize", b""))
    text = read(_BLOCK)
    count = _decimal(text.split(b"\n", 1)[0])
    _check_segments(entry, count)
    blocks, lines = [text], text.count(b"\n")
    while lines < 2 * count + 1:
        blocks.append(read(_BLOCK))
        lines += blocks[-1].count(b"\n")
    numbers = [_decimal(n) for n in b"".join(blocks).split(b"\n")[1 : 2 * count + 1]]
    entry.segments = list(zip(numbers[::2], numbers[1::2], strict=True))
