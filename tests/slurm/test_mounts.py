"""--container-mounts where no shell has seen it: variables of the job."""

from __future__ import annotations

from tests.slurm.lab import Lab
from tests.slurm.steps import IMAGE, refused, sbatch, sh, srun

SCRIPT = """\
#!/bin/sh
#SBATCH -o variables.out
#SBATCH --container-image='registry:5000#minimal:1'
#SBATCH --container-mounts=$HOME/in-$SLURM_JOB_NAME:/mnt/${SLURM_JOB_NAME}:ro
cat /mnt/*/file; pwd
"""


def test_variables_in_sbatch_lines(lab: Lab) -> None:
    lab.run("mkdir -p ~/in-vars && echo here > ~/in-vars/file")
    try:
        sbatch(lab, "-J", "vars", input=SCRIPT)
        assert lab.run(["cat", "variables.out"]).stdout.endswith("here\n/srv/work\n")
    finally:
        lab.run("rm -rf ~/in-vars variables.out")


def test_a_variable_that_is_not_set_is_named(lab: Lab) -> None:
    said = refused(lab, IMAGE, "--container-mounts=$NO_SUCH/x:/x", "true")
    assert "$NO_SUCH is not set in the job's environment" in said


def test_a_quoted_variable_is_the_job_s(lab: Lab) -> None:
    show = sh("test -d /mnt && ls -d /mnt/tmp")
    assert srun(lab, IMAGE, "--container-mounts=$WHERE:/mnt/tmp", *show, env={"WHERE": "/tmp"}) == "/mnt/tmp\n"
