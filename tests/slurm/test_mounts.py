"""--container-mounts with variables of the job that no shell has expanded, and with data in squashfs files."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.lab import Lab
from tests.slurm.steps import IMAGE, MINIMAL, ON_N1, end, next_line, refused, sbatch, sh, srun

SCRIPT = """\
#!/bin/sh
#SBATCH -o variables.out
#SBATCH --container-image='registry:5000#minimal:1'
#SBATCH --container-mounts=$HOME/in-$SLURM_JOB_NAME:/mnt/${SLURM_JOB_NAME}:ro
cat /mnt/*/file; pwd
"""


@pytest.mark.parity("--container-mounts: $VAR is replaced by the job's value")
def test_variables_in_sbatch_lines(lab: Lab) -> None:
    lab.run("mkdir -p ~/in-vars && echo here > ~/in-vars/file")
    try:
        sbatch(lab, "-J", "vars", input=SCRIPT)
        assert lab.run(["cat", "variables.out"]).stdout.endswith("here\n/srv/work\n")
    finally:
        lab.run("rm -rf ~/in-vars variables.out")


def test_a_variable_that_is_not_set_is_named(lab: Lab) -> None:
    stderr = refused(lab, IMAGE, "--container-mounts=$NO_SUCH/x:/x", "true")
    assert "$NO_SUCH is not set in the job's environment" in stderr


def test_a_quoted_variable_is_the_job_s(lab: Lab) -> None:
    show = sh("test -d /mnt && ls -d /mnt/tmp")
    assert srun(lab, IMAGE, "--container-mounts=$WHERE:/mnt/tmp", *show, env={"WHERE": "/tmp"}) == "/mnt/tmp\n"


@pytest.fixture(scope="module")
def data(lab: Lab) -> Iterator[str]:
    """Yield the name of a squashfs file in alice's home."""
    lab.run("mkdir data && echo of data > data/file && mksquashfs data data.sqsh -quiet -no-progress")
    yield "data.sqsh"
    lab.run("rm -rf data data.sqsh")


@pytest.mark.parity("srun --container-mounts=FILE:DIRECTORY:sqsh")
def test_data_in_a_squashfs_file(lab: Lab, data: str) -> None:
    """The data is mounted on each node, for all tasks."""
    mounts = f"--container-mounts={data}:/data:sqsh,$HOME/{data}:/again:sqsh+noexec"
    out = lab.run(["srun", "-N2", "-n4", IMAGE, mounts, *sh("cat /data/file /again/file")]).stdout
    assert out == "of data\n" * 8


@pytest.mark.parity("the examples of docs/howto/mount-data.md")
def test_the_example_of_the_documentation(lab: Lab, data: str) -> None:
    """Run the example with another image, and a command of that image."""
    text = (Path(__file__).parents[2] / "docs/howto/mount-data.md").read_text()
    (line,) = re.findall(r"^\$ (srun .*:sqsh) python train.py$", text, re.M)
    words = shlex.split(line.replace("pytorch.sqsh", MINIMAL).replace("imagenet.sqsh", data))
    assert lab.run([*words, "cat", "/data/file"]).stdout == "of data\n"


@pytest.mark.parity("a directory, a device")
def test_data_without_squashfs_is_refused_before_the_image(lab: Lab, data: str) -> None:
    """The error comes before a task runs, and at submit if srun can see the file."""
    missing = f"--container-image={MINIMAL}-not-there"
    stderr = refused(lab, missing, "--container-mounts=./data:/data:sqsh", "true")
    assert "--container-mounts: /home/alice/./data is a directory, not a squashfs file" in stderr
    assert "none.sqsh: No such file" in refused(lab, missing, "--container-mounts=none.sqsh:/data:sqsh", "true")
    stderr = refused(lab, IMAGE, f"--container-mounts={data}:/data:sqsh+rw", "true")
    assert "a squashfs file is mounted read-only" in stderr


def test_entering_a_container_names_the_server_of_its_data(lab: Lab, data: str) -> None:
    script = sh("echo $SLURM_JOB_ID.$SLURM_STEP_ID; read line; cat /data/file")
    first = lab.popen(["srun", *ON_N1, IMAGE, f"--container-mounts={data}:/data:sqsh", *script])
    name = next_line(first).strip()
    done = lab.run(["srun", *ON_N1, f"--container-name={name}", "cat", "/data/file"])
    assert done.stdout == "of data\n"
    assert f"come from a process of step {name} and disappear when that step ends" in done.stderr
    assert end(first)[0] == "of data\n"
