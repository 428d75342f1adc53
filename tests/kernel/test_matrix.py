"""Run scripts in the root directory of a distribution release, as tests/matrix does."""

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
    """After the script, no mount or process remains. The next script finds the files of this one."""
    [pid_namespace] = entered(release, "touch /opt/kept; sleep 54322 >/dev/null 2>&1 & readlink /proc/self/ns/pid")
    assert mounts_under(release) == []
    until(lambda: pid_namespace not in namespaces(), "the end of the background process")
    assert "kept" in entered(release, "ls /opt")


def namespaces() -> set[str]:
    """Return the PID namespaces of all processes."""
    links = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            links.add(os.readlink(process / "ns/pid"))
        except OSError:
            continue
    return links
