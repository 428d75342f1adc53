"""An image of a registry by way of a swarm: what the other nodes of the step have, or get, need not be asked for again.

As other sources (registry/sources.py): it has the manifest and the config of the tracker, and the blobs of the peer.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from enroot_py.base import digests, log
from enroot_py.features.swarm.blob_cache import BlobCache
from enroot_py.features.swarm.client import SwarmClient
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

_CHUNK = 1 << 20


class SwarmSource(SwarmClient):
    """The image ``digest`` that ``inner`` has, for a node that is invited; ``blob_cache`` has room for blobs on their way."""

    def __init__(self, invitation: Invitation, digest: str, inner: Repository | Mirrored, blob_cache: BlobCache) -> None:
        super().__init__(invitation)
        self._digest = digest
        self._inner = inner
        self._blob_cache = blob_cache
        self._manifest: Manifest | None = None
        self._config = b""
        self.evidence = b""  # by which to verify the image
        self._lacks: dict[str, int] = {}  # by digest

    @property
    def base(self) -> str:
        return self._inner.base

    def digest(self) -> str:
        return self._inner.digest()

    def manifest(self, arch: str | None = None) -> Manifest:
        """The manifest that the tracker has; else that of the registry, and there is no swarm."""
        if arch is None:
            self.meet()
        if self._manifest is None:
            self._manifest = self._inner.manifest(arch)
        return self._manifest

    def config(self, manifest: Manifest) -> bytes:
        if self._config and digests.of(self._config) == manifest.config.digest:
            return self._config
        return self._inner.config(manifest)

    def begin(self, blobs: Sequence[Descriptor]) -> None:
        """Say which blobs are lacking: they begin to come."""
        if self._tracker is None or self._manifest is None:
            return
        layers = [layer.digest for layer in self._manifest.layers]
        self._lacks = {blob.digest: layers.index(blob.digest) for blob in blobs}
        try:
            self.start(list(self._lacks.values()))
        except OSError as e:
            log.debug(f"swarm: {self._blob_cache.directory}: {e.strerror}: the registry alone")

    def new_spool(self, lacking: Sequence[int]) -> Spool:
        """Raises OSError."""
        assert self._manifest
        layers = self._manifest.layers
        complete = {blob: fd for blob, each in enumerate(layers) if (fd := self._blob_cache.open(each.digest, each.size))}
        os.makedirs(self._blob_cache.directory, 0o700, exist_ok=True)
        return Spool([layer.size for layer in layers], lacking, self._blob_cache.directory, complete)

    def blob(self, descriptor: Descriptor) -> Blob:
        position = self._lacks.get(descriptor.digest)
        if self._spool is None or position is None:
            return self._inner.blob(descriptor)
        blob_cache, inner = self._blob_cache, self._inner
        return Reader(
            self._spool,
            position,
            instead=lambda at: inner.blob(descriptor, at),
            keep=lambda fd: blob_cache.add(descriptor.digest, fd),
        )

    def instead(self, descriptor: Descriptor) -> Blob | None:
        """The blob from the registry, if what came from other nodes is not what its digest says."""
        if self._spool is None or descriptor.digest not in self._lacks:
            return None
        stream, digest = self.blob(descriptor), hashlib.sha256()
        while data := stream.read(_CHUNK):
            digest.update(data)
        came = digests.of_encoded(digest.hexdigest())
        return None if came == descriptor.digest else self._inner.blob(descriptor)

    def seed(self, rate: float) -> None:
        """Fetch what the tracker says, and give it to others, until that ends. Raises PenrootError, OSError."""
        self.meet()
        if self._tracker is not None and self._manifest is not None:
            self._spool = self.new_spool(())
            self.peer_process(rate).run()

    def know(self, said: Answer) -> None:
        """The manifest and the config."""
        if not isinstance(said, Documents) or said.architecture != architecture(None):
            raise ValueError("no image for this node")
        if said.named != self._digest:
            raise ValueError(f"the tracker has {said.named}, not {self._digest}")
        self._config, self.evidence, data = said.config, said.evidence, said.manifest
        self._manifest = manifests.manifest(data, manifests.parse(data, "the tracker"), said.named, "the tracker")

    def fetch(self, blob: int, start: int) -> Iterator[bytes]:
        """What comes of a blob from the registry, from a byte on."""
        assert self._manifest
        with self._inner.blob(self._manifest.layers[blob], start) as stream:
            while data := stream.read(_CHUNK):
                yield data
