"""Each store has a mark of its format. A store with an unknown format is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from enroot_py.base.errors import ImageError
from enroot_py.store import format
from enroot_py.store.store import Store


@pytest.mark.parity("a store has a mark of its format")
def test_new_and_old_stores_are_marked(tmp_path: Path) -> None:
    root = str(tmp_path / "store")
    Store(root, create=True)
    assert os.readlink(f"{root}/format") == str(format.FORMAT)
    os.unlink(f"{root}/format")
    format.check(root, mark=False)  # stores before 1.0 have no format mark
    assert not os.path.lexists(f"{root}/format")
    Store(root, create=True)
    assert os.readlink(f"{root}/format") == str(format.FORMAT)


@pytest.mark.parity("a store has a mark of its format")
@pytest.mark.parametrize(
    ("number", "age"), [("99", "a later penroot made"), ("0", "an earlier penroot made"), ("x", "is unknown")]
)
def test_a_store_of_another_format_is_refused_and_left_alone(tmp_path: Path, number: str, age: str) -> None:
    root = str(tmp_path / "store")
    os.makedirs(root, 0o700)
    os.symlink(number, f"{root}/format")
    with pytest.raises(
        ImageError, match=f"store {root} has format {number}, which {age}: penroot .* reads 1"
    ) as caught:
        Store(root, create=True)
    assert "ENROOT_CACHE_PATH" in caught.value.hint
    assert os.listdir(root) == ["format"]


def test_failure_to_write_the_mark_is_ignored(tmp_path: Path) -> None:
    format.check(str(tmp_path / "none"), mark=True)


def test_mark_must_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "format").write_text("1")
    with pytest.raises(ImageError, match="is unknown"):
        format.check(str(tmp_path), mark=False)
