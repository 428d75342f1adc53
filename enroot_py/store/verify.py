"""Compare all stored files with their checksums, and remove damaged images and layers."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator

from enroot_py.base import digests
from enroot_py.base.errors import PenrootError
from enroot_py.registry.reference import is_uri
from enroot_py.store import crash, index, inventory, layout, usage
from enroot_py.store.prune import Alone
from enroot_py.store.store import Store


def damage(store: Store) -> Iterator[tuple[str, str]]:
    """Yield (directory, fault) for each damaged layer or image, while a lock prevents pruning. Raises OSError."""
    if not os.path.isdir(store.root):
        return
    with store.lock():
        for image in layout.all_of(store.root, layout.IMAGES):
            for fault in _of_image(image):
                yield image, fault
        for layer in layout.all_of(store.root, layout.LAYERS):
            for fault in _of_layer(layer):
                yield layer, fault


def _of_image(path: str) -> Iterator[str]:
    for file in crash.changed_files(path):
        if file not in (layout.MANIFEST, layout.CONFIG):  # their digests are checked below
            yield f"its {file} was changed"
    is_file = os.path.exists(f"{path}/{layout.SQUASHFS}")
    if is_file and not crash.is_unchanged(path):
        yield f"its {layout.SQUASHFS} was changed"
    if _is_of_file(path):  # it has no manifest and config
        yield from () if is_file else index.differences(f"{path}/{layout.HEAD}")
        return
    try:
        with open(f"{path}/{layout.MANIFEST}", "rb") as f:
            manifest = f.read()
        with open(f"{path}/{layout.CONFIG}", "rb") as f:
            config = f.read()
    except FileNotFoundError as e:
        yield f"{e.filename} is missing"
        return
    if digests.of(manifest) != layout.digest_of(path):
        yield "its manifest was changed"
        return
    if json.loads(manifest)["config"]["digest"] != digests.of(config):
        yield "its config was changed"
    if is_file:
        return
    for layer in inventory.layers_of(path):
        if not os.path.isdir(layer):
            yield f"its layer {os.path.basename(layer)} is missing"
    yield from index.differences(f"{path}/{layout.HEAD}")


def _is_of_file(image: str) -> bool:
    """Return whether an image is a copy of a squashfs file."""
    return os.path.exists(f"{image}/{layout.FILE}")


def _of_layer(path: str) -> Iterator[str]:
    for name in (layout.TREE, layout.INDEX):
        if not os.path.exists(f"{path}/{name}"):
            yield f"its {name} is missing"
            return
    for file in crash.changed_files(path):
        yield f"its {file} was changed"
    yield from index.differences(path)


def repair(store: Store, damaged: Collection[str]) -> list[str]:
    """Remove damaged layers and images, and images over damaged layers. Return the references to pull again.

    Raises PenrootError if one of the images is in use.
    """
    with Alone(store) as alone:
        images = inventory.images(store)
        broken = [image for image in images if not set(damaged).isdisjoint((image.path, *image.layers))]
        starting = {image.digest: "a start" for image in broken if not alone.take(image.path)}
        users = usage.of_mounts(store) | starting  # found after locking, as in prune.py
        for image in broken:
            if user := users.get(image.digest):
                message = f"the image {image.digest} is damaged, but {user} uses it"
                raise PenrootError(message, hint="stop its containers first")
        to_pull = [image for image in broken if not _is_of_file(image.path)]
        for image in broken:
            alone.discard(image.path)
        for layer in set(damaged) & set(layout.all_of(store.root, layout.LAYERS)):
            alone.take(layer)  # prevent sweeps by other processes
            alone.discard(layer)
    # Name each image by its digest, because its tag may have moved, and its containers need this image.
    return [
        name if is_uri(name) else f"docker://{_repository(name)}@{image.digest}"
        for image in to_pull
        for name in image.names[:1]
    ]


def _repository(name: str) -> str:
    """Return REGISTRY/REPOSITORY of a canonical reference."""
    before, at, _ = name.partition("@")
    return before if at else name.rpartition(":")[0]
