"""Remove deep and unreadable trees."""

from __future__ import annotations

import os
from pathlib import Path

from enroot_py.base import trees


def test_deep_and_unreadable_tree_is_removed_alone(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/file").write_text("1")
    top = tmp_path / "tree"
    top.mkdir()
    fd = os.open(top, os.O_RDONLY)
    for _ in range(3000):  # deeper than the limits of descriptors, stack frames and PATH_MAX
        os.mkdir("d", dir_fd=fd)
        os.symlink(tmp_path / "outside", "link", dir_fd=fd)
        below = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)
    (top / "closed/d").mkdir(parents=True)
    (top / "closed").chmod(0)
    top.chmod(0)
    trees.remove(str(top))
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "outside"]
