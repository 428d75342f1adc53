"""Invalid values of start --memory, --cpus and --pids are refused. tests/systemd/test_limits.py tests the effects."""

from __future__ import annotations

import pathlib

import pytest

from tests.kernel.conftest import User


@pytest.mark.parametrize(
    "option",
    ["--memory=", "--memory=much", "--memory=0", "--cpus=0", "--cpus=-1", "--cpus=1.2.3", "--pids=0", "--pids=x"],
)
def test_unusable_limit_is_refused(user: User, rootfs: pathlib.Path, option: str) -> None:
    done = user.penroot("start", option, "box", "true", status=1)
    assert len([line for line in done.stderr.splitlines() if line.startswith("[ERROR]")]) == 1
    assert "Traceback" not in done.stderr


def test_limit_in_a_job_names_the_options_of_srun(user: User, rootfs: pathlib.Path) -> None:
    done = user.penroot("start", "--memory=1G", "box", "true", env={"SLURM_JOB_ID": "1"}, status=1)
    assert "srun --mem" in done.stderr
