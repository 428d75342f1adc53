"""Read a blob once as a stream: detect its compression, decompress it, and hash compressed and decompressed data.

Sources: RFC 1952 (gzip) and RFC 8878 (zstd).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from hashlib import sha256
from queue import Empty, Queue
from threading import Thread
from typing import IO, TYPE_CHECKING, Any, Protocol, cast

from isal import isal_zlib  # 2.5 times as fast as zlib

from enroot_py.base import digests, filesystems
from enroot_py.base.errors import ImageError

if TYPE_CHECKING:
    from typing_extensions import Self

crc32: Callable[..., int] = isal_zlib.crc32  # crc32(data, value so far)
adler32: Callable[[bytes], int] = isal_zlib.adler32

_READ_BYTES = 1 << 18
_PIECE_BYTES = 1 << 20  # largest piece of decompressed data
_MAX_WAITING_PIECES = 2  # in each of two queues: pieces to read, and pieces to hash


def crc32_of_zeros(count: int, crc: int = 0) -> int:
    """Return crc32() of ``count`` zero bytes in O(log count).

    Each zero byte multiplies the register by x**8, modulo the CRC's polynomial. Bit 31 is x**0: RFC 1952, "CRC-32".
    """
    factor, power = 1 << 31, 1 << 23  # x**0, x**8
    while count:
        if count & 1:
            factor = _times(factor, power)
        power, count = _times(power, power), count >> 1
    return _times(crc ^ 0xFFFFFFFF, factor) ^ 0xFFFFFFFF


def _times(a: int, b: int) -> int:
    """Return the product of two polynomials modulo the polynomial of CRC-32."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (0xEDB88320 if b & 1 else 0)
    return product


class Stream(Protocol):
    """The source of a blob."""

    def read(self, size: int, /) -> bytes: ...


class _Decoder:
    """Decompress one member of a blob. A piece of output has at most _PIECE_BYTES bytes, at any compression ratio."""

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
            out = bytes(self._decoder.decompress(data, _PIECE_BYTES))
            yield out
            data = bytes(self._decoder.unconsumed_tail)
            more = bool(data) or len(out) == _PIECE_BYTES


class _Limited(_Decoder):
    """A BZ2Decompressor or LZMADecompressor, which keeps input whose output would exceed the limit."""

    def pieces(self, data: bytes) -> Iterator[bytes]:
        yield self._decoder.decompress(data, _PIECE_BYTES)
        while not (self._decoder.eof or self._decoder.needs_input):
            yield self._decoder.decompress(b"", _PIECE_BYTES)


class _ZstdSource:
    """A blob with _END_FRAME appended, because the library zstandard does not report a truncated last frame."""

    def __init__(self, data: bytes, more: Callable[[], bytes]) -> None:
        self._data = data
        self._more = more
        self.ended = False

    def read(self, size: int) -> bytes:
        """Return the next data, ignoring ``size``; b"" at the end."""
        data, self._data = self._data or self._more(), b""
        if data or self.ended:
            return data
        self.ended = True
        return _END_FRAME


_END = 16 * b"x"
# A frame that decompresses to _END, RFC 8878: magic number, header (a single segment, 16 bytes of content), and a last
# block of type RLE, which repeats "x" 16 times.
_END_FRAME = bytes.fromhex("28b52ffd 20 10 830000 78")


def _bzip2() -> _Decoder:
    import bz2

    return _Limited(bz2.BZ2Decompressor())


def _xz() -> _Decoder:
    import lzma

    return _Limited(lzma.LZMADecompressor(memlimit=256 << 20))


_ZSTD_SKIPPABLE = tuple(bytes((n,)) + b"\x2a\x4d\x18" for n in range(0x50, 0x60))
# Detect the compression by the first bytes: a media type may be wrong (enroot, commit d0402e0).
_MAGIC: tuple[tuple[tuple[bytes, ...], str, Callable[[], _Decoder] | None], ...] = (
    ((b"\x1f\x8b",), "gzip", _Gzip),
    ((b"\x28\xb5\x2f\xfd", *_ZSTD_SKIPPABLE), "zstd", None),  # pzstd begins with a skippable frame
    ((b"BZh",), "bzip2", _bzip2),
    ((b"\xfd7zXZ\x00",), "xz", _xz),
)
MAGIC_BYTES = 8  # enough to identify each format


def name_of(start: bytes) -> str:
    """Return the name of a blob's compression, or "none". ``start`` is the first MAGIC_BYTES bytes of the blob."""
    return next((name for magic, name, _ in _MAGIC if start.startswith(magic)), "none")


class Decompressed:
    """The decompressed data of a blob. Hashes the compressed and the decompressed data. Use it in a ``with``.

    One thread reads and decompresses a few chunks ahead, another hashes. Both release the GIL, so a large layer uses
    three CPUs, and reading it takes no longer than decompressing it. The digests are complete after drain().
    """

    def __init__(self, stream: Stream, progress: Callable[[int], None] | None = None) -> None:
        self._stream = stream
        self._progress = progress
        self._blob_hash = sha256()
        self._tar_hash = sha256()
        self.blob_size = 0
        self.size = 0
        self._ahead: Queue[bytes | BaseException | None] = Queue(_MAX_WAITING_PIECES)
        self._to_hash: Queue[tuple[_Hash, bytes] | None] = Queue(_MAX_WAITING_PIECES)
        self._over = False
        self._thread: Thread | None = None
        self._hashing = Thread(target=self._hash, daemon=True)
        self._chunk = b""
        self._at = 0  # bytes of the chunk that have been read

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Stop reading the stream."""
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
        except BaseException as e:  # _next() raises it
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
        data = self._stream.read(_READ_BYTES)
        self._to_hash.put((self._blob_hash, data))
        self.blob_size += len(data)
        if self._progress is not None:
            self._progress(self.blob_size)
        return data

    def _decompress(self) -> Iterator[bytes]:
        data = self._raw()
        while data and len(data) < MAGIC_BYTES and (more := self._raw()):
            data += more
        for magic, name, make in _MAGIC:
            if data.startswith(magic):
                if make is None:
                    yield from self._pieces(self._frames(data), name)
                else:
                    yield from self._members(data, name, make)
                return
        while data:
            yield data
            data = self._raw()

    def _frames(self, data: bytes) -> Iterator[bytes]:
        """Decompress zstd frames, skipping skippable ones, in pieces of about _PIECE_BYTES bytes."""
        import zstandard

        source = _ZstdSource(data, self._raw)
        # The decoder allocates a window of the size that the frame header states. "zstd --long" states 128 MiB.
        decoder = zstandard.ZstdDecompressor(max_window_size=1 << 27)
        reader = decoder.stream_reader(cast("IO[bytes]", source), read_across_frames=True, closefd=False)
        last = b""
        try:
            while piece := reader.read(_PIECE_BYTES):
                if len(piece) < len(_END):  # _END may be split over the last two pieces
                    piece = last + piece
                elif last:
                    yield last
                last = piece
        except zstandard.ZstdError as e:
            if not source.ended:
                raise
            raise self._cut("zstd") from e
        if not last.endswith(_END):
            raise self._cut("zstd")
        yield last[: -len(_END)]

    def _cut(self, name: str) -> ImageError:
        return ImageError(f"the {name} data of the layer is truncated after {self.blob_size} bytes")

    def _members(self, data: bytes, name: str, make: Callable[[], _Decoder]) -> Iterator[bytes]:
        """Decompress the members of a blob in order: a gzip file can have several members, RFC 1952."""
        decoder: _Decoder | None = None
        while data:
            if decoder is None:
                data = data.lstrip(b"\0") if name in ("gzip", "xz") else data
                if len(data) < MAGIC_BYTES and (more := self._raw()):
                    data += more
                    continue
                if not data:
                    break
                decoder = make()
            yield from self._pieces(decoder.pieces(data), name)
            data = b""
            if decoder.eof:
                data = decoder.unused_data
                decoder = None
            data = data or self._raw()
        if decoder is not None:
            raise self._cut(name)

    @staticmethod
    def _pieces(pieces: Iterator[bytes], name: str) -> Iterator[bytes]:
        while True:
            try:
                piece = next(pieces, None)
            except (ImageError, OSError, MemoryError):  # the source failed, or memory ran out: the data is not damaged
                raise
            except Exception as e:  # each library has its own error class
                raise ImageError(f"the {name} data of the layer is damaged: {e}") from e
            if piece is None:
                return
            if piece:
                yield piece

    def _start(self) -> None:
        """Start both threads. Raises ImageError if the user's process limit is reached."""
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
        """Return the next ``size`` bytes; fewer only at the end."""
        at, end = self._at, self._at + size
        if end <= len(self._chunk):
            self._at = end
            return self._chunk[at:end]
        return b"".join(self.pieces(size))

    def pieces(self, size: int) -> Iterator[memoryview]:
        """Yield the next ``size`` bytes in pieces without copying; fewer bytes only at the end."""
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
        """Write the next ``size`` bytes to a file at ``offset``, and return their CRC-32.

        Writes each piece when it arrives, while it is in the CPU cache. For aligned writes of 1 MiB, the kernel would
        create page cache folios of 1 MiB. Filling such folios took six times as long, and programs did not read the
        files faster.
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
        """Read to the end, because the digests also cover data after the tar's end mark."""
        self._chunk, self._at = b"", 0
        while self._next():
            pass
