"""Open paths beneath a root while other processes rename files, and refuse FIFOs and large files."""

from __future__ import annotations

import multiprocessing
import os
import pathlib
from collections.abc import Iterator

import pytest

from enroot_py.base import paths


def rename_for_ever(directory: pathlib.Path) -> None:
    while True:
        os.rename(directory / "x", directory / "y")
        os.rename(directory / "y", directory / "x")


def test_links_with_dots_are_followed_while_others_rename(tmp_path: pathlib.Path) -> None:
    """openat2(2) fails with EAGAIN if a rename anywhere on the machine might have moved a ".." of the path."""
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/link").symlink_to("../a/../a/b")
    (tmp_path / "x").mkdir()
    other = multiprocessing.get_context("fork").Process(target=rename_for_ever, args=(tmp_path,), daemon=True)
    other.start()
    root = os.open(tmp_path, os.O_PATH)
    try:
        for _ in range(5000):
            os.close(paths.open_in(root, "a/link"))
    finally:
        os.close(root)
        other.kill()
        other.join()


@pytest.fixture
def root(tmp_path: pathlib.Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_PATH)
    yield fd
    os.close(fd)


def test_fifo_is_refused_at_once(tmp_path: pathlib.Path, root: int) -> None:
    os.mkfifo(tmp_path / "passwd")
    with pytest.raises(OSError, match="not a regular file"):
        paths.read(root, "passwd")


def test_a_large_file_is_not_read_into_memory(tmp_path: pathlib.Path, root: int) -> None:
    (tmp_path / "passwd").touch()
    os.truncate(tmp_path / "passwd", 5 << 30)
    with pytest.raises(OSError, match="larger than 16 MiB"):
        paths.read(root, "passwd")
