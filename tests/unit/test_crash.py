"""After a crash of the node, the store does not use files that did not reach the disk."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from enroot_py.store import layertree
from enroot_py.store.store import Store
from tests import images
from tests.unit.test_store import A, B, store, temporary

__all__ = ["store"]  # a fixture


def mark_as_of_another_boot(path: Path) -> None:
    """Change the boot ID of a layer or image, as if the node had rebooted since."""
    _, *rest = (path / "boot").read_text().splitlines(keepends=True)
    (path / "boot").write_text("".join(["another boot\n", *rest]))


def unpacked(store: Store) -> Path:
    """Make a layer of the previous boot, whose files may not have reached the disk. Return its path."""
    with store.build("layers", A) as build:
        layertree.unpack(io.BytesIO(images.tar([images.entry("a", b"1"), images.entry("b", b"2")])), build.path)
        build.publish()
    path = Path(store.layer_path(A) or "")
    mark_as_of_another_boot(path)
    assert store.layer_path(A) is None
    return path


def test_layer_that_survived_a_crash_is_kept(store: Store) -> None:
    path = unpacked(store)
    before = (path / "fs/a").stat().st_ino
    with store.build("layers", A) as build:
        assert build.done
    assert (path / "fs/a").stat().st_ino == before and store.layer_path(A) == str(path)
    assert temporary(store) == []


def test_layer_that_a_crash_damaged_is_made_again(store: Store) -> None:
    path = unpacked(store)
    (path / "fs/a").write_bytes(b"")  # a file with delayed allocation can be empty after a crash
    with store.build("layers", A) as build:
        assert not build.done and os.listdir(build.path) == []
        os.mkdir(build.path + "/fs")
        build.publish()
    assert os.listdir(path / "fs") == [] and temporary(store) == []


@pytest.mark.parametrize("name", ["index", "sums"])
def test_files_beside_the_tree_are_checked_too(store: Store, name: str) -> None:
    path = unpacked(store)
    (path / name).write_bytes(b"")
    with store.build("layers", A) as build:
        assert not build.done


def imaged(store: Store) -> Path:
    """Make an image and its layer, both of the previous boot. Return the image's path."""
    layer = unpacked(store)
    with store.build("images", B) as build:
        layertree.unpack(io.BytesIO(images.tar([images.entry("c", b"3")])), _directory(build.path + "/head"))
        hexes = (A.partition(":")[2], B.partition(":")[2])
        Path(build.path, "stack").write_text(f"images/{hexes[1]}/head/fs\nlayers/{hexes[0]}/fs\n")
        build.publish()
    path = Path(store.root) / "images" / B.partition(":")[2]
    mark_as_of_another_boot(path)
    assert (layer / "boot").exists() and (path / "boot").exists()
    return path


def _directory(path: str) -> str:
    os.mkdir(path)
    return path


def test_image_that_survived_a_crash_is_used_and_needs_no_mark(store: Store) -> None:
    """The mark is the file boot. It is renamed after all files of the image have been checked."""
    path = imaged(store)
    image = store.image(B)
    assert image is not None and len(image.lowerdirs) == 2
    assert not (path / "boot").exists() and store.layer_path(A) is not None


@pytest.mark.parametrize("file", ["stack", "head/fs/c", "head/sums", "../../layers/{}/fs/b", "../../layers/{}/sums"])
def test_image_that_a_crash_damaged_is_not_used(store: Store, file: str) -> None:
    path = imaged(store)
    (path / file.format(A.partition(":")[2])).write_bytes(b"")
    assert store.image(B) is None
    with store.build("images", B) as build:
        assert build.done == ("layers" in file)  # if only a layer is damaged, the image is kept


def test_settled_image_needs_no_mark(store: Store) -> None:
    """settle() writes the store to the disk, so a later crash cannot damage the image."""
    path = imaged(store)
    store.settle(B)
    assert not (path / "boot").exists() and not Path(f"{store.layer_path(A)}/boot").exists()
