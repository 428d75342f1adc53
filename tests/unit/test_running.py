"""Steps find the running containers of other steps by the sockets of the helpers."""

from __future__ import annotations

import os
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from enroot_py.base import cgroups
from enroot_py.base.errors import PenrootError
from pyxis_py.node.running import BusyError, RunningContainers
from tests.waiting import until


@pytest.fixture
def running(tmp_path: Path) -> RunningContainers:
    (tmp_path / "1").mkdir()
    return RunningContainers(str(tmp_path), 1)


def test_steps_that_come_and_go_at_once(running: RunningContainers, tmp_path: Path) -> None:
    def come_and_go(number: int) -> None:
        for _ in range(500):
            running.listen("one", f"{number}.0").close()
            running.forget("one", f"{number}.0")

    with ThreadPoolExecutor(4) as steps:
        assert list(steps.map(come_and_go, range(4))) == [None] * 4
    assert not (tmp_path / "1" / "running").exists()


@pytest.mark.parametrize("name", ["one", "n" * 200], ids=["short", "longer than an address"])
def test_a_killed_helper_of_the_same_step_is_replaced(running: RunningContainers, tmp_path: Path, name: str) -> None:
    running.listen(name, "1.0").close()
    listener = running.listen(name, "1.0")
    assert running.others(name, "2.0") == ["1.0"]
    listener.close()
    assert running.others(name, "2.0") == []  # others() has also removed the dead helper's socket
    assert not (tmp_path / "1" / "running").exists()


def test_removed_runtime_path_is_reported(running: RunningContainers, tmp_path: Path) -> None:
    (tmp_path / "1").rmdir()
    with pytest.raises(PenrootError, match="the directory .* was removed"):
        running.listen("one", "1.0")
    with pytest.raises(PenrootError, match="the directory .* was removed"):
        running.lock("one")


def test_lock_of_a_stopped_process_is_not_waited_for(running: RunningContainers) -> None:
    reader, writer = os.pipe()
    holder = os.fork()
    if holder == 0:
        running.lock("one")
        os.write(writer, b"1")
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    try:
        assert os.read(reader, 1) == b"1"
        with pytest.raises(BusyError, match=f"process {holder} .* makes no progress making or removing"):
            running.lock("one")
        os.kill(holder, signal.SIGCONT)
        os.close(running.lock("one"))
    finally:
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)


def _unified() -> str:
    """Return the path of a writable mount of cgroup version 2, or ""."""
    with open("/proc/self/mountinfo") as mountinfo:
        mount_points = [line.split()[4] for line in mountinfo if " - cgroup2 " in line]
    return next((path for path in mount_points if os.access(path, os.W_OK)), "")


@pytest.mark.skipif(os.geteuid() != 0 or not _unified(), reason="needs root, and cgroup2 mounted")
def test_a_process_in_a_frozen_group_of_version_2() -> None:
    """pause_reason() tells that the job of the process is suspended."""
    group = f"{_unified()}/penroot-test-{os.getpid()}"
    os.mkdir(group)
    sleeper = subprocess.Popen(["sleep", "1234"])
    try:
        Path(group, "cgroup.procs").write_text(str(sleeper.pid))
        assert cgroups.pause_reason(sleeper.pid) == ""
        Path(group, "cgroup.freeze").write_text("1")
        until(lambda: cgroups.pause_reason(sleeper.pid) == "its job is suspended", "the group to be frozen")
    finally:
        sleeper.kill()
        sleeper.wait()
        os.rmdir(group)
