"""Check the paths and file names of the store."""

from __future__ import annotations

from pathlib import Path

import pytest

from enroot_py.base.errors import ImageError
from enroot_py.store import layout

A, B, C = (f"sha256:{letter * 64}" for letter in "abc")


@pytest.mark.parametrize("root", ["/s", "/home/images", "/images/images"])
def test_images_are_found_in_the_options_of_an_overlay(root: str) -> None:
    lowerdirs = [f"{layout.image(root, A)}/head/fs", f"{layout.layer(root, C)}/fs"]
    options = "rw,relatime," + ",".join(f"lowerdir+={path}" for path in lowerdirs) + ",userxattr"
    assert list(layout.images_in(options)) == [A]
    both = f"rw,lowerdir={lowerdirs[0]}:{layout.image(root, B)}/head/fs,userxattr"
    assert list(layout.images_in(both)) == [A, B]
    assert list(layout.images_in(f"lowerdir={root}/images/{'a' * 63}/head/fs,upperdir={root}")) == []


def test_image_is_found_by_the_path_of_its_squashfs_file() -> None:
    assert layout.image_in(f"{layout.image('/s', A)}/image.sqsh") == A
    for path in ("/s/x.sqsh", "image.sqsh", "/image.sqsh", f"{layout.image('/s', A)}/config", ""):
        assert layout.image_in(path) == ""


def test_a_stack_reads_back(tmp_path: Path) -> None:
    image = Path(layout.image(str(tmp_path), A))
    image.mkdir(parents=True)
    (image / "stack").write_bytes(layout.stack(A, [B, C]))
    lowerdirs = layout.lowerdirs(str(image))
    assert lowerdirs == (f"{image}/head/fs", f"{tmp_path}/layers/{'b' * 64}/fs", f"{tmp_path}/layers/{'c' * 64}/fs")
    assert layout.layers_of(str(image)) == [layout.layer(str(tmp_path), B), layout.layer(str(tmp_path), C)]
    assert layout.image_over(lowerdirs) == str(image)


@pytest.mark.parametrize(
    "line", ["", "/etc", f"layers/{'b' * 64}", f"layers/../{'b' * 64}/fs", f"images/{'b' * 64}/fs"]
)
def test_a_stack_with_any_other_line_is_damaged(tmp_path: Path, line: str) -> None:
    (tmp_path / "stack").write_bytes(layout.stack(A, [B]) + f"{line}\n".encode())
    assert layout.lowerdirs(str(tmp_path)) == ()


@pytest.mark.parametrize("digest", ["", "a" * 64, "sha256:", "sha256:" + "A" * 64, "sha256:" + "../" * 21 + "a"])
def test_invalid_digest_names_no_directory(digest: str) -> None:
    for path in (layout.layer, layout.image):
        with pytest.raises(ImageError):
            path("/s", digest)


def test_temporary_names_for_making_and_deleting_differ() -> None:
    directories = [layout.layer("/s", A), layout.image("/s", A)]
    paths = {path(directory) for directory in directories for path in (layout.making, layout.trash)}
    assert len(paths) == 4 and {path.rpartition("/")[0] for path in paths} == {"/s/tmp"}


def test_leases_are_those_of_images(tmp_path: Path) -> None:
    (tmp_path / "leases").mkdir()
    lease = Path(layout.lease(layout.image(str(tmp_path), A), "node.example"))
    others = (tmp_path / "leases/.nfs0001", tmp_path / "leases/x.y")
    for path in (lease, Path(layout.leases_since(str(tmp_path))), *others):
        path.touch()
    assert layout.leases(str(tmp_path)) == [(str(lease), A, "node.example")]
