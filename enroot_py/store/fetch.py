"""Fetch an image into the store: unpack each missing layer while it downloads, then compose the image."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from enroot_py.base import digests, log, operations, workers
from enroot_py.base.errors import ImageError
from enroot_py.base.progress import Progress
from enroot_py.config.settings import Settings
from enroot_py.registry.manifests import MAX_CONFIG_BYTES, Descriptor, Manifest
from enroot_py.registry.reference import LocalImage, Reference
from enroot_py.registry.sources import Blob, Expecting, ImageSource
from enroot_py.store import compose, layertree, layout, onefile, prune
from enroot_py.store.imageconfig import ImageConfig
from enroot_py.store.store import Build, Image, Store, cannot_write

_T = TypeVar("_T")


class Fetch:
    """Fetch the image of a manifest from its source into a store."""

    def __init__(
        self,
        store: Store,
        reference: Reference | LocalImage,
        source: ImageSource,
        manifest: Manifest,
        settings: Settings,
    ) -> None:
        self._store = store
        self._reference = reference
        self._source = source
        self._manifest = manifest
        self._settings = settings

    def image(self) -> Image:
        """Fetch the image, and return it protected by hold(). Raises ImageError, RegistryError."""
        gc.enable()  # a start disables garbage collection
        store = self._store
        store.sweep()
        with store.lock():  # keep new layers from being pruned before their image exists
            with store.build(layout.IMAGES, self._manifest.digest) as build:
                image = store.image(self._manifest.digest)
                if image is not None and image.hold():  # another import made the image meanwhile
                    return image
                as_file = onefile.image_form(self._settings) == "squashfs" and not build.done
                if as_file:
                    self._write_file(build)
                else:
                    self._assemble(build)
            if as_file or os.geteuid() == 0:  # other users of the store cannot mark the image as checked: crash.py
                store.settle(self._manifest.digest)
            image = store.image(self._manifest.digest)
            if image is None or not image.hold():
                raise ImageError(
                    f"{self._reference}: a layer vanished from the store {store.root}, or the image is damaged there",
                    hint="try again, or check the store: penroot cache verify --repair",
                )
        prune.shrink(store, self._settings)
        return image

    def _write_file(self, build: Build) -> None:
        """Write the image as one squashfs file, from trees in a temporary store on this node."""

        def fetch_trees(settings: Settings) -> Image:
            store = Store(settings.cache_path, create=True)
            return Fetch(store, self._reference, self._source, self._manifest, settings).image()

        onefile.squash(build.path, str(self._reference), fetch_trees, self._settings)
        build.publish()

    def _assemble(self, build: Build) -> None:
        """Fetch the missing layers, and compose the image."""
        began = time.monotonic()
        config = ImageConfig(self._config(), self._reference)
        diff_ids = config.diff_ids(self._manifest)
        fetched = self._fetch_layers(diff_ids, build)
        operations.phase("fetch")
        stack = compose.stack(self._store, diff_ids, self._reference)
        if not build.done:  # if done, only a layer was missing
            try:
                compose.compose(build.path, self._manifest, config, stack, self._reference.uri())
            except OSError as e:
                raise cannot_write(f"write the image {self._reference} to the store", self._store.root, e) from e
            build.publish()
        operations.phase("compose")
        layers, seconds = log.many(len(diff_ids), "layer"), time.monotonic() - began
        log.info(f"{self._reference}: {layers}, {log.size(fetched)} fetched, in {seconds:.1f} s")

    # -- layers

    def _fetch_layers(self, diff_ids: Sequence[str], build: Build) -> int:
        """Fetch and unpack the missing layers, one process each, the largest first. Return the bytes fetched."""
        pairs = dict(zip(diff_ids, self._manifest.layers, strict=True))
        missing = [(diff_id, blob) for diff_id, blob in pairs.items() if self._store.layer_path(diff_id) is None]
        if not missing:
            return 0
        missing.sort(key=lambda pair: pair[1].size, reverse=True)
        total = sum(blob.size for _, blob in missing)
        layers = f"{len(missing)} of {log.many(len(diff_ids), 'layer')}"
        log.info(f"{self._reference}: fetching {layers}, {log.size(total)}")
        operations.fact(cache="miss" if len(missing) == len(pairs) else "part", layers=len(missing), bytes=total)
        if isinstance(self._source, Expecting):
            self._source.begin([blob for _, blob in missing])
        progress = Progress(str(self._reference), len(missing), total, build.go_on)
        tasks = [partial(self._fetch_layer, *pair, progress.part(number)) for number, pair in enumerate(missing)]
        parallel = min(workers.processors(self._settings.max_processors), self._settings.max_connections or len(tasks))
        try:
            workers.run(tasks, parallel, progress.tick)
        except BaseException:
            self._store.sweep()  # remove the temporary directories of killed workers
            raise
        finally:
            progress.end()
        return total

    def _fetch_layer(self, diff_id: str, blob: Descriptor, count: Callable[[int], None]) -> None:
        """Fetch one layer into the store, in a worker process. ``count`` gets the number of bytes read so far."""
        with self._store.build(layout.LAYERS, diff_id) as build:
            if build.done:  # another import has just made it
                return

            def read(size: int) -> None:
                count(size)
                build.go_on()

            def use(stream: Blob) -> None:
                build.clear()  # remove the files of a damaged blob
                self._unpack(stream, build.path, diff_id, blob, read)

            self._read(blob, use)
            build.publish()

    def _unpack(
        self, stream: Blob, directory: str, diff_id: str, blob: Descriptor, count: Callable[[int], None]
    ) -> None:
        try:
            layer = layertree.unpack(stream, directory, progress=count)
        except ImageError as e:
            raise ImageError(f"{self._reference}: layer {blob.digest}: {e}", hint=e.hint) from e
        # Check both digests. Without the second check, one image could store a wrong layer under the diff-id of another
        # image's layer. In a docker archive, the digest of a layer is its diff-id, even if the layer is compressed.
        if blob.digest not in (layer.blob_digest, diff_id):
            raise ImageError(
                f"{self._reference}: the layer {blob.digest} came with the digest {layer.blob_digest}",
                hint="damaged in transit or in the registry: nothing was kept, try again",
            )
        if layer.diff_id != diff_id:
            raise ImageError(
                f"{self._reference}: the layer {blob.digest} unpacks to {layer.diff_id}, "
                f"the image config says {diff_id}",
                hint="the image is wrong or hostile: nothing was kept",
            )

    # -- blobs

    def _read(self, blob: Descriptor, use: Callable[[Blob], _T]) -> _T:
        """Return the result of ``use`` on a blob from its source or the shared blobs: see SharedBlobs.read."""
        if not self._shares_blobs:
            try:
                with self._source.blob(blob) as stream:
                    return use(stream)
            except ImageError as e:
                replacement = self._source.instead(blob) if isinstance(self._source, Expecting) else None
                if replacement is None:
                    raise
                log.warn(f"{e}; asking the registry")
            with replacement as stream:
                return use(stream)
        from enroot_py.registry.shared import SharedBlobs

        return SharedBlobs(self._settings.shared_blobs, self._settings.shared_blobs_for).read(self._source, blob, use)

    @property
    def _shares_blobs(self) -> bool:
        return bool(self._settings.shared_blobs) and not isinstance(self._reference, LocalImage)

    def _config(self) -> bytes:
        """Return the image config from its source or from the shared blobs."""
        config = self._manifest.config
        if not self._shares_blobs:
            return self._source.config(self._manifest)
        if config.size > MAX_CONFIG_BYTES:
            raise ImageError(f"{self._reference}: the config is too large: {config.size} bytes")

        def read(stream: Blob) -> bytes:
            data = b"".join(iter(lambda: stream.read(MAX_CONFIG_BYTES), b""))
            if digests.of(data) != config.digest:
                raise ImageError(f"{self._reference}: the config {config.digest} has the digest {digests.of(data)}")
            return data

        return self._read(config, read)
