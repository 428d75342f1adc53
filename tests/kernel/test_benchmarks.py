"""The benchmarks run without an error. `make bench` checks their results."""

from __future__ import annotations

import os
import re
import shutil

import pytest

from benchmarks.images import bench_images
from benchmarks.step import calls_of_plugin
from benchmarks.swarm.tracker import measure_tracker
from tests.kernel.conftest import User, require


def test_the_table_of_a_small_image(user: User, capsys: pytest.CaptureFixture[str]) -> None:
    require(shutil.which("docker-registry"), "docker-registry is not installed")
    assert bench_images(1, ("small",))
    out = capsys.readouterr().out
    for row in ("penroot start REF, cold", "penroot import -o, cold", "then mksquashfs"):
        assert row in out


def test_plugin_does_little_without_a_container() -> None:
    headers = (f"{include}/slurm/spank.h" for include in ("/usr/include", "/usr/local/include"))
    require(any(map(os.path.exists, headers)), "slurm/spank.h is not installed (libslurm-dev)")
    assert len(calls_of_plugin(3)) == 3


def test_tracker_serves_a_hundred_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    measure_tracker(100)
    assert re.search(r"\s100( +[\d.]+){3} +[1-9]", capsys.readouterr().out)
