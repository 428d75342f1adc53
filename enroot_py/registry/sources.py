"""Where images come from: a registry, an OCI layout, an archive, or a container engine.

All are asked alike, so that one pipeline serves them. Sources: OCI image
specification, "Image Layout"; Docker's image specification v1.2, "Combined Image JSON +
Filesystem Changeset Format"; docker-image-save(1), podman-save(1).
"""

from __future__ import annotations

import errno
import io
import json
import os
import stat
import tarfile
import tempfile
from collections.abc import Callable
from typing import IO, TYPE_CHECKING, Any, Protocol, TypeVar, cast

from enroot_py.base import digests, linux, log, run
from enroot_py.base.errors import ImageError, RegistryError
from enroot_py.config.settings import Settings
from enroot_py.registry import manifests
from enroot_py.registry.manifests import Descriptor, Manifest
from enroot_py.registry.reference import ENGINES, LocalImage, Reference, parse

if TYPE_CHECKING:
    from enroot_py.registry.repository import Repository

_T = TypeVar("_T")
_MAX_DOCUMENT = 8 << 20  # bytes of an index, manifest or config
_MAX_MEMBERS = 100_000  # of an archive: it has a few for each layer
_MAX_GLOBAL = 1000  # pax records that hold for all members
_TITLE = "org.opencontainers.image.ref.name"  # OCI image specification, "Pre-Defined Annotation Keys"


class Blob(Protocol):
    """A stream that is closed at the end of a ``with``."""

    def __enter__(self) -> Blob: ...
    def __exit__(self, *_: object) -> None: ...
    def read(self, size: int, /) -> bytes: ...


class Source(Protocol):
    """What the pipeline asks of the place of an image. All raise ImageError, a registry RegistryError too."""

    @property
    def base(self) -> str:
        """Where it was reached, to be remembered."""

    def digest(self) -> str:
        """The digest that the name has now, or "" where that costs as much as manifest()."""

    def manifest(self, arch: str | None = None) -> Manifest: ...
    def config(self, manifest: Manifest) -> bytes: ...
    def blob(self, descriptor: Descriptor) -> Blob: ...


def open_source(
    reference: Reference | LocalImage, settings: Settings, heard: Callable[[bool], None] = lambda asks: None
) -> Source:
    """The place of an image. A registry is not yet asked; an archive is read. Raises ImageError.

    ``heard``: see Repository.
    """
    if isinstance(reference, Reference):
        from enroot_py.registry import site
        from enroot_py.registry.repository import Repository

        mirrors = site.site(reference.registry, settings).mirrors
        places = [site.mirrored(reference, mirror) for mirror in mirrors] + [reference]
        every = [Repository(place, settings, heard) for place in places]
        return Mirrored(every) if mirrors else every[0]
    if reference.scheme == "oci:":
        return Layout(reference, _Directory(reference.place))
    if reference.scheme == "oci-archive:":
        return Layout(reference, _Archive(reference, _plain(reference, settings)))
    if reference.scheme == "docker-archive:":
        return DockerArchive(reference, _Archive(reference, _plain(reference, settings)))
    return Engine(reference, settings)


# ---------------------------------------------------------------------------
# Files by name


class _Files(Protocol):
    def open(self, name: str) -> Section:
        """Raises ImageError where there is none."""


class Section:
    """A part of an open file as a stream, which shares no position with others."""

    def __init__(self, fd: int, offset: int, size: int) -> None:
        self._fd = fd
        self._at = offset
        self._end = offset + size
        self.size = size

    def __enter__(self) -> Section:
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
    """A file of its own."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd, 0, os.fstat(fd).st_size)

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


class _Directory:
    """The files of an OCI layout in a directory. No link in it leads out of it."""

    def __init__(self, path: str) -> None:
        self._path = path

    def open(self, name: str) -> Section:
        path = f"{self._path}/{name}"
        try:
            directory = os.open(self._path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                return _WholeFile(_regular(name, directory))
            finally:
                os.close(directory)
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
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a file", path)
    return fd


class _Archive:
    """The members of a tar file, which is read where they are."""

    def __init__(self, reference: LocalImage, file: IO[bytes]) -> None:
        self._file = file  # kept open: its descriptor serves all, in forked workers too
        self._what = str(reference)
        self._members: dict[str, tuple[int, int]] = {}
        links: dict[str, str] = {}
        at = -1
        try:
            with tarfile.open(fileobj=cast(IO[bytes], _Headers(file)), mode="r:") as tar:
                for count, member in enumerate(iter(tar.next, None)):
                    tar.members.clear()  # type: ignore[attr-defined]  # else all of them are kept
                    # A negative size leads back, for ever: CVE-2025-8194.
                    if member.size < 0 or member.offset <= at or count > _MAX_MEMBERS:
                        raise ValueError("members without end")
                    if len(tar.pax_headers) > _MAX_GLOBAL:  # each member is given all of them
                        raise ValueError("too many global headers")
                    at = member.offset
                    name = os.path.normpath(member.name)
                    if member.isreg():
                        self._members[name] = member.offset_data, member.size
                    elif member.issym():  # docker save: layers that are the same
                        links[name] = os.path.normpath(os.path.join(os.path.dirname(name), member.linkname))
                    elif member.islnk():
                        links[name] = os.path.normpath(member.linkname)
        except (tarfile.TarError, EOFError, ValueError, OverflowError, RecursionError, MemoryError) as e:
            raise ImageError(f"{reference}: not a tar archive: {e}") from e
        for name, target in links.items():
            if target in self._members:
                self._members[name] = self._members[target]

    def open(self, name: str) -> Section:
        where = self._members.get(os.path.normpath(name))
        if where is None:
            raise ImageError(f"{self._what}: no {name} in the archive", hint="it is truncated, or of another kind")
        return Section(self._file.fileno(), *where)


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


def _plain(reference: LocalImage, settings: Settings) -> IO[bytes]:
    """The archive of a reference, open; a compressed one is decompressed to a file without a name."""
    from enroot_py.base import compression

    path = reference.place
    try:
        file = os.fdopen(_regular(path), "rb")
        start = file.read(8)
        file.seek(0)
        if compression.name_of(start) == "none":
            return file
        log.info(f"{path}: {compression.name_of(start)}, decompressing it")
        with file, _scratch(settings) as out, compression.Decompressed(file) as stream:
            for piece in stream.pieces(1 << 62):
                out.write(piece)
            out.seek(0)
            return os.fdopen(os.dup(out.fileno()), "rb")
    except OSError as e:
        raise ImageError(f"cannot read the image archive {path}: {e.strerror}") from e
    except ImageError as e:
        raise ImageError(f"{path}: {e}", hint=e.hint) from e


def _scratch(settings: Settings) -> IO[bytes]:
    return tempfile.TemporaryFile(dir=settings.cache_path if os.path.isdir(settings.cache_path) else None)


def _document(files: _Files, name: str) -> bytes:
    with files.open(name) as section:
        if section.size > _MAX_DOCUMENT:
            raise ImageError(f"{name} has {section.size} bytes")
        data = io.BytesIO()
        while piece := section.read(_MAX_DOCUMENT):
            data.write(piece)
        return data.getvalue()


def _json(files: _Files, name: str, reference: LocalImage) -> Any:
    try:
        return json.loads(_document(files, name))
    except (ValueError, RecursionError) as e:
        raise ImageError(f"{reference}: {name} is not JSON: {e}") from e


# ---------------------------------------------------------------------------
# The places


class Mirrored:
    """A registry and its mirrors, which are asked first: the first that has the manifest serves all of the image."""

    def __init__(self, places: list[Repository]) -> None:
        self._places = places

    def _first(self, ask: Callable[[Repository], _T]) -> _T:
        while len(self._places) > 1:
            try:
                return ask(self._places[0])
            except (RegistryError, ImageError) as e:
                log.warn(f"a mirror does not serve: {e}")
                del self._places[0]
        return ask(self._places[0])

    @property
    def base(self) -> str:
        return ""  # whoever it was: the mirrors are to be asked again

    def digest(self) -> str:
        return self._first(lambda place: place.digest())

    def manifest(self, arch: str | None = None) -> Manifest:
        return self._first(lambda place: place.manifest(arch))

    def config(self, manifest: Manifest) -> bytes:
        return self._first(lambda place: place.config(manifest))

    def blob(self, descriptor: Descriptor) -> Blob:
        return self._places[0].blob(descriptor)


class Layout:
    """An OCI layout: a directory, or an archive of one."""

    base = ""

    def __init__(self, reference: LocalImage, files: _Files) -> None:
        self._reference = reference
        self._files = files

    def digest(self) -> str:
        return ""

    def manifest(self, arch: str | None = None) -> Manifest:
        """The manifest for an architecture, of the image that the reference names or of the only one."""
        index = _json(self._files, "index.json", self._reference)
        entries = index.get("manifests") if isinstance(index, dict) else None
        entries = [e for e in entries if isinstance(e, dict)] if isinstance(entries, list) else []
        titles = [str(manifests.fields(e.get("annotations")).get(_TITLE) or "") for e in entries]
        wanted = self._reference.name
        if wanted:
            entries = [e for e, title in zip(entries, titles, strict=True) if title == wanted]
        if not entries or not wanted and len(set(titles)) > 1:
            some = ", ".join(sorted(filter(None, titles))) or "none"
            raise ImageError(
                f"{self._reference}: {'no such image' if wanted else 'more than one image'} in there",
                hint=f"there is: {some}; write {self._reference.scheme}{self._reference.place}:NAME",
            )
        search = manifests.Search(self, self._reference, arch)
        if len(entries) > 1:
            return search.image_in(entries, "")
        return search.image_of(self.named(str(entries[0].get("digest"))))

    def config(self, manifest: Manifest) -> bytes:
        return self.named(manifest.config.digest)

    def blob(self, descriptor: Descriptor) -> Section:
        return self._files.open(_blob_name(descriptor.digest))

    def named(self, digest: str) -> bytes:
        data = _document(self._files, _blob_name(digest))
        if digests.of(data) != digest:
            raise ImageError(f"{self._reference}: the blob {digest} has the digest {digests.of(data)}")
        return data


def _blob_name(digest: str) -> str:
    return f"blobs/sha256/{digests.encoded(digest)}"


class DockerArchive:
    """What ``docker save`` writes: manifest.json names the config and the layers' tars.

    It has no manifest with digests, so one is made, the same for the same image: of the
    config, and the layers under their diff-ids, which the config has.
    """

    base = ""

    def __init__(self, reference: LocalImage, files: _Files) -> None:
        self._reference = reference
        self._files = files
        self._blobs: dict[str, str] = {}
        self._config = b""

    def digest(self) -> str:
        return ""

    def manifest(self, arch: str | None = None) -> Manifest:
        """The image that the reference names, or the only one; an archive has no choice of architectures."""
        entry = self._choose(_json(self._files, "manifest.json", self._reference))
        try:
            self._config = _document(self._files, str(entry["Config"]))
            names = [str(name) for name in entry["Layers"] or ()]
            diff_ids = json.loads(self._config)["rootfs"]["diff_ids"] or []
            if len(names) != len(diff_ids):
                raise ImageError(f"{self._reference}: {len(names)} layers, and {len(diff_ids)} diff_ids in its config")
            self._blobs = dict(zip(diff_ids, names, strict=True))
            layers = []
            for diff_id, name in zip(diff_ids, names, strict=True):
                with self._files.open(name) as section:
                    layers.append({"mediaType": "application/vnd.oci.image.layer.v1.tar", "digest": diff_id,
                                   "size": section.size})  # fmt: skip
        except (KeyError, TypeError, ValueError, RecursionError) as e:
            raise ImageError(f"{self._reference}: not written by docker save: {e!r}") from e
        document = {
            "schemaVersion": 2,
            "config": {"digest": digests.of(self._config), "size": len(self._config)},
            "layers": layers,
        }
        data = json.dumps(document, sort_keys=True).encode()
        return manifests.manifest(data, document, digests.of(data), self._reference)

    def _choose(self, entries: Any) -> dict[str, Any]:
        entries = [e for e in entries if isinstance(e, dict)] if isinstance(entries, list) else []
        said = [e.get("RepoTags") for e in entries]
        tags = [[str(tag) for tag in some] if isinstance(some, list) else [] for some in said]
        if self._reference.name:
            # Some write docker.io/library/x:latest, others x:latest.
            wanted = parse(self._reference.name)
            entries = [e for e, some in zip(entries, tags, strict=True) if wanted in map(parse, some)]
        if len(entries) == 1:
            found: dict[str, Any] = entries[0]
            return found
        there = ", ".join(tag for some in tags for tag in some) or "none with a name"
        raise ImageError(
            f"{self._reference}: {'no such image' if self._reference.name else 'more than one image'} in the archive",
            hint=f"there is: {there}; write {self._reference.scheme}{self._reference.place}:NAME:TAG",
        )

    def config(self, manifest: Manifest) -> bytes:
        return self._config

    def blob(self, descriptor: Descriptor) -> Section:
        return self._files.open(self._blobs[descriptor.digest])


class Engine:
    """An image that docker or podman keeps, taken from them with ``save``; pulled by them first where they lack it."""

    def __init__(self, reference: LocalImage, settings: Settings) -> None:
        self._reference = reference
        self._settings = settings
        self.base = ENGINES[reference.scheme]
        self._program = run.find(self.base, package=self.base)
        self._archive: DockerArchive | None = None
        self._id = ""

    def _engine(self, *arguments: str, stdout: int | None = None) -> str:
        return run.run([self._program, *arguments], error=ImageError, stdout=stdout, environ=os.environ)

    def digest(self) -> str:
        """The engine's own id of the image."""
        ask = ("image", "inspect", "--format", "{{.Id}}", self._reference.place)
        if not self._id:
            try:
                self._id = self._engine(*ask).strip()
            except ImageError as e:
                log.debug(f"{e}; asking {self.base} to pull it")
                self._engine("pull", self._reference.place)
                self._id = self._engine(*ask).strip()
        return self._id

    def manifest(self, arch: str | None = None) -> Manifest:
        named = self.digest()
        log.info(f"{self._reference}: {self.base} saves it")
        with _scratch(self._settings) as out:
            self._engine("save", self._reference.place, stdout=out.fileno())
            out.seek(0)
            kept = os.fdopen(os.dup(out.fileno()), "rb")
        # It may hold more than one name, but only one image.
        self._archive = DockerArchive(self._reference, _Archive(self._reference, kept))
        found = self._archive.manifest(arch)
        return Manifest(found.digest, named, found.data, found.config, found.layers)

    def config(self, manifest: Manifest) -> bytes:
        assert self._archive is not None
        return self._archive.config(manifest)

    def blob(self, descriptor: Descriptor) -> Section:
        assert self._archive is not None
        return self._archive.blob(descriptor)
