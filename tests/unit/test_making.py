from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from enroot_py.base import locks, making
from enroot_py.base.fds import Fd


def left_by_a_killed_process(parent: Path, *, kind: str = making.MAKING, directory: bool = True) -> Path:
    """Create a hidden entry as a killed process of this node leaves it, without a lock. Return its path."""
    path = Path(making.hidden(str(parent / "x"), kind))
    if directory:
        (path / "deep").mkdir(parents=True)
        (path / "deep/file").write_text("")
        path.chmod(0)
    else:
        path.write_text("half")
    return path


@pytest.mark.parametrize("name", ["x", 255 * "x", 85 * "\u4e2d"])
def test_hidden_names_fit_whatever_the_name(tmp_path: Path, name: str) -> None:
    with making.Directory(str(tmp_path / name), 0o755) as directory:
        assert os.path.basename(directory.path).startswith("." + name[:20])
    with pytest.raises(OSError, match="too long"), making.File(str(tmp_path / (256 * "x"))) as file:
        file.publish(replace=True)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("replace", [False, True])
def test_file_gets_its_name_when_it_is_whole(tmp_path: Path, replace: bool) -> None:
    """With ``replace``, the file replaces an existing file."""
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


@pytest.mark.parametrize("kind", [making.MAKING, making.TRASH])
@pytest.mark.parametrize("directory", [False, True])
def test_unlocked_entries_are_removed(tmp_path: Path, kind: str, directory: bool) -> None:
    left_by_a_killed_process(tmp_path, kind=kind, directory=directory)
    making.sweep(str(tmp_path))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("directory", [False, True])
def test_locked_entries_are_kept(tmp_path: Path, directory: bool) -> None:
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


def test_similar_names_of_the_user_are_kept(tmp_path: Path) -> None:
    mine = [".making", ".trash", ".x.making", ".a.b.c.trash", "x.node.1-2.making", ".fifo.node.1-2.making"]
    for name in mine[:-1]:
        (tmp_path / name).write_text("")
    os.mkfifo(tmp_path / mine[-1])
    making.sweep(str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == sorted(mine)


def test_leftovers_of_another_node_are_swept(tmp_path: Path) -> None:
    """On a local file system, only the lock counts. The node may have had another name."""
    (tmp_path / ".x.elsewhere.1-abcd.making").mkdir()
    making.sweep(str(tmp_path))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("directory", [False, True])
def test_entry_removed_before_its_lock_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, directory: bool
) -> None:
    """Before flock(2), a new entry looks like the entry of a killed process, so another process may remove it."""
    swept: list[Fd] = []
    lock = locks.attempt

    def late(fd: int) -> bool | None:
        if not swept:  # another process locks the entry first, and removes it when this process continues
            path = os.readlink(f"/proc/self/fd/{fd}")
            swept.append(Fd(os.open(path, os.O_RDONLY)))
            assert lock(swept[0])
        return lock(fd)

    monkeypatch.setattr(locks, "attempt", late)
    target = str(tmp_path / "made")
    if directory:
        with making.Directory(target, 0o755) as new:
            os.rmdir(os.readlink(f"/proc/self/fd/{swept[0]}"))
            new.publish()
    else:
        monkeypatch.setattr(
            os, "O_TMPFILE", os.O_DIRECTORY | os.O_CREAT
        )  # these flags fail with EINVAL, like O_TMPFILE on a file system that does not support it
        with making.File(target) as file:
            os.unlink(os.readlink(f"/proc/self/fd/{swept[0]}"))
            file.publish(replace=True)
    os.close(swept[0])
    assert os.listdir(tmp_path) == ["made"]


def test_written_file_is_whole_and_has_its_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file replaces an existing file, except with replace=False."""
    monkeypatch.chdir(tmp_path)
    for text in ("old", "new"):
        making.write("made", text.encode(), 0o640)
        assert os.listdir() == ["made"] and Path("made").read_text() == text
        assert Path("made").stat().st_mode & 0o7777 == 0o640
    with pytest.raises(FileExistsError):
        making.write("made", b"two", replace=False)
    assert os.listdir() == ["made"] and Path("made").read_text() == "new"


def test_symbolic_link_replaces_what_is_there(tmp_path: Path) -> None:
    making.symlink("a", str(tmp_path / "link"))
    making.symlink("b", str(tmp_path / "link"))
    assert os.listdir(tmp_path) == ["link"] and os.readlink(tmp_path / "link") == "b"
    (tmp_path / "directory").mkdir()
    with pytest.raises(IsADirectoryError):
        making.symlink("c", str(tmp_path / "directory"))
    assert sorted(os.listdir(tmp_path)) == ["directory", "link"]
