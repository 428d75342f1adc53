"""List the images of a store, and compute the store's size."""

from __future__ import annotations

import os
from dataclasses import dataclass

from enroot_py.store import index, layout
from enroot_py.store.store import Store


@dataclass(frozen=True, slots=True)
class Stored:
    """A stored image. Sizes are in bytes."""

    path: str
    names: tuple[str, ...]
    layers: tuple[str, ...]  # directories
    size: int  # sum of its layers' tars, or size of its squashfs file
    used: float  # time of the last use
    file: int = 0  # size of its squashfs file, if any

    @property
    def digest(self) -> str:
        return layout.digest_of(self.path)


def images(store: Store) -> list[Stored]:
    """Return all images of a store, the most recently used first."""
    names: dict[str, set[str]] = {}
    for known in store.names():
        if known.text:
            names.setdefault(known.digest, set()).add(known.text.rpartition("+")[0])  # without the architecture
    stored = []
    for path in layout.all_of(store.root, layout.IMAGES):
        layers = tuple(dict.fromkeys(layers_of(path)))
        file = _file_size(f"{path}/{layout.SQUASHFS}")
        try:
            used = os.stat(path).st_mtime
        except FileNotFoundError:
            continue
        image_names = tuple(sorted(names.get(layout.digest_of(path), ())))
        stored.append(Stored(path, image_names, layers, file + sum(map(index.size, layers)), used, file))
    return sorted(stored, key=lambda image: image.used, reverse=True)


def total(store: Store) -> tuple[int, int, int]:
    """Return the number of images, the number of layers, and the size of a store in bytes."""
    stored, layers = images(store), layout.all_of(store.root, layout.LAYERS)
    return len(stored), len(layers), sum(image.file for image in stored) + sum(map(index.size, layers))


def layers_of(image: str) -> list[str]:
    """Return the directories of an image's layers, or [] if the image is gone."""
    try:
        return layout.layers_of(image)
    except FileNotFoundError:
        return []


def _file_size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0
