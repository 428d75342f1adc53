"""A reference becomes an image in the store.

What it meant last is known of the store's refs. A digest goes on meaning that; of a tag the registry is asked for the
digest that it has now. Where the image is stored it is used. Else its source (a registry, its mirrors, a file or an
engine) is asked for the manifest, and fetch.py brings what the store lacks. What the reference means is remembered.
Where there is a policy, policies.py asks before all that, and before anything is unpacked, whether the image may be.
"""

from __future__ import annotations

import os

from enroot_py.base import log, recording
from enroot_py.base.digests import Pin
from enroot_py.base.errors import ImageError, PenrootError, RegistryError, Unreachable
from enroot_py.base.recording import Recording
from enroot_py.registry import tags
from enroot_py.registry.platforms import architecture
from enroot_py.registry.reference import ENGINES, LocalImage, Reference
from enroot_py.store import layout
from enroot_py.store.store import Image, Name, Store

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from enroot_py.config.settings import Settings
    from enroot_py.registry.manifests import Manifest
    from enroot_py.registry.sources import ImageSource, Peers


def pull(
    reference: Reference | LocalImage,
    settings: Settings,
    *,
    arch: str | None = None,
    pin: Pin | None = None,
    peers: Peers | None = None,
) -> Image:
    """The image of a reference, in the store when this returns.

    A digest that is stored costs no request, a tag whose image is stored one. Where
    the registry does not answer and an image is stored for the name, it is used,
    with a warning. ``pin`` is the digest that a tag has for all nodes of a step, whatever it means by now: see
    tags.pin(). ``peers`` are nodes that give the image to each other. The image is held: see Image.hold.
    Raises RegistryError, ImageError, ConfigError.
    """
    with Recording("pull", settings, image=str(reference)):
        way = Pull(reference, settings, arch, pin, peers)
        while True:
            image = way.image()
            recording.fact(digest=image.digest)
            if image.hold():  # else it was pruned this very moment
                return image


def digest(reference: Reference | LocalImage, settings: Settings, arch: str | None) -> str:
    """The digest of the image that pull() would give, without pulling it. Raises PenrootError."""
    from enroot_py.registry.sources import open_source

    wanted = _pinned(reference, tags.pin(reference, settings))
    return open_source(wanted, settings).manifest(arch).digest


class Pull:
    """One reference on its way into the store."""

    def __init__(
        self,
        reference: Reference | LocalImage,
        settings: Settings,
        arch: str | None,
        pin: Pin | None,
        peers: Peers | None,
    ) -> None:
        self._reference = reference
        self._settings = settings
        self._arch = arch
        self._pin = tags.pin(reference, settings, pin)
        self._wanted = _pinned(reference, self._pin)
        # A directory of blobs that all nodes share serves them too.
        self._peers = None if settings.shared_blobs else peers
        self._admission: Any = None
        if settings.policies:
            from enroot_py.store import policies

            self._admission = policies.admission(settings).Admission(reference, settings)
        self._store = Store(settings.cache_path, create=True)

    def image(self) -> Image:
        """The image, in the store; it may be pruned before it is held.

        Raises RegistryError, ImageError, PolicyError.
        """
        self._known = self._store.known(self._reference, self._arch)
        stored = self._stored()
        if stored is not None and self._wanted.digest:
            self._check_stored(stored)
            if self._peers is not None and isinstance(self._wanted, Reference):
                self._peers.lend(self._wanted, self._settings, self._store.root)
            return stored
        try:
            is_current = stored is not None and self._is_current()
            if not is_current:
                source = self._source(hurried=stored is not None)
                manifest = source.manifest(self._arch)
        except RegistryError as e:
            if self._wanted != self._reference:
                raise self._disagreement(e) from e
            if stored is None or not isinstance(e, Unreachable):
                raise
            log.warn(f"{e}; using the stored image {stored.digest} of {self._reference}")
            if e.hint:
                log.hint(e.hint)
            is_current = True
        if stored is not None and is_current:
            self._check_stored(stored)
            return stored
        base = source.base
        if self._admission is not None:
            self._admission.check(manifest, source)
        if stored is not None and isinstance(self._reference, Reference):
            source = self._source()  # a fetch takes its time
        recording.phase("resolve")
        image = self._store.image(manifest.digest) or self._fetch(source, manifest)
        if manifest.named == manifest.digest:  # no index said what it is for
            self._check_platform(image)
        if self._admission is not None:
            self._admission.keep(image)
        self._store.name(self._reference, self._arch, Name(manifest.digest, manifest.named, base))
        return image

    def _check_stored(self, image: Image) -> None:
        """Whether the policies let in what is stored. Raises PolicyError, ConfigError, RegistryError, ImageError."""
        if self._admission is not None:
            known = self._known
            given = known.given if known is not None and known.digest == image.digest else ""
            self._admission.check_stored(image, given or self._wanted.digest)

    def _stored(self) -> Image | None:
        """The image that the reference meant last; for one that is wanted by a digest that image, or none."""
        known = self._known
        if known is not None and self._wanted != self._reference and known.given != self._wanted.digest:
            known = None  # it meant another image then
        digest = known.digest if known else self._wanted.digest  # that of a manifest, perhaps pulled by its tag
        return self._store.image(digest) if digest else None

    def _is_current(self) -> bool:
        """Whether the registry or engine of a stored image says that its name still means it. Raises PenrootError."""
        if self._known is None or not self._known.given:
            return False
        if isinstance(self._reference, LocalImage):
            return self._reference.scheme in ENGINES and self._source().digest() == self._known.given
        return tags.now(self._reference, self._known.base, self._settings) == self._known.given

    def _source(self, *, hurried: bool = False) -> ImageSource:
        """Where the image comes from; ``hurried`` if there is one to go on with, so that it need not be waited for."""
        from enroot_py.registry.sources import open_source

        settings = self._settings
        if hurried:
            settings = settings.replace("a stored image", connect_timeout=2, stall_timeout=5, transfer_retries=0)
        if self._peers is not None and isinstance(self._wanted, Reference) and not hurried:
            return self._peers.source(self._wanted, settings, self._store.root)
        return open_source(self._wanted, settings)

    def _fetch(self, source: ImageSource, manifest: Manifest) -> Image:
        from enroot_py.store.fetch import Fetch

        return Fetch(self._store, self._reference, source, manifest, self._settings).image()

    def _disagreement(self, error: RegistryError) -> PenrootError:
        """Why the image that the tag is pinned to cannot be had here, where the tag may be another one now."""
        if not str(error):  # another node says it
            return error
        here = self._known.given if self._known else ""
        if not isinstance(error, Unreachable):
            from enroot_py.registry.sources import open_source

            try:
                here = open_source(self._reference, self._settings).digest()
            except (RegistryError, ImageError) as e:
                log.debug(str(e))
        if self._pin is None:
            return error
        if not here or here == self._wanted.digest:
            if self._pin == Pin(self._pin.digest):
                return error
            return type(error)(f"{self._reference}: {self._pin.origin} {self._pin.digest}: {error}", hint=error.hint)
        is_another = f"{self._reference} is {here} on {os.uname().nodename}"
        return ImageError(
            f"{is_another}, but {self._pin.origin} {self._wanted.digest}: {error}",
            hint=f"the tag has moved, and the old image is gone; {self._pin.hint}",
        )

    def _check_platform(self, image: Image) -> None:
        """Whether an image is for the architecture asked for, or for this machine.

        Raises ImageError in the first case, or for another system; warns in the second: an emulator may be at hand.
        """
        from enroot_py.store.imageconfig import ImageConfig

        with open(f"{image.path}/{layout.CONFIG}", "rb") as f:
            system, its = ImageConfig(f.read(), f"{self._reference} in the store").platform
        if system and system != "linux":
            raise ImageError(f"{self._reference} is for {system}, this is Linux")
        wanted = architecture((self._arch or "").partition("/")[0] or None)
        if not its or its == wanted:
            return
        if self._arch:
            hint = "leave out --arch, or name another image"
            raise ImageError(f"{self._reference} is for {its}, and for nothing else", hint=hint)
        log.warn(f"{self._reference} is for {its}, this machine is {wanted}")


def _pinned(reference: Reference | LocalImage, pin: Pin | None) -> Reference | LocalImage:
    """The image that a tag was when it was pinned."""
    return reference.at(pin.digest) if pin and isinstance(reference, Reference) else reference
