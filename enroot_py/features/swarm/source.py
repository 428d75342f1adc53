"""A source of a registry image (registry/sources.py) that uses a swarm.

The manifest and the config come from the tracker. The blobs come through the peer of this node.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from enroot_py.base import digests, log
from enroot_py.features.swarm.blob_cache import BlobCache
from enroot_py.features.swarm.client import SwarmClient, TrackerClient
from enroot_py.features.swarm.invitation import Invitation
from enroot_py.features.swarm.messages import Answer, Documents
from enroot_py.features.swarm.reader import Reader
from enroot_py.features.swarm.spool import Spool
from enroot_py.registry import manifests
from enroot_py.registry.manifests import Descriptor, Manifest
from enroot_py.registry.platforms import architecture

if TYPE_CHECKING:
    from enroot_py.registry.repository import Repository
    from enroot_py.registry.sources import Blob, Mirrored

_CHUNK_BYTES = 1 << 20


class DigestClient(TrackerClient):
    """A node that asks the tracker which digest the step's tag has."""

    _digest = ""

    def digest(self) -> str:
        """Return the digest, or "" if the tracker cannot be reached. Raises RegistryError."""
        self.join()
        self.leave()
        return self._digest

    def accept_answer(self, answer: Answer) -> None:
        if not isinstance(answer, Documents):
            raise ValueError("no image for this node")
        digests.encoded(answer.named)
        self._digest = answer.named


class SwarmSource(SwarmClient):
    """A source of the image ``digest``. Without a tracker, the image comes from ``inner``."""

    def __init__(self, invitation: Invitation, digest: str, inner: Repository | Mirrored, cache: BlobCache) -> None:
        super().__init__(invitation)
        self._digest = digest
        self._inner = inner
        self._cache = cache
        self._manifest: Manifest | None = None
        self._config = b""
        self.evidence = b""  # signatures by which to verify the image
        self._lacks: dict[str, int] = {}  # by digest: the position of each blob that this node lacks

    @property
    def base(self) -> str:
        return self._inner.base

    def digest(self) -> str:
        return self._inner.digest()

    def manifest(self, arch: str | None = None) -> Manifest:
        """Return the tracker's manifest, or the registry's manifest if there is no tracker."""
        if arch is None:
            self.join()
        if self._manifest is None:
            self._manifest = self._inner.manifest(arch)
        return self._manifest

    def config(self, manifest: Manifest) -> bytes:
        if self._config and digests.of(self._config) == manifest.config.digest:
            return self._config
        return self._inner.config(manifest)

    def begin(self, blobs: Sequence[Descriptor]) -> None:
        """Start to download the blobs that this node lacks."""
        if self._tracker is None or self._manifest is None:
            return
        layers = [layer.digest for layer in self._manifest.layers]
        self._lacks = {blob.digest: layers.index(blob.digest) for blob in blobs}
        try:
            self.start_peer(list(self._lacks.values()))
        except OSError as e:
            log.debug(f"swarm: {self._cache.directory}: {e.strerror}: this node uses only the registry")

    def new_spool(self, lacking: Sequence[int]) -> Spool:
        """Raises OSError."""
        assert self._manifest
        layers, cache = self._manifest.layers, self._cache
        complete = {blob: file for blob, layer in enumerate(layers) if (file := cache.open(layer.digest, layer.size))}
        os.makedirs(cache.directory, 0o700, exist_ok=True)
        return Spool([layer.size for layer in layers], lacking, cache.directory, complete)

    def blob(self, descriptor: Descriptor) -> Blob:
        position = self._lacks.get(descriptor.digest)
        if self._spool is None or position is None:
            return self._inner.blob(descriptor)
        return Reader(
            self._spool,
            position,
            instead=lambda offset: self._inner.blob(descriptor, offset),
            keep=lambda file: self._cache.add(descriptor.digest, file),
        )

    def instead(self, descriptor: Descriptor) -> Blob | None:
        """Return the blob from the registry if the bytes from other nodes do not match its digest, otherwise None."""
        if self._spool is None or descriptor.digest not in self._lacks:
            return None
        stream, digest = self.blob(descriptor), hashlib.sha256()
        while data := stream.read(_CHUNK_BYTES):
            digest.update(data)
        actual_digest = digests.of_encoded(digest.hexdigest())
        return None if actual_digest == descriptor.digest else self._inner.blob(descriptor)

    def seed(self, rate: float) -> None:
        """Fetch the blobs that the tracker asks for and upload them, until the tracker ends.

        Raises PenrootError, OSError.
        """
        self.join()
        if self._tracker is not None and self._manifest is not None:
            self.peer(rate).run()

    def accept_answer(self, answer: Answer) -> None:
        if not isinstance(answer, Documents) or answer.architecture != architecture(None):
            raise ValueError("no image for this node")
        if answer.named != self._digest:
            raise ValueError(f"the tracker has {answer.named}, not {self._digest}")
        self._config, self.evidence, data = answer.config, answer.evidence, answer.manifest
        self._manifest = manifests.manifest(data, manifests.parse(data, "the tracker"), answer.named, "the tracker")

    def fetch(self, blob: int, start: int) -> Iterator[bytes]:
        assert self._manifest
        with self._inner.blob(self._manifest.layers[blob], start) as stream:
            while data := stream.read(_CHUNK_BYTES):
                yield data
