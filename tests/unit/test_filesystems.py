"""Detect file systems, choose the form of images on them, and explain failed writes."""

from __future__ import annotations

import errno
import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from enroot_py.base import filesystems
from enroot_py.base.digests import is_digest
from enroot_py.config import settings
from enroot_py.store import filecopy, onefile

# Name of a file system in stat(1) -> its name in the kernel. stat(1) knows only the magic number of statfs(2).
SAME = {"overlayfs": "overlay", "ext2/ext3": "ext4", "btrfs": "btrfs", "xfs": "xfs", "tmpfs": "tmpfs", "proc": "proc"}


@pytest.mark.parametrize("path", ["/", "/dev/shm", "/proc", "/tmp", "/var/tmp", os.getcwd()])
def test_kind_is_what_statfs_says(path: str) -> None:
    stdout = subprocess.run(["stat", "-f", "-c", "%T", path], capture_output=True, text=True, check=True).stdout.strip()
    if stdout not in SAME:
        pytest.skip(f"{path} is on {stdout}")
    kind = filesystems.kind(path)
    assert kind == SAME[stdout] or (stdout, kind[:3]) == ("ext2/ext3", "ext")


def test_kind_of_a_missing_path_is_that_of_its_parent() -> None:
    assert filesystems.kind("/dev/shm/no/such/place") == filesystems.kind("/dev/shm")


@pytest.mark.clusters("NFS or Lustre, and no local disk")
@pytest.mark.parametrize("name", ["nfs", "nfs4", "lustre", "gpfs", "beegfs", "fuse.sshfs", "ceph", "wekafs"])
def test_network_file_systems_are_known(name: str) -> None:
    assert name in filesystems.NETWORK


def test_local_file_systems_hold_trees() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        values = {"HOME": directory, "ENROOT_CACHE_PATH": directory}
        assert onefile.image_form(settings.load(values)) == "tree"
        assert onefile.image_form(settings.load({**values, "ENROOT_STORE_FORM": "squashfs"})) == "squashfs"


def test_file_that_changes_is_another(tmp_path: Path) -> None:
    file = tmp_path / "x"
    file.write_bytes(b"hsqs" + bytes(200))
    os.utime(file, ns=(10, 10))
    first = filecopy.identity(str(file))
    assert is_digest(first)
    assert filecopy.identity(str(file)) == first
    file.write_bytes(b"hsqs" + b"\1" + bytes(199))  # same size and time, but another superblock
    os.utime(file, ns=(10, 10))
    second = filecopy.identity(str(file))
    os.utime(file, ns=(10, 11))
    assert len({first, second, filecopy.identity(str(file))}) == 3


@pytest.mark.parametrize(
    ("number", "words"),
    [(errno.ENOSPC, "is full"), (errno.EDQUOT, "your quota"), (errno.EROFS, "is read-only"), (errno.EACCES, "mode")],
)
def test_each_failure_to_write_has_a_hint(tmp_path: Path, number: int, words: str) -> None:
    path = f"{tmp_path}/not/there"
    hint = filesystems.hint_for(OSError(number, os.strerror(number)), path, "ENROOT_DATA_PATH")
    assert words in hint
    assert path in hint
    assert "set ENROOT_DATA_PATH to another place" in hint
