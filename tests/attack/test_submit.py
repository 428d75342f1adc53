"""Hostile values at submit, and their effect on the nodes."""

from __future__ import annotations

import pathlib

import pytest

from tests.slurm.lab import Lab
from tests.slurm.steps import MINIMAL, ON_N1, assert_nothing_left, sbatch, srun
from tests.waiting import until

VARIABLE = {"PYXIS_CONTAINER_IMAGE": MINIMAL}
INSIDE = "test -e /etc/lab-release && echo container || echo host"
EXPORTS = ("--export=NONE", "--export=FOO=1", "--export=NIL", "--export=ALL")


@pytest.mark.parity("srun, sbatch, salloc: PYXIS_CONTAINER_*")
@pytest.mark.security("H4")
@pytest.mark.parametrize("export", EXPORTS)
def test_srun_forwards_the_variables_whatever_is_exported(lab: Lab, export: str) -> None:
    """Regression: ``PYXIS_CONTAINER_IMAGE=... srun --export=NONE`` ran on the host, with status 0."""
    assert srun(lab, export, "/bin/sh", "-c", INSIDE, env=VARIABLE) == "container\n"


@pytest.mark.security("H4")
def test_all_variables_are_forwarded_and_an_option_still_wins(lab: Lab) -> None:
    variables = {**VARIABLE, "PYXIS_CONTAINER_WORKDIR": "/usr/bin", "PYXIS_CONTAINER_MOUNTS": "/usr:/mnt/of it"}
    show = ("/bin/sh", "-c", "pwd; test -d '/mnt/of it/bin' && echo mounted; env | grep ^SLURM_PYXIS")
    inside = lab.run(["srun", *ON_N1, "--export=NONE", *show], env=variables, check=False).stdout
    assert inside == "/usr/bin\nmounted\n"  # no SLURM_PYXIS variable is left that an inner step would take for its own
    assert srun(lab, "--export=NONE", "--container-workdir=/usr", "/bin/sh", "-c", "pwd", env=variables) == "/usr\n"


@pytest.mark.security("H4")
def test_export_takes_precedence_in_the_step(lab: Lab) -> None:
    """--export still takes precedence over the submitter's environment."""
    export = "--export=PYXIS_CONTAINER_WORKDIR=/usr"
    variables = {**VARIABLE, "PYXIS_CONTAINER_WORKDIR": "/usr/bin"}
    assert srun(lab, export, "/bin/sh", "-c", "pwd", env=variables) == "/usr\n"


@pytest.mark.security("H4")
def test_a_variable_that_is_gone_is_not_forwarded(lab: Lab) -> None:
    """A step without options must not inherit the options of the surrounding job."""
    script = f"unset PYXIS_CONTAINER_IMAGE; srun --export=NONE /bin/sh -c '{INSIDE}'"
    command = ["salloc", "--quiet", "-w", "n1", "sh", "-c", script]
    kept = {"SLURM_PYXIS_CONTAINER_IMAGE": MINIMAL}  # a leftover of another step
    assert lab.run(command, env={**VARIABLE, **kept}).stdout == "host\n"


@pytest.mark.parity("srun, sbatch, salloc: PYXIS_CONTAINER_*")
@pytest.mark.security("H4")
@pytest.mark.parametrize("export", EXPORTS[:2])
def test_sbatch_forwards_the_variables(lab: Lab, export: str) -> None:
    """The script and each srun in it use the variables."""
    script = f"#!/bin/sh\n{INSIDE}\n"
    lab.run(f"cat > forwarded.sh <<'END'\n{script}END")
    sbatch(lab, "-w", "n1", export, "-o", "forwarded.out", "forwarded.sh", env=VARIABLE)
    assert lab.run("cat forwarded.out; rm forwarded.*").stdout.endswith("container\n")


@pytest.mark.security("H4")
def test_salloc_forwards_the_variables(lab: Lab) -> None:
    """srun within an allocation uses the variables of salloc."""
    command = ["salloc", "--quiet", "-w", "n1", "srun", "--export=NONE", "/bin/sh", "-c", INSIDE]
    assert lab.run(command, env=VARIABLE).stdout == "container\n"


LONG = ",".join(f"/srv:/mnt/{number:07}" for number in range(7300))  # 131,399 bytes: MAX_ARG_STRLEN is 131,072


@pytest.mark.parity("options that do not fit")
@pytest.mark.security("R7")
@pytest.mark.parametrize("command", ["srun", "sbatch", "salloc"])
def test_options_too_long_for_an_environment_are_refused(lab: Lab, command: str) -> None:
    """Regression: a step with a long option ran, but then Slurm could not execute spank/epilog and drained the node."""
    # This value is too long for an argument of a command, but a script's line can have it.
    script = f"#!/bin/sh\n#SBATCH --container-image=registry:5000/minimal:1\n#SBATCH --container-mounts={LONG}\ntrue\n"
    pathlib.Path(lab.root, "home/alice/long.sh").write_text(script)
    if command == "sbatch":
        done = lab.run(["sbatch", "-w", "n1", "long.sh"], check=False)
    else:
        # This value fits into one argument of a command, but not into Slurm's variable, whose name is longer.
        almost = LONG[:131_030]
        mounts = f"--container-mounts={almost.rpartition(',')[0]}"
        where = ["-w", "n1", f"--container-image={MINIMAL}", mounts, "true"]
        done = lab.run([command, *where], check=False)
    pathlib.Path(lab.root, "home/alice/long.sh").unlink()
    assert done.returncode != 0
    assert "--container-mounts has 13" in done.stderr and "at most 130816 fit" in done.stderr, done.stderr[:2000]
    until(lambda: not lab.run(["squeue", "-h"]).stdout, "no job is left")
    assert_nothing_left(lab)


@pytest.mark.security("R7")
def test_a_variable_that_does_not_fit_is_refused(lab: Lab) -> None:
    """The variable fits on the submit host, but not on the nodes, where the variable has a longer name."""
    value = LONG[:131_030].rpartition(",")[0]
    done = lab.run(["srun", *ON_N1, "true"], env={**VARIABLE, "PYXIS_CONTAINER_MOUNTS": value}, check=False)
    assert done.returncode != 0
    assert f"PYXIS_CONTAINER_MOUNTS has {len(value)} bytes" in done.stderr, done.stderr[:2000]


@pytest.mark.security("R7")
def test_options_too_long_together_are_refused(lab: Lab) -> None:
    """Each of these long options is allowed alone, but together they are too long."""
    value = LONG[:100_000].rpartition(",")[0]
    env = {**VARIABLE, "PYXIS_CONTAINER_MOUNTS": value, "PYXIS_CONTAINER_ENV": "A=" + "x" * 100_000}
    done = lab.run(["srun", *ON_N1, "--container-save=./x" + "y" * 100_000, "true"], env=env, check=False)
    assert done.returncode != 0
    assert "variables have 3" in done.stderr, done.stderr[:2000]


@pytest.mark.security("R7")
def test_the_longest_that_is_allowed_runs_and_ends(lab: Lab) -> None:
    """At the limit, Slurm can execute the epilog."""
    text = "A=" + "x" * (130_816 - 2)
    script = (
        f"#!/bin/sh\n#SBATCH --container-image=registry:5000/minimal:1\n#SBATCH --container-env={text}\necho ${{#A}}\n"
    )
    path = pathlib.Path(lab.root, "home/alice/long.sh")
    path.write_text(script)
    sbatch(lab, "-w", "n1", "-o", "long.out", "long.sh")
    path.unlink()
    assert lab.run("cat long.out; rm long.out").stdout.endswith("130814\n")
    until(lambda: "idle" in lab.run("sinfo -h -n n1 -o %T").stdout, "the epilog has ended")
