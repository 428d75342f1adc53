from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from enroot_py.base import making


def left_by_a_killed_process(place: Path, *, kind: str = making.MAKING, directory: bool = True) -> Path:
    """What a process of this node has left that is gone; its lock is gone with it."""
    path = Path(making.hidden(str(place / "x"), kind))
    if directory:
        (path / "deep").mkdir(parents=True)
        (path / "deep/file").write_text("")
        path.chmod(0)
    else:
        path.write_text("half")
    return path


def test_a_file_that_does_not_get_its_name_is_not_left_under_another(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="too long"), making.File(str(tmp_path / (256 * "x"))) as file:
        file.publish(replace=True)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("replace", [False, True])
def test_a_file_has_its_name_when_it_is_whole_and_replaces_only_when_asked(tmp_path: Path, replace: bool) -> None:
    path = tmp_path / "made"
    with making.File(str(path)) as file:
        os.write(file.fd, b"one")
        assert os.listdir(tmp_path) == []
        file.publish(replace=replace)
    with making.File(str(path)) as file:
        os.write(file.fd, b"two")
        if replace:
            file.publish(replace=True)
        else:
            with pytest.raises(FileExistsError):
                file.publish(replace=False)
    assert path.read_text() == ("two" if replace else "one")
    assert os.listdir(tmp_path) == ["made"]


@pytest.mark.parametrize("name", ["x", 255 * "x", 85 * "\u4e2d"])
def test_hidden_names_fit_whatever_the_name(tmp_path: Path, name: str) -> None:
    with making.Directory(str(tmp_path / name), 0o755) as directory:
        assert os.path.basename(directory.path).startswith("." + name[:20])
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("kind", [making.MAKING, making.TRASH])
@pytest.mark.parametrize("directory", [False, True])
def test_what_nobody_holds_is_swept(tmp_path: Path, kind: str, directory: bool) -> None:
    left_by_a_killed_process(tmp_path, kind=kind, directory=directory)
    making.sweep(str(tmp_path))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("directory", [False, True])
def test_what_somebody_holds_is_not(tmp_path: Path, directory: bool) -> None:
    path = left_by_a_killed_process(tmp_path, directory=directory)
    path.chmod(0o700)
    words = ["flock", str(path), sys.executable, "-c", "print(flush=True); input()"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        making.sweep(str(tmp_path))
        assert path.exists()
        other.communicate(b"\n")
    making.sweep(str(tmp_path))
    assert not path.exists()


def test_a_users_own_names_are_left_alone(tmp_path: Path) -> None:
    mine = [".making", ".trash", ".x.making", ".a.b.c.trash", "x.node.1-2.making", ".fifo.node.1-2.making"]
    for name in mine[:-1]:
        (tmp_path / name).write_text("")
    os.mkfifo(tmp_path / mine[-1])
    making.sweep(str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == sorted(mine)


def test_what_a_maker_on_another_node_left_is_swept_where_locks_hold_for_all(tmp_path: Path) -> None:
    """On one machine's own file system the lock tells, whatever the name of the node was."""
    (tmp_path / ".x.elsewhere.1-abcd.making").mkdir()
    making.sweep(str(tmp_path))
    assert os.listdir(tmp_path) == []
