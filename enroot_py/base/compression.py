"""A blob read once, as a stream: decompressed by its first bytes, and hashed in both forms.

Sources: RFC 1952 (gzip) and RFC 8878 (zstd).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from hashlib import sha256
from queue import Empty, Queue
from threading import Thread
from typing import TYPE_CHECKING, Any, Protocol

from isal import isal_zlib  # 2.5 times as fast as zlib

from enroot_py.base import digests, filesystems
from enroot_py.base.errors import ImageError

if TYPE_CHECKING:
    from typing_extensions import Self

crc32: Callable[..., int] = isal_zlib.crc32  # (data, value so far)
adler32: Callable[[bytes], int] = isal_zlib.adler32

_CHUNK = 1 << 18
_PIECE = 1 << 20  # bytes of decompressed data at a time
_AHEAD = 2  # pieces that wait to be written, and to be hashed


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
                header, self._header = int.from_bytes(self._header, "little"), b""
                self._last = bool(header & 1)
                self._left = 1 if header >> 1 & 3 == _ZSTD_RLE else header >> 3
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
MAGIC_SIZE = 8  # bytes that tell any of them, and how long a skippable frame is


def name_of(start: bytes) -> str:
    """The name of the format of data that begins with these MAGIC_SIZE bytes, or ``none``."""
    return next((name for magic, name, _ in _MAGIC if start.startswith(magic)), "none")


class Decompressed:
    """A stream read once, with the hashes of both its forms. Use it in a ``with``.

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
        self._hashing = Thread(target=self._hash, daemon=True)
        self._chunk = b""
        self._at = 0  # what of the chunk has been read

    def __enter__(self) -> Self:
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
        try:
            for chunk in self._decompress():
                self._to_hash.put((self._tar_hash, chunk))
                if self._over:
                    break
                self._ahead.put(chunk)
        except BaseException as e:  # it is the reader's to raise
            last = e
        self._to_hash.put(None)
        self._hashing.join()
        self._ahead.put(last)

    def _hash(self) -> None:
        while (work := self._to_hash.get()) is not None:
            digest, data = work
            digest.update(data)

    def blob_digest(self) -> str:
        return digests.of_encoded(self._blob_hash.hexdigest())

    def diff_id(self) -> str:
        return digests.of_encoded(self._tar_hash.hexdigest())

    def _raw(self) -> bytes:
        data = self._stream.read(_CHUNK)
        self._to_hash.put((self._blob_hash, data))
        self.blob_size += len(data)
        if self._progress is not None:
            self._progress(self.blob_size)
        return data

    def _decompress(self) -> Iterator[bytes]:
        data = self._raw()
        while data and len(data) < MAGIC_SIZE and (more := self._raw()):
            data += more
        for magic, name, make in _MAGIC:
            if data.startswith(magic):
                yield from self._members(data, name, make)
                return
        while data:
            yield data
            data = self._raw()

    def _members(self, data: bytes, name: str, make: Callable[[], _Decoder]) -> Iterator[bytes]:
        """A blob may be several members or frames, one after the other: RFC 1952, RFC 8878."""
        decoder: _Decoder | None = None
        while data:
            if decoder is None:
                data = data.lstrip(b"\0") if name in ("gzip", "xz") else data
                if len(data) < MAGIC_SIZE and (more := self._raw()):
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

    def _start(self) -> None:
        """Start both threads. Raises ImageError if the user may have no more of them."""
        thread = Thread(target=self._read_ahead, daemon=True)
        try:
            self._hashing.start()
            thread.start()
        except RuntimeError as e:
            self._to_hash.put(None)
            why, hint = filesystems.no_process()
            raise ImageError(f"cannot start a thread: {why}", hint=hint) from e
        self._thread = thread

    def _next(self) -> bool:
        if self._thread is None:
            self._start()
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

    def position(self) -> int:
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

    def skip(self, size: int) -> None:
        if self._at + size <= len(self._chunk):
            self._at += size
        elif size != sum(map(len, self.pieces(size))):
            raise self.truncated()

    def exactly(self, size: int) -> bytes:
        data = self.read(size)
        if len(data) != size:
            raise self.truncated()
        return data

    def truncated(self) -> ImageError:
        return ImageError(f"the layer's tar is truncated after {self.size} bytes")

    def copy(self, size: int, fd: int, offset: int) -> int:
        """Write the next ``size`` bytes to a file at ``offset``; returns their CRC-32.

        As they come, from the processor's cache. Collected into aligned pieces of 1 MiB they would lie in folios as
        large, and no program reads those faster, but the kernel was seen to take six times as long to fill them.
        """
        at, end = self._at, self._at + size
        if end <= len(self._chunk):  # most files are small
            self._at = end
            data = memoryview(self._chunk)[at:end]
            if not size or os.pwrite(fd, data, offset) == size:
                return crc32(data)
            self._at = at
        crc = 0
        for piece in self.pieces(size):
            crc = crc32(piece, crc)
            size -= len(piece)
            while len(piece):
                written = os.pwrite(fd, piece, offset)
                offset += written
                piece = piece[written:]
        if size:
            raise self.truncated()
        return crc

    def drain(self) -> None:
        """Read to the end, for the hashes cover what follows the tar's end mark too."""
        self._chunk, self._at = b"", 0
        while self._next():
            pass
