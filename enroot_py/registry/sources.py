"""Sources of images, with one interface for the import: a registry and its mirrors, or this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

from enroot_py.base import log
from enroot_py.base.errors import ImageError, RegistryError
from enroot_py.config.settings import Settings
from enroot_py.registry import site
from enroot_py.registry.manifests import Descriptor, Manifest
from enroot_py.registry.reference import LocalImage, Reference

if TYPE_CHECKING:
    from typing_extensions import Self

    from enroot_py.registry.repository import Repository

_T = TypeVar("_T")


class Blob(Protocol):
    """A stream of bytes. Leaving the ``with`` closes it."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...
    def read(self, size: int, /) -> bytes: ...


class ImageSource(Protocol):
    """The interface of a source of an image. Methods raise ImageError, and RegistryError for a registry."""

    @property
    def base(self) -> str:
        """Return the origin to record in the store: SCHEME://HOST of the registry, the engine's name, or ""."""

    def digest(self) -> str:
        """Return the current digest of the image's name, or "" if only manifest() can find the digest."""

    def manifest(self, arch: str | None = None) -> Manifest: ...
    def config(self, manifest: Manifest) -> bytes: ...
    def blob(self, descriptor: Descriptor) -> Blob: ...


@runtime_checkable
class Expecting(Protocol):
    """A source that must get the list of blobs before the first read."""

    def begin(self, blobs: Sequence[Descriptor]) -> None: ...

    def instead(self, descriptor: Descriptor) -> Blob | None:
        """Return the blob from the registry if the bytes from peers do not match its digest, else None."""


class Peers(Protocol):
    """The nodes of a step that import the same image. ``root`` is the directory of this node's store."""

    def source(self, image: Reference, settings: Settings, root: str) -> ImageSource:
        """Return a source that shares the image's blobs with the other nodes."""

    def digest(self) -> str:
        """Return the digest of the step's tag, if srun resolves it for the nodes, or "". Raises RegistryError."""

    def lend(self, image: Reference, settings: Settings, root: str) -> None:
        """Send a stored image to the nodes that lack it. Raises OSError."""


def open_source(
    reference: Reference | LocalImage, settings: Settings, on_progress: Callable[[bool], None] = lambda busy: None
) -> ImageSource:
    """Open the source of an image. Sends no request yet, but reads an archive. Raises ImageError.

    ``on_progress``: see Repository.
    """
    if isinstance(reference, Reference):
        return open_registry(reference, settings, on_progress)
    from enroot_py.registry import local

    return local.open_image(reference, settings)


def open_registry(
    reference: Reference, settings: Settings, on_progress: Callable[[bool], None] = lambda busy: None
) -> Repository | Mirrored:
    """Open an image in a registry or its mirrors. Sends no request yet. ``on_progress``: see Repository."""
    repositories = places(reference, settings, on_progress)
    is_direct = [repository.reference for repository in repositories] == [reference]
    return repositories[0] if is_direct else Mirrored(repositories)


def places(
    reference: Reference, settings: Settings, on_progress: Callable[[bool], None] = lambda busy: None
) -> list[Repository]:
    """Return the image's repository in each mirror, in order, then in the registry itself."""
    from enroot_py.registry.repository import Repository

    places = site.places(reference, settings)
    return [Repository(place.reference, settings, on_progress, is_insecure=place.is_insecure) for place in places]


class Mirrored:
    """The repositories of an image whose registry has mirrors, or a ``location`` in podman's registries.conf.

    The first repository that returns the manifest serves the whole image.
    """

    def __init__(self, repositories: list[Repository]) -> None:
        self._repositories = repositories

    def _first(self, ask: Callable[[Repository], _T]) -> _T:
        while len(self._repositories) > 1:
            try:
                return ask(self._repositories[0])
            except (RegistryError, ImageError) as e:
                failed = self._repositories.pop(0)
                log.warn(f"mirror {failed.host} failed, trying {self._repositories[0].host}: {e}")
        return ask(self._repositories[0])

    @property
    def base(self) -> str:
        return ""  # the store must not remember one server, because the next import must ask the mirrors first

    def digest(self) -> str:
        return self._first(lambda repository: repository.digest())

    def manifest(self, arch: str | None = None) -> Manifest:
        return self._first(lambda repository: repository.manifest(arch))

    def config(self, manifest: Manifest) -> bytes:
        return self._first(lambda repository: repository.config(manifest))

    def blob(self, descriptor: Descriptor, start: int = 0) -> Blob:
        return self._repositories[0].blob(descriptor, start)
