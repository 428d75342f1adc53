"""Nodes share blobs in a directory: one process fetches a blob, in whatever order processes need it."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from pathlib import Path

import pytest

from enroot_py.registry import shared
from enroot_py.registry.manifests import Descriptor

DATA = b"a blob"
BLOB = Descriptor("", "sha256:" + "a" * 64, len(DATA))


class Source:
    """The source of the blob. It appends a byte to ``log`` for each download."""

    def __init__(self, log: Path) -> None:
        self._log = log

    def blob(self, descriptor: Descriptor) -> Stream:
        with self._log.open("ab") as f:
            f.write(b".")
        return Stream()


class Stream:
    def __init__(self) -> None:
        self._data = DATA

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def read(self, size: int, /) -> bytes:
        data, self._data = self._data, b""
        return data


def read(path: Path, source: Source) -> bytes:
    return shared.SharedBlobs(str(path)).read(source, BLOB, lambda blob: b"".join(iter(lambda: blob.read(100), b"")))


def take(directory: Path, count: int, *, user: int = -1) -> None:
    """Let ``count`` processes request the blob at the same time, and check that all get it."""
    children = []
    for _ in range(count):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                if user >= 0:
                    os.setuid(user)
                status = read(directory / "shared", Source(directory / "log")) != DATA
            finally:
                os._exit(status)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * count


def test_one_of_many_fetches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, soak: bool) -> None:
    """A process may look for the blob just before another process publishes it, and lock the blob just after."""
    monkeypatch.setattr(shared, "_POLL_S", 0.0)
    for number in range(200 if soak else 15):
        directory = tmp_path / str(number)
        directory.mkdir()
        take(directory, 6)
        assert (directory / "log").read_bytes() == b"."
        assert os.listdir(directory / "shared/tmp") == []
        assert os.listdir(directory / "shared/sha256") == ["a" * 64]


def test_stopped_fetcher_is_not_waited_for(tmp_path: Path) -> None:
    """A stopped process, such as that of a suspended job, keeps its lock, which would count as alive for a minute."""
    (tmp_path / "log").touch()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        blobs = shared.SharedBlobs(str(tmp_path / "shared"))

        def stall(blob: object) -> bytes:
            os.write(writer, b"!")
            signal.pause()
            return b""

        blobs.read(Source(tmp_path / "log"), BLOB, stall)
        os._exit(1)
    assert os.read(reader, 1) == b"!"
    try:
        os.kill(child, signal.SIGSTOP)
        began = time.monotonic()
        assert read(tmp_path / "shared", Source(tmp_path / "log")) == DATA
        assert time.monotonic() - began < 30
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.clusters("Images that many jobs fetch, and a file system that all nodes see")
@pytest.mark.skipif(os.geteuid() != 0, reason="becomes other users")
@pytest.mark.parametrize("situation", ["blob", "damaged", "closed", "lock"])
def test_users_share_and_do_not_depend_on_each_other(situation: str) -> None:
    """If another user's blob is damaged or unreadable, or the lock is stale, each process fetches the blob itself."""
    directory = Path(tempfile.mkdtemp(prefix="penroot-blobs-", dir="/var/tmp"))
    try:
        for path, mode in ((directory, 0o777), (directory / "shared", 0o1777)):
            path.mkdir(exist_ok=True)
            path.chmod(mode)
        (directory / "log").touch()
        (directory / "log").chmod(0o666)
        take(directory, 1, user=27001)
        blob = directory / "shared/sha256" / ("a" * 64)
        assert blob.stat().st_uid == 27001
        if situation == "damaged":
            blob.write_bytes(b"short")
        elif situation == "closed":
            blob.chmod(0o600)
        elif situation == "lock":
            blob.unlink()
            lock = blob.with_suffix(".lock")
            lock.write_text("node boot 1\n")
            os.chown(lock, 27001, -1)
            os.utime(lock, (1, 1))
        take(directory, 2, user=27002)
        assert len((directory / "log").read_bytes()) == {"blob": 1, "damaged": 3, "closed": 3, "lock": 3}[situation]
    finally:
        shutil.rmtree(directory)


def test_directories_are_created_open_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o1777)
    monkeypatch.setattr(os, "chmod", lambda *_: None)  # a later chmod would be too late for another node
    umask = os.umask(0o077)
    try:
        read(tmp_path, Source(tmp_path / "log"))
    finally:
        os.umask(umask)
    assert {(tmp_path / name).stat().st_mode & 0o7777 for name in ("sha256", "tmp")} == {0o1777}


def test_leftovers_of_dead_processes_are_removed_by_age(tmp_path: Path) -> None:
    temporary = tmp_path / "shared/tmp"
    temporary.mkdir(parents=True)
    for name, age in (("old", 2 * 86400), ("new", 60)):
        (temporary / name).write_bytes(b"part")
        os.utime(temporary / name, (time.time() - age,) * 2)
    take(tmp_path, 1)
    assert os.listdir(temporary) == ["new"]
