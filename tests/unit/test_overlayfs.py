"""Find the visible files of a stack of layers without mounting it."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

from enroot_py.store import index, layertree
from enroot_py.store.overlayfs import look, real_path
from tests import images
from tests.images import directory, entry, hardlink, symlink


def stack(tmp_path: Path, *contents: list[tuple[tarfile.TarInfo, bytes]]) -> list[str]:
    """Create layers from bottom to top, and return them as lower directories from top to bottom."""
    lowerdirs = []
    for number, entries in enumerate(contents):
        layer_directory = tmp_path / f"stack{number}"
        layer_directory.mkdir()
        layertree.unpack(io.BytesIO(images.tar(entries)), str(layer_directory))
        lowerdirs.insert(0, str(layer_directory / "fs"))
    return lowerdirs


def test_look_sees_what_overlayfs_shows(tmp_path: Path) -> None:
    lowerdirs = stack(
        tmp_path,
        [*map(entry, ("a/x", "a/gone", "o/old", "f", "usr/lib/y")), symlink("lib", "usr/lib")],
        [*map(entry, ("a/x", "a/.wh.gone", "o/.wh..wh..opq", "o/new")), directory("f"), entry("f/z")],
    )
    file = look(lowerdirs, "/a/x")
    assert file is not None and file.layers[0][0] == 0
    merged = look(lowerdirs, "/a")
    assert merged is not None and [n for n, _ in merged.layers] == [0, 1]
    for missing in ("a/gone", "o/old", "nope", "a/x/y", "lib/y"):
        assert look(lowerdirs, missing) is None, missing
    assert look(lowerdirs, "f/z") is not None
    assert real_path(lowerdirs, "/lib/y") == "/usr/lib/y"
    assert real_path(lowerdirs, "/lib/../../new/./dir") == "/new/dir"


def test_special_modes_are_those_of_visible_files(tmp_path: Path) -> None:
    lowerdirs = stack(
        tmp_path,
        [
            *(entry(name, mode=0o4755) for name in ("su", "hidden", "gone")),
            *(hardlink("kept", "hidden"), directory("tmp", 0o1777)),
        ],
        [entry("hidden", mode=0o755), entry(".wh.gone"), entry("tmp/x", b"", mode=0o2755)],
    )
    # The upper layer has no entry for the directory tmp, so tmp gets the mode of a new directory.
    assert sorted(index.special_modes(lowerdirs)) == [("kept", 0o4755), ("su", 0o4755), ("tmp/x", 0o2755)]
