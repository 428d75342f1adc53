"""The directory of a release, entered as tests/matrix does."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.kernel.conftest import busybox_rootfs, mounts_under, require
from tests.matrix.roots import ENTER
from tests.waiting import until


@pytest.fixture
def release(tmp_path: Path) -> Path:
    require(os.geteuid() == 0, "only root mounts for all users")
    busybox_rootfs(tmp_path)
    (tmp_path / "run").mkdir()
    return tmp_path


def entered(release: Path, script: str) -> list[str]:
    done = subprocess.run([ENTER, release, "sh", "-ec", script], capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.splitlines()


def test_processes_see_only_the_release(release: Path) -> None:
    show = "echo $$; readlink /proc/1/exe; ls /opt; grep -c ' / / ' /proc/self/mountinfo || true"
    assert entered(release, show) == ["1", "/bin/busybox", "work", "0"]


def test_no_mount_or_process_stays(release: Path) -> None:
    """No mount or process stays; files are kept for the next time."""
    [left] = entered(release, "touch /opt/kept; sleep 54322 >/dev/null 2>&1 & readlink /proc/self/ns/pid")
    assert mounts_under(release) == []
    until(lambda: left not in namespaces(), "the end of what was left in it")
    assert "kept" in entered(release, "ls /opt")


def namespaces() -> set[str]:
    """Return the PID namespaces of all processes."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            found.add(os.readlink(process / "ns/pid"))
        except OSError:
            continue
    return found
