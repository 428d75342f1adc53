"""Refuse paths that other users could have made."""

from __future__ import annotations

import os
import pathlib

import pytest

from enroot_py.base import trusted

OTHER = 27002  # a uid without an account


def as_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o757])
def test_directory_that_others_can_write_is_not_trusted(tmp_path: pathlib.Path, mode: int) -> None:
    tmp_path.chmod(0o755)
    assert trusted.place(str(tmp_path)).st_ino == tmp_path.stat().st_ino
    tmp_path.chmod(mode)
    with pytest.raises(PermissionError, match="can be written by others"):
        trusted.place(str(tmp_path))


def test_directory_of_another_user_is_not_trusted(tmp_path: pathlib.Path) -> None:
    as_root()
    os.chown(tmp_path, OTHER, OTHER)
    with pytest.raises(PermissionError, match=f"belongs to uid {OTHER}"):
        trusted.place(str(tmp_path))


def test_only_links_of_the_user_are_followed(tmp_path: pathlib.Path) -> None:
    as_root()
    (tmp_path / "place").mkdir(0o700)
    link = tmp_path / "link"
    link.symlink_to("place")
    tmp_path.chmod(0o1777)
    assert trusted.place(str(link)).st_ino == (tmp_path / "place").stat().st_ino
    os.chown(link, OTHER, OTHER, follow_symlinks=False)
    with pytest.raises(PermissionError, match=f"belongs to uid {OTHER}"):
        trusted.place(str(link))


def test_place_must_be_a_directory(tmp_path: pathlib.Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(NotADirectoryError):
        trusted.place(str(tmp_path / "fifo"))


def test_a_file_is_opened_without_waiting_or_following(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("text")
    (tmp_path / "file").chmod(0o644)
    with open(trusted.file(f"{tmp_path}/file")) as f:
        assert f.read() == "text"
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OSError, match="not a regular file"):
        trusted.file(f"{tmp_path}/fifo")
    (tmp_path / "link").symlink_to("file")
    with pytest.raises(OSError, match="symbolic links"):
        trusted.file(f"{tmp_path}/link")
    (tmp_path / "file").chmod(0o666)
    with pytest.raises(PermissionError, match="can be written by others"):
        trusted.file(f"{tmp_path}/file")


def test_installed_files_are_opened_without_links_or_waiting(tmp_path: pathlib.Path) -> None:
    """The owner of the tree takes the part of root. Each directory on the path is checked."""
    directory = tmp_path / "usr/lib"
    directory.mkdir(parents=True)
    (directory / "file").write_text("here")
    with open(trusted.installed(f"{directory}/file", str(tmp_path))) as file:
        assert file.read() == "here"
    (tmp_path / "link").symlink_to("usr")
    os.mkfifo(directory / "fifo")
    for path in ("link/lib/file", "usr/lib/fifo", "usr/lib", "usr/lib/none"):
        with pytest.raises(OSError):
            trusted.installed(f"{tmp_path}/{path}", str(tmp_path))
    (tmp_path / "usr").chmod(0o757)
    with pytest.raises(PermissionError, match=r"usr can be written by others \(mode 757\)"):
        trusted.installed(f"{directory}/file", str(tmp_path))
