"""What the store holds."""

from __future__ import annotations

import os
from dataclasses import dataclass

from enroot_py.store import index, layout
from enroot_py.store.store import Store


@dataclass(frozen=True, slots=True)
class Stored:
    """An image of the store. ``size`` is bytes: that of its layers' tars, or of its ``file``; ``used`` its last use."""

    path: str
    names: tuple[str, ...]
    layers: tuple[str, ...]  # directories
    size: int
    used: float
    file: int = 0

    @property
    def digest(self) -> str:
        return layout.digest_of(self.path)


def images(store: Store) -> list[Stored]:
    """All images of a store, the one that was used last first."""
    names: dict[str, set[str]] = {}
    for known in store.names():
        if known.text:
            names.setdefault(known.digest, set()).add(known.text.rpartition("+")[0])  # one of each architecture
    stored = []
    for path in layout.all_of(store.root, layout.IMAGES):
        layers = tuple(dict.fromkeys(layers_of(path)))
        file = _file_size(f"{path}/{layout.SQUASHFS}")
        try:
            used = os.stat(path).st_mtime
        except FileNotFoundError:
            continue
        its_names = tuple(sorted(names.get(layout.digest_of(path), ())))
        stored.append(Stored(path, its_names, layers, file + sum(map(index.size, layers)), used, file))
    return sorted(stored, key=lambda image: image.used, reverse=True)


def total(store: Store) -> tuple[int, int, int]:
    """How many images and layers a store holds, and how many bytes they are."""
    stored, layers = images(store), layout.all_of(store.root, layout.LAYERS)
    return len(stored), len(layers), sum(image.file for image in stored) + sum(map(index.size, layers))


def layers_of(image: str) -> list[str]:
    """The directories of an image's layers; none where it is not there any more."""
    try:
        return layout.layers_of(image)
    except FileNotFoundError:
        return []


def _file_size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0
