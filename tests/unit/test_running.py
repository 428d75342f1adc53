"""How steps find the containers of each other."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from enroot_py.base.errors import PenrootError
from pyxis_py.running import RunningContainers


def test_steps_that_come_and_go_at_once(tmp_path: Path) -> None:
    running = RunningContainers(str(tmp_path), 1)
    (tmp_path / "1").mkdir()

    def come_and_go(number: int) -> None:
        for _ in range(500):
            running.listen("one", f"{number}.0").close()
            running.forget("one", f"{number}.0")

    with ThreadPoolExecutor(4) as steps:
        assert list(steps.map(come_and_go, range(4))) == [None] * 4
    assert not (tmp_path / "1" / "running").exists()


def test_a_killed_helper_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    running = RunningContainers(str(tmp_path), 1)
    (tmp_path / "1").mkdir()
    running.listen("one", "1.0").close()
    listener = running.listen("one", "1.0")
    assert running.others("one", "2.0") == ["1.0"]
    listener.close()
    assert running.others("one", "2.0") == []  # and that has forgotten it
    assert not (tmp_path / "1" / "running").exists()


def test_a_name_longer_than_an_address_may_be(tmp_path: Path) -> None:
    running = RunningContainers(str(tmp_path), 1)
    (tmp_path / "1").mkdir()
    listener = running.listen("n" * 200, "1.0")
    assert running.others("n" * 200, "2.0") == ["1.0"]
    listener.close()


def test_a_runtime_path_that_is_gone_is_said(tmp_path: Path) -> None:
    running = RunningContainers(str(tmp_path), 1)
    with pytest.raises(PenrootError, match="somebody has removed"):
        running.listen("one", "1.0")
    with pytest.raises(PenrootError, match="somebody has removed"):
        running.lock("one")
