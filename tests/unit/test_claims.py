"""Races for the claim of a container, the file that names the node whose steps may change the container."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from enroot_py.store import claims
from enroot_py.store.claims import Claim

NODE = os.uname().nodename


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    path.mkdir(0o700)
    return path


def claimed(data: Path, node: str) -> int:
    """Write ``node`` into the claim of ``box``, and return a descriptor that holds an exclusive lock on it."""
    (data / ".box.node").write_text(node)
    fd = os.open(data / ".box.node", os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    return fd


@pytest.mark.parametrize("node", ["", "elsewhere", NODE])
def test_reading_a_claim_does_not_block_others(data: Path, monkeypatch: pytest.MonkeyPatch, node: str) -> None:
    """Another process locks the claim for a moment. Claim() waits, and tries again."""
    reader = claimed(data, node)
    monkeypatch.setattr(claims.time, "sleep", lambda seconds: os.close(reader))
    assert Claim("box", str(data), kept=True).name == "box"
    assert claims.holder("box", str(data)) == NODE


@pytest.mark.parametrize("node", ["elsewhere", NODE])
def test_the_steps_of_one_node_share_a_claim(data: Path, node: str) -> None:
    fd = claimed(data, node)
    fcntl.flock(fd, fcntl.LOCK_SH)
    name = Claim("box", str(data), kept=True).name
    os.close(fd)
    assert name == ("box" if node == NODE else f"box@{NODE}")


def test_faster_node_gets_the_claim(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """flock(2) releases the exclusive lock before it gets the shared lock. In between, another node takes the claim."""
    lock = claims.flock

    def late(fd: int, *, shared: bool = False) -> bool:
        if shared:
            os.pwrite(fd, b"elsewhere", 0)
        return lock(fd, shared=shared)

    monkeypatch.setattr(claims, "flock", late)
    claim = claims.Claim.__new__(Claim)
    assert not claim._hold("box", NODE, str(data), kept=True)


def test_just_removed_claim_is_created_again(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process unlinks the claim just before the lock. A lock on an unlinked file excludes nobody."""
    lock, removed = claims.flock, []

    def late(fd: int, *, shared: bool = False) -> bool:
        if not removed:
            removed.append(os.unlink(data / ".box.node"))
        return lock(fd, shared=shared)

    monkeypatch.setattr(claims, "flock", late)
    claim = Claim("box", str(data), kept=True)
    assert claim.name == "box"
    assert claims.holder("box", str(data)) == NODE
