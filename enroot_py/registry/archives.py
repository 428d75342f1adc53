"""The files of an image on this machine, by name: in a directory, or in an archive, which is read where it is."""

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

_MAX_DOCUMENT = 8 << 20  # bytes of an index, manifest or config
_MAX_MEMBERS = 100_000  # of an archive: it has a few for each layer
_MAX_GLOBAL = 1000  # pax records that hold for all members


class Files(Protocol):
    def open(self, name: str) -> Section:
        """Raises ImageError where there is none."""


class Section:
    """A part of an open file as a stream, which shares no position with others."""

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
        """Up to ``size`` bytes, none at the end. Raises ImageError."""
        try:
            data = os.pread(self._fd, min(size, self._end - self._at), self._at)
        except OSError as e:
            raise ImageError(f"cannot read the image: {e.strerror}") from e
        self._at += len(data)
        return data


class _WholeFile(Section):
    """A file of its own, which a ``with`` closes."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd, 0, os.fstat(fd).st_size)

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


class LayoutDirectory:
    """The files of an OCI layout in a directory. No link in it leads out of it."""

    def __init__(self, path: str) -> None:
        self._path = path

    def open(self, name: str) -> Section:
        path = f"{self._path}/{name}"
        try:
            with Fd(os.open(self._path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as directory:
                return _WholeFile(_regular(name, directory))
        except OSError as e:
            why, hint = e.strerror, ""
            if e.errno == errno.EXDEV:
                why, hint = "it is a link that leads out of the layout", f"cp -rL {self._path} makes one without links"
            elif not os.path.exists(f"{self._path}/index.json"):
                hint = f"{self._path} is no OCI layout"
            raise ImageError(f"cannot read {path}: {why}", hint=hint) from e


def _regular(path: str, beneath: int | None = None) -> int:
    """Open a regular file, of ``beneath`` or what is in that directory; a FIFO is not waited for. Raises OSError."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    if beneath is None:
        fd = os.open(path, flags)
    else:
        fd = linux.openat2(beneath, path, flags, 0, linux.RESOLVE_BENEATH | linux.RESOLVE_NO_MAGICLINKS)
    with Fd(fd) as file:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(errno.EINVAL, "not a file", path)
        return file.keep()


class Archive:
    """The members of a tar file, which is read where they are. Raises ImageError."""

    def __init__(self, name: str, file: IO[bytes]) -> None:
        self._name = name
        self._file = file  # stays open: its descriptor serves all, in forked workers too
        self._members: dict[str, tuple[int, int]] = {}
        links: dict[str, str] = {}
        try:
            for member in _members(self._file):
                path = os.path.normpath(member.name)
                if member.isreg():
                    self._members[path] = member.offset_data, member.size
                elif member.issym():  # docker save: layers that are the same
                    links[path] = os.path.normpath(os.path.join(os.path.dirname(path), member.linkname))
                elif member.islnk():
                    links[path] = os.path.normpath(member.linkname)
        except (tarfile.TarError, EOFError, ValueError, OverflowError, RecursionError, MemoryError) as e:
            raise ImageError(f"{name}: not a tar archive: {e}") from e
        for path, target in links.items():
            if target in self._members:
                self._members[path] = self._members[target]

    def open(self, name: str) -> Section:
        where = self._members.get(os.path.normpath(name))
        if where is None:
            raise ImageError(f"{self._name}: no {name} in the archive", hint="it is truncated, or of another kind")
        return Section(self._file.fileno(), *where)


def _members(file: IO[bytes]) -> Iterator[tarfile.TarInfo]:
    """The members of a tar file that may be hostile. Raises ValueError for one without end, and what tarfile does."""
    at = -1
    with tarfile.open(fileobj=cast(IO[bytes], _Headers(file)), mode="r:") as tar:
        for count, member in enumerate(iter(tar.next, None)):
            tar.members.clear()  # type: ignore[attr-defined]  # else all of them are kept
            # A negative size leads back, for ever: CVE-2025-8194.
            if member.size < 0 or member.offset <= at or count > _MAX_MEMBERS:
                raise ValueError("members without end")
            if len(tar.pax_headers) > _MAX_GLOBAL:  # each member is given all of them
                raise ValueError("too many global headers")
            at = member.offset
            yield member


class _Headers:
    """A tar file of which its headers alone are read, and none of any size."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.tell = file.tell
        self.seek = file.seek

    def read(self, size: int) -> bytes:
        if not 0 <= size <= _MAX_DOCUMENT:
            raise ValueError(f"a header of {size} bytes")
        return self._file.read(size)


def open_plain(path: str, settings: Settings) -> IO[bytes]:
    """An archive, open; a compressed one is decompressed to a file without a name. Raises ImageError."""
    try:
        with contextlib.ExitStack() as closing:
            file = closing.enter_context(open(_regular(path), "rb"))
            form = compression.name_of(file.read(compression.MAGIC_SIZE))
            file.seek(0)
            if form == "none":
                closing.pop_all()
                return file
            log.info(f"{path}: {form}, decompressing it")
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
    """A file without a name."""
    return tempfile.TemporaryFile(dir=settings.cache_path if os.path.isdir(settings.cache_path) else None)


def reopened(file: IO[bytes]) -> IO[bytes]:
    """What was written to a file that is going to be closed, from its beginning."""
    file.seek(0)
    return os.fdopen(os.dup(file.fileno()), "rb")


def document(files: Files, name: str) -> bytes:
    """A file that is an index, manifest or config. Raises ImageError."""
    with files.open(name) as section:
        if section.size > _MAX_DOCUMENT:
            raise ImageError(f"{name} has {section.size} bytes")
        data = io.BytesIO()
        while piece := section.read(_MAX_DOCUMENT):
            data.write(piece)
        return data.getvalue()
