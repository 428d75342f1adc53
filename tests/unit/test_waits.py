"""Wait for a lock of another process: a message names the holder. If the holder makes no progress, the wait ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from enroot_py.base import locks, waits, workers
from enroot_py.base.errors import ContainerError, ImageError, PenrootError
from enroot_py.runtime.rootfs import Source
from enroot_py.store import claims
from enroot_py.store.store import Store

HOLDER = """
import fcntl, os, sys
fd = os.open(sys.argv[1], os.O_RDONLY)
fcntl.flock(fd, fcntl.LOCK_EX if sys.argv[2] == "exclusive" else fcntl.LOCK_SH)
print("locked", flush=True)
sys.stdin.read()
"""


class Holder:
    """A process that has locked a file or directory."""

    def __init__(self, path: Path, kind: str = "exclusive") -> None:
        command = [sys.executable, "-c", HOLDER, str(path), kind]
        environ = {**os.environ, "SLURM_JOB_ID": "4711"}
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ)
        assert self.process.stdout is not None and self.process.stdout.readline() == "locked\n"
        self.pid = self.process.pid

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.touch()
    return path


@pytest.fixture
def holder(file: Path) -> Iterator[Holder]:
    process = Holder(file)
    yield process
    process.end()


@pytest.fixture
def fd(file: Path) -> Iterator[int]:
    opened = os.open(file, os.O_RDONLY)
    yield opened
    os.close(opened)


@pytest.mark.security("L6")
def test_stopped_holder_is_named_with_its_job_and_ends_the_wait(
    holder: Holder, fd: int, capfd: pytest.CaptureFixture[str]
) -> None:
    assert waits.Watch(fd, "doing something").look() == ""
    stderr = capfd.readouterr().err
    assert f"waiting for process {holder.pid} (python" in stderr
    assert " of job 4711, which is doing something\n" in stderr
    holder.stop()
    why = waits.lock(fd, "doing something")
    assert why.startswith(f"process {holder.pid} (") and "stopped) of job 4711 makes no progress" in why
    holder.end()
    assert waits.lock(fd, "doing something") == ""  # the end of the holder has released the lock


@pytest.mark.security("L6")
def test_holder_without_progress_ends_the_wait(holder: Holder, fd: int) -> None:
    assert "made no progress doing something for 1 s" in waits.lock(fd, "doing something", stalled_after=1)


def test_time_without_progress_counts_between_rare_looks(holder: Holder, fd: int) -> None:
    watch = waits.Watch(fd, "doing something", 2)
    whys = []
    for _ in range(3):
        whys.append(watch.look())
        time.sleep(1.05)
    assert whys[:2] == ["", ""] and "made no progress doing something for 2 s" in whys[2]


def test_stop_of_the_waiting_process_does_not_count(holder: Holder, fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a job is resumed, a waiting process may run before the holder."""
    watch = waits.Watch(fd, "doing something", 10)
    assert watch.look() == ""
    later = time.monotonic() + 3600
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert watch.look() == ""


def test_holder_that_touches_its_file_is_waited_for(holder: Holder, file: Path, fd: int) -> None:
    watch = waits.Watch(fd, "doing something", 1)
    for _ in range(5):
        os.utime(file)
        assert watch.look() == ""
        time.sleep(0.55)


def test_alarm_of_the_caller_survives_a_wait(holder: Holder, fd: int) -> None:
    received: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: received.append(number))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        assert not locks.flock_within(fd, 0.5)
        deadline = time.monotonic() + 60
        while not received and time.monotonic() < deadline:
            time.sleep(0.01)
        assert received == [signal.SIGALRM]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# -- callers that wait for locks


@pytest.mark.parametrize("kind", ["exclusive", "shared"])
def test_store_lock_of_a_stopped_process_is_an_error(tmp_path: Path, kind: str) -> None:
    """A pruner locks the store exclusively. Importers share the lock."""
    store = Store(str(tmp_path / "store"), create=True)
    other = Holder(Path(store.root), kind)
    other.stop()
    try:
        with pytest.raises(ImageError, match=f"process {other.pid} .* the store ") as caught:
            store.lock(exclusive=kind == "shared")
        assert "kill -CONT" in caught.value.hint
    finally:
        other.end()


def test_image_lock_of_a_stopped_pruner_is_an_error(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store"), create=True)
    digest = "sha256:" + "a" * 64
    with store.build("images", digest) as build:
        Path(build.path, "image.sqsh").touch()
        build.publish()
    image = store.image(digest)
    assert image is not None
    pruner = Holder(Path(image.path))
    pruner.stop()
    try:
        with pytest.raises(ImageError, match=f"process {pruner.pid} .*images/aaaa"):
            image.hold()
    finally:
        pruner.end()


def test_stopped_start_of_a_container_is_an_error(tmp_path: Path) -> None:
    data = tmp_path / "data"
    (data / "box").mkdir(parents=True)
    claim = data / ".box.node"
    claim.write_text(os.uname().nodename)
    other = Holder(claim)
    other.stop()
    try:
        with pytest.raises(ContainerError, match=f"process {other.pid} .* makes no progress starting the container"):
            claims.change_alone(Source("box", image="x", changes=str(data / "box")))
    finally:
        other.end()


def test_queue_behind_a_stopped_process_is_an_error(holder: Holder, file: Path, fd: int) -> None:
    holder.stop()
    with pytest.raises(PenrootError, match=f"process {holder.pid} .* makes no progress changing {file}"):
        waits.queue(fd, str(file))


def test_stopped_worker_is_reported_and_given_up(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(workers, "_STOPPED_AFTER_S", 4)
    with pytest.raises(PenrootError, match=r"the worker process \d+ was stopped for 4 s"):
        workers.run([lambda: os.kill(os.getpid(), signal.SIGSTOP)], 1)
    assert "kill -CONT" in capfd.readouterr().err


SCOPE = "0::/system.slice/slurmstepd.scope"


@pytest.mark.clusters("Control groups, version 1 and 2")
@pytest.mark.parametrize(
    ("groups", "environ", "job"),
    [
        (f"{SCOPE}/job_31/step_0/user/task_0\n", b"", "31"),
        ("4:freezer:/slurm/uid_1000/job_31/step_0\n", b"", "31"),
        # documented in cgroups.html of Slurm 26.05
        (f"{SCOPE}/s5K1KKYAYG5D00/step_0/user/task_0\n", b"", "s5K1KKYAYG5D00"),
        (f"{SCOPE}/s5K1KKYAYG5D00/step_batch/user\n", b"A=b\0SLURM_JOB_ID=31\0", "31"),
        ("0::/system.slice/sshd.service\n", b"", ""),
        ("0::/s5K1KKYAYG5D00U/step_0\n", b"", ""),  # too long for a SLUID, and U is not a digit of SLUIDs
    ],
)
def test_job_is_read_from_cgroups_of_every_slurm(groups: str, environ: bytes, job: str) -> None:
    assert waits.job_of(groups, environ) == job
