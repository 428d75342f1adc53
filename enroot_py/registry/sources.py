"""Where images come from: a registry and its mirrors, or places on this machine.

All are asked alike, so that one pipeline serves them.
"""

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
    """A stream that is closed at the end of a ``with``."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...
    def read(self, size: int, /) -> bytes: ...


class ImageSource(Protocol):
    """What the pipeline asks of the place of an image. All raise ImageError, a registry RegistryError too."""

    @property
    def base(self) -> str:
        """Where it was reached, to be remembered."""

    def digest(self) -> str:
        """The digest that the name has now, or "" where that costs as much as manifest()."""

    def manifest(self, arch: str | None = None) -> Manifest: ...
    def config(self, manifest: Manifest) -> bytes: ...
    def blob(self, descriptor: Descriptor) -> Blob: ...


@runtime_checkable
class Expecting(Protocol):
    """A source that wants to know which blobs will be asked for, before the first of them is."""

    def begin(self, blobs: Sequence[Descriptor]) -> None: ...

    def instead(self, descriptor: Descriptor) -> Blob | None:
        """The blob from where it comes from, if what others gave is not what its digest says."""


class Peers(Protocol):
    """Other nodes of a step, to which an image comes at the same time; ``root`` is that of this node's store."""

    def source(self, image: Reference, settings: Settings, root: str) -> ImageSource:
        """Return the image as the nodes give it to each other."""

    def lend(self, image: Reference, settings: Settings, root: str) -> None:
        """Give an image that is stored here to nodes that lack it. Raises OSError."""


def open_source(
    reference: Reference | LocalImage, settings: Settings, heard: Callable[[bool], None] = lambda asks: None
) -> ImageSource:
    """The place of an image. A registry is not yet asked; an archive is read. Raises ImageError.

    ``heard``: see Repository.
    """
    if isinstance(reference, Reference):
        return open_registry(reference, settings, heard)
    from enroot_py.registry import local

    return local.open_image(reference, settings)


def open_registry(
    reference: Reference, settings: Settings, heard: Callable[[bool], None] = lambda asks: None
) -> Repository | Mirrored:
    """The place of an image in a registry, which is not yet asked. ``heard``: see Repository."""
    every = places(reference, settings, heard)
    return Mirrored(every) if len(every) > 1 else every[0]


def places(
    reference: Reference, settings: Settings, heard: Callable[[bool], None] = lambda asks: None
) -> list[Repository]:
    """The mirrors of a registry, and then itself: the repository of an image in each."""
    from enroot_py.registry.repository import Repository

    mirrors = site.rules(reference.registry, settings).mirrors
    every = [site.mirrored(reference, mirror) for mirror in mirrors] + [reference]
    return [Repository(place, settings, heard) for place in every]


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

    def blob(self, descriptor: Descriptor, start: int = 0) -> Blob:
        return self._places[0].blob(descriptor, start)
