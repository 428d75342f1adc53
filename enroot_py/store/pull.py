"""Resolve a reference to an image in the store, and fetch the image if it is missing.

The store's refs record the last known digest of each reference. The image of a digest never changes. For a tag, ask the
registry for the current digest. If the store has this image, use it. Otherwise get the manifest from the source (a
registry, its mirrors, a file or an engine), let fetch.py fetch the missing layers, and record the result in refs. With
a policy, the module that policies.py returns checks the reference first, and the image before anything is unpacked.
"""

from __future__ import annotations

import os

from enroot_py.base import log, operations
from enroot_py.base.digests import Pin
from enroot_py.base.errors import ImageError, PenrootError, RegistryError, Unreachable
from enroot_py.base.operations import Operation
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
    """Return the image of a reference, stored and held: see Image.hold.

    A stored image needs no request if the reference has a digest, and one request if it has a tag. If the registry does
    not answer, use the stored image with a warning. ``pin`` fixes the digest of a tag on all nodes of a step, even if
    the tag moves: tags.pin(). ``peers`` are nodes that send the image to each other.
    Raises RegistryError, ImageError, ConfigError.
    """
    with Operation("pull", settings, image=str(reference)):
        pull = Pull(reference, settings, arch, pin, peers)
        while True:
            image = pull.image()
            operations.fact(digest=image.digest)
            if image.hold():  # if not, the image was just pruned
                return image


def digest(reference: Reference | LocalImage, settings: Settings, arch: str | None) -> str:
    """Return the digest of the image that pull() would return, without pulling it. Raises PenrootError."""
    from enroot_py.registry.sources import open_source

    pinned = _pinned(reference, tags.pin(reference, settings))
    return open_source(pinned, settings).manifest(arch).digest


class Pull:
    """The pull of one reference into the store."""

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
        # With a shared directory of blobs, peers are not needed.
        self._peers = None if settings.shared_blobs else peers
        self._admission: Any = None
        if settings.policies:
            from enroot_py.store import policies

            self._admission = policies.admission(settings).Admission(reference, settings)
        self._store = Store(settings.cache_path, create=True)

    def image(self) -> Image:
        """Return the stored image, which is not held yet. Raises RegistryError, ImageError, PolicyError."""
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
            source = self._source()  # without the short timeouts
        operations.phase("resolve")
        image = self._store.image(manifest.digest) or self._fetch(source, manifest)
        if manifest.named == manifest.digest:  # no index has stated the platform
            self._check_platform(image)
        if self._admission is not None:
            self._admission.keep(image)
        self._store.name(self._reference, self._arch, Name(manifest.digest, manifest.named, base))
        return image

    def _check_stored(self, image: Image) -> None:
        """Check a stored image like a new image. Raises PolicyError, ConfigError, RegistryError, ImageError."""
        known = self._known
        if self._arch and (known is None or known.resolved_digest == known.digest):
            self._check_platform(image)  # an earlier import without an architecture only warned
        if self._admission is not None:
            named_digest = known.resolved_digest if known is not None and known.digest == image.digest else ""
            self._admission.check_stored(image, named_digest or self._wanted.digest)

    def _stored(self) -> Image | None:
        """Return the stored image that the reference resolved to last, or None.

        If the reference has a digest or a pin, return only the image of this digest.
        """
        known = self._known
        if known is not None and self._wanted != self._reference and known.resolved_digest != self._wanted.digest:
            known = None  # the tag resolved to another image
        # Without a known name, look up the digest: a pull by tag may have stored the image.
        digest = known.digest if known else self._wanted.digest
        return self._store.image(digest) if digest else None

    def _is_current(self) -> bool:
        """Ask the registry or engine whether the name still resolves to the stored image. Raises PenrootError."""
        if self._known is None or not self._known.resolved_digest:
            return False
        if isinstance(self._reference, LocalImage):
            return self._reference.scheme in ENGINES and self._source().digest() == self._known.resolved_digest
        return tags.now(self._reference, self._known.base, self._settings) == self._known.resolved_digest

    def _source(self, *, hurried: bool = False) -> ImageSource:
        """Open the source of the image; ``hurried`` sets short timeouts, for use when an image is stored already."""
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
        """Return the error for a pinned image that cannot be fetched. The error names the tag's current digest."""
        if not str(error):  # another node reports the error
            return error
        current_digest = self._known.resolved_digest if self._known else ""
        if not isinstance(error, Unreachable):
            from enroot_py.registry.sources import open_source

            try:
                current_digest = open_source(self._reference, self._settings).digest()
            except (RegistryError, ImageError) as e:
                log.debug(str(e))
        if self._pin is None:
            return error
        if not current_digest or current_digest == self._wanted.digest:
            if self._pin == Pin(self._pin.digest):
                return error
            return type(error)(f"{self._reference}: {self._pin.origin} {self._pin.digest}: {error}", hint=error.hint)
        return ImageError(
            f"{self._reference} is {current_digest} on {os.uname().nodename}, "
            f"but {self._pin.origin} {self._wanted.digest}: {error}",
            hint=f"the tag has moved, and the old image is gone; {self._pin.hint}",
        )

    def _check_platform(self, image: Image) -> None:
        """Check that an image is for Linux and for the requested architecture. Raises ImageError.

        Without a requested architecture, only warn if the image is for another machine: there may be an emulator.
        """
        from enroot_py.store.imageconfig import ImageConfig

        with open(f"{image.path}/{layout.CONFIG}", "rb") as f:
            system, image_architecture = ImageConfig(f.read(), f"{self._reference} in the store").platform
        if system and system != "linux":
            raise ImageError(f"{self._reference} is for {system}, this is Linux")
        machine = architecture((self._arch or "").partition("/")[0] or None)
        if not image_architecture or image_architecture == machine:
            return
        if self._arch:
            hint = "leave out --arch, or name another image"
            raise ImageError(f"{self._reference} is for {image_architecture} only", hint=hint)
        log.warn(f"{self._reference} is for {image_architecture}, this machine is {machine}")


def _pinned(reference: Reference | LocalImage, pin: Pin | None) -> Reference | LocalImage:
    """Return the reference with the digest of its ``pin``, if any."""
    return reference.at(pin.digest) if pin and isinstance(reference, Reference) else reference
