"""Read the files of a local image by name, from a directory, or from a tar archive without unpacking it."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
import tarfile
import tempfile
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, Protocol, cast

from enroot_py.base import compression, linux, log
from enroot_py.base.errors import ImageError
from enroot_py.base.fds import Fd
from enroot_py.config.settings import Settings

if TYPE_CHECKING:
    from typing_extensions import Self

_MAX_DOCUMENT_BYTES = 8 << 20  # of an index, manifest or config
_MAX_MEMBERS = 100_000  # an archive has a few for each layer
_MAX_GLOBAL_HEADERS = 1000  # pax records that apply to all members


class Files(Protocol):
    def open(self, name: str) -> Section:
        """Open the file ``name``. Raises ImageError if there is none."""


class Section:
    """A part of an open file as a stream. Streams on the same file have separate positions."""

    def __init__(self, fd: int, offset: int, size: int) -> None:
        self._fd = fd
        self._at = offset
        self._end = offset + size
        self.size = size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def read(self, size: int, /) -> bytes:
        """Return up to ``size`` bytes, b"" at the end. Raises ImageError."""
        try:
            data = os.pread(self._fd, min(size, self._end - self._at), self._at)
        except OSError as e:
            raise ImageError(f"cannot read the image: {e.strerror}") from e
        self._at += len(data)
        return data


class _WholeFile(Section):
    """A whole file. Leaving the ``with`` closes its descriptor."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd, 0, os.fstat(fd).st_size)

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


class LayoutDirectory:
    """The files of an OCI layout in a directory. Links out of the directory are refused."""

    def __init__(self, path: str) -> None:
        self._path = path

    def open(self, name: str) -> Section:
        path = f"{self._path}/{name}"
        try:
            with Fd(os.open(self._path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as directory:
                return _WholeFile(_open_regular(name, directory))
        except OSError as e:
            reason, hint = e.strerror, ""
            if e.errno == errno.EXDEV:
                reason = "a link in the path leads out of the layout"
                hint = f"copy the layout without links: cp -rL {self._path} DIRECTORY"
            elif not os.path.exists(f"{self._path}/index.json"):
                hint = f"{self._path} is not an OCI layout"
            raise ImageError(f"cannot read {path}: {reason}", hint=hint) from e


def _open_regular(path: str, beneath: int | None = None) -> int:
    """Open a regular file. Raises OSError for any other file, and for a path that leads out of ``beneath``.

    ``beneath`` is an open directory, or None to allow any path. A FIFO does not block the call.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    if beneath is None:
        fd = os.open(path, flags)
    else:
        fd = linux.openat2(beneath, path, flags, 0, linux.RESOLVE_BENEATH | linux.RESOLVE_NO_MAGICLINKS)
    with Fd(fd) as file:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        return file.keep()


class Archive:
    """The members of a tar file, which stays packed. Raises ImageError."""

    def __init__(self, name: str, file: IO[bytes]) -> None:
        self._name = name
        self._file = file  # stays open: all sections read through its descriptor, also in forked workers
        self._members: dict[str, tuple[int, int]] = {}
        links: dict[str, str] = {}
        try:
            for member in _members(self._file):
                path = os.path.normpath(member.name)
                if member.isreg():
                    self._members[path] = member.offset_data, member.size
                elif member.issym():  # docker save stores a repeated layer as a link
                    links[path] = os.path.normpath(os.path.join(os.path.dirname(path), member.linkname))
                elif member.islnk():
                    links[path] = os.path.normpath(member.linkname)
        except (tarfile.TarError, EOFError, ValueError, OverflowError, RecursionError, MemoryError) as e:
            raise ImageError(f"{name}: not a tar archive: {e}") from e
        for path, target in links.items():
            if target in self._members:
                self._members[path] = self._members[target]

    def open(self, name: str) -> Section:
        offset_and_size = self._members.get(os.path.normpath(name))
        if offset_and_size is None:
            raise ImageError(f"{self._name}: no {name} in the archive", hint="check that the archive is complete")
        return Section(self._file.fileno(), *offset_and_size)


def _members(file: IO[bytes]) -> Iterator[tarfile.TarInfo]:
    """Yield the members of an untrusted tar file. Raises ValueError for an endless file, and the errors of tarfile."""
    last_offset = -1
    with tarfile.open(fileobj=cast(IO[bytes], _Headers(file)), mode="r:") as tar:
        for count, member in enumerate(iter(tar.next, None)):
            tar.members.clear()  # type: ignore[attr-defined]  # tarfile would keep every member in memory
            # With a negative size, tarfile would read the same members again and again: CVE-2025-8194.
            if member.size < 0 or member.offset <= last_offset or count > _MAX_MEMBERS:
                raise ValueError("too many members, or a loop of members")
            if len(tar.pax_headers) > _MAX_GLOBAL_HEADERS:  # tarfile copies all of them to each member
                raise ValueError("too many global headers")
            last_offset = member.offset
            yield member


class _Headers:
    """The file from which tarfile reads the headers of a tar. read() refuses a header above _MAX_DOCUMENT_BYTES."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.tell = file.tell
        self.seek = file.seek

    def read(self, size: int) -> bytes:
        if not 0 <= size <= _MAX_DOCUMENT_BYTES:
            raise ValueError(f"bad header size: {size} bytes")
        return self._file.read(size)


def open_plain(path: str, settings: Settings) -> IO[bytes]:
    """Open an archive. A compressed archive is decompressed to an unnamed temporary file. Raises ImageError."""
    try:
        with contextlib.ExitStack() as closing:
            file = closing.enter_context(open(_open_regular(path), "rb"))
            algorithm = compression.name_of(file.read(compression.MAGIC_BYTES))
            file.seek(0)
            if algorithm == "none":
                closing.pop_all()
                return file
            log.info(f"decompressing {path} ({algorithm})")
            out = closing.enter_context(scratch(settings))
            stream = closing.enter_context(compression.Decompressed(file))
            for piece in stream.pieces(1 << 62):
                out.write(piece)
            return reopened(out)
    except OSError as e:
        raise ImageError(f"cannot read the image archive {path}: {e.strerror}") from e
    except ImageError as e:
        raise ImageError(f"{path}: {e}", hint=e.hint) from e


def scratch(settings: Settings) -> IO[bytes]:
    """Create an unnamed temporary file, in the cache directory if it exists."""
    return tempfile.TemporaryFile(dir=settings.cache_path if os.path.isdir(settings.cache_path) else None)


def reopened(file: IO[bytes]) -> IO[bytes]:
    """Rewind a temporary file, and return a duplicate. The duplicate stays open if the writer closes the original."""
    file.seek(0)
    return os.fdopen(os.dup(file.fileno()), "rb")


def document(files: Files, name: str) -> bytes:
    """Read an index, manifest or config. Raises ImageError."""
    with files.open(name) as section:
        if section.size > _MAX_DOCUMENT_BYTES:
            raise ImageError(f"{name} is larger than {_MAX_DOCUMENT_BYTES >> 20} MiB: {section.size} bytes")
        data = io.BytesIO()
        while piece := section.read(_MAX_DOCUMENT_BYTES):
            data.write(piece)
        return data.getvalue()
