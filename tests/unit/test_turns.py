"""One process makes a file, and the others wait, also on other nodes. A second file, the turn, names the maker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from enroot_py.base import linux, locks, turns
from enroot_py.base.turns import Turn
from tests.kernel.conftest import small_filesystem
from tests.waiting import until

ROOT = Path(__file__).parent.parent.parent
NODE = os.uname().nodename
MAKER = """
import sys, time
from enroot_py.base.turns import Turn
with Turn(sys.argv[1]) as turn:
    print("mine" if turn._fd is not None else "without", flush=True)
    time.sleep(float(sys.argv[2]))
"""


def maker(path: Path, seconds: float = 0) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", MAKER, str(path), str(seconds)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "x.sqsh"


@pytest.fixture
def first(target: Path) -> Iterator[subprocess.Popen[str]]:
    process = maker(target, 600)
    assert process.stdout is not None and process.stdout.readline() == "mine\n"
    yield process
    process.kill()
    process.communicate()


def test_maker_that_stops_later_is_not_waited_for(target: Path, first: subprocess.Popen[str]) -> None:
    """The second process sees the turn between open(2) and write(2) of the first process."""
    turn = target.parent / ".x.sqsh.turn"
    text = turn.read_text()
    turn.write_text("")
    second = maker(target)
    until(lambda: descriptor_of(second.pid, turn), "the second maker waits")
    time.sleep(0.3)
    turn.write_text(text)
    first.send_signal(signal.SIGSTOP)
    out, errors = second.communicate(timeout=60)
    assert out == "without\n" and f"process {first.pid} (" in errors and "not waiting for it" in errors


def descriptor_of(pid: int, path: Path) -> bool:
    try:
        return any(os.path.realpath(fd) == str(path) for fd in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False


def test_turn_of_a_successor_is_not_removed(target: Path) -> None:
    """Another node takes the turn between the check and the removal."""
    turn = target.parent / ".x.sqsh.turn"
    with Turn(str(target)) as old:
        assert old._fd is not None
        is_at = locks.is_at

        def late(fd: int, path: str) -> bool:
            was_there = is_at(fd, path)
            if path == str(turn):
                turn.unlink()
                turn.write_text("n2 boot 77\n")
            return was_there

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(locks, "is_at", late)
            turns._remove(old._fd, str(turn))
    assert turn.read_text() == "n2 boot 77\n" and os.listdir(target.parent) == [turn.name]


def test_turn_of_a_killed_maker_is_swept(target: Path, first: subprocess.Popen[str]) -> None:
    turns.sweep(str(target.parent))
    assert os.listdir(target.parent) == [".x.sqsh.turn"]
    first.kill()
    first.wait()
    turns.sweep(str(target.parent))
    assert os.listdir(target.parent) == []


def elsewhere(target: Path) -> Path:
    """Write the turn and the half-written file of a process on another node, whose lock this node does not see."""
    turn = target.parent / ".x.sqsh.turn"
    turn.write_text(f"n2 {linux.boot_id()} 77\n")
    (target.parent / ".x.sqsh.n2.77-0123abcd.making").write_text("half")
    return turn


@pytest.mark.parity("import -o FILE in several processes")
def test_maker_on_another_node_that_lives_is_waited_for(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turn = elsewhere(target)
    second = maker(target)
    assert second.stderr is not None
    assert f"waiting for process 77 on n2, which is making {target}" in second.stderr.readline()
    for _ in range(10):
        os.utime(turn)
        time.sleep(0.05)
    assert second.poll() is None
    turn.unlink()
    assert second.communicate(timeout=60)[0] == "mine\n"


def test_turn_of_a_silent_maker_on_another_node_ends(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next maker also removes the half-written file."""
    elsewhere(target)
    monkeypatch.setattr(turns, "_EXPIRED_AFTER_S", 1)
    with Turn(str(target)) as turn:
        assert turn._fd is not None
        assert os.listdir(target.parent) == [".x.sqsh.turn"]
    assert os.listdir(target.parent) == []


def test_maker_gives_signs_of_life(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "_HEARTBEAT_S", 0.05)
    with Turn(str(target)):
        turn = target.parent / ".x.sqsh.turn"
        os.utime(turn, (0, 0))
        until(lambda: turn.stat().st_mtime > 0, "the maker sets the time of its turn")
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


@pytest.mark.security("U11")
@pytest.mark.parametrize("kind", ["of another user", "link"])
def test_turn_of_another_user_is_not_waited_for(target: Path, kind: str) -> None:
    if kind == "link":
        (target.parent / ".x.sqsh.turn").symlink_to(target.parent / "victim")
    elif os.geteuid() == 0:
        os.chown(elsewhere(target), 4242, 4242)
    else:
        pytest.skip("only root can give a file away")
    with Turn(str(target)) as turn:
        assert turn._fd is None
    assert not (target.parent / "victim").exists()


def test_full_disk_leaves_no_turn(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small file system")
    with small_filesystem(tmp_path / "full", "size=4k") as directory:
        (directory / "fill").write_bytes(b"x" * 4096)
        with Turn(str(directory / "x.sqsh")) as turn:
            assert turn._fd is None
        assert os.listdir(directory) == ["fill"]


def test_turn_before_the_last_boot_is_dead(target: Path) -> None:
    (target.parent / ".x.sqsh.turn").write_text(f"{NODE} another-boot {os.getpid()}\n")
    with Turn(str(target)) as turn:
        assert turn._fd is not None
