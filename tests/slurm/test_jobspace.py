"""Steps whose job has separate namespaces: namespace/linux of Slurm 25.11, with clone_ns_flags and user_ns_script.

slurmd starts the slurmstepd of each step in these namespaces: namespace_p_join(). With an older Slurm, jobspace.py does
this instead of slurmd.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.lab import Lab
from tests.slurm.lab.cluster import DAEMONS
from tests.slurm.steps import IMAGE, ON_N1, assert_nothing_left, end, expect, kill_helper, refused, sh, srun
from tests.waiting import until

HERE = Path(__file__).parent
DIRECTORY = "/home/jobspace"
MAPS = {"all": "0 0 4294967295", "few": "0 0 1,2001 2001 1,3001 3001 1"}


def hold(lab: Lab, users: str) -> None:
    lab.run(["python3", f"{DIRECTORY}/jobspace.py", "hold", MAPS[users]], node="n1", user="root")


def release(lab: Lab, jobs: int = 0) -> None:
    """Wait until only ``jobs`` jobs remain, then end the namespaces, which kills the leftovers of their steps."""
    until(lambda: len(lab.run(["squeue", "-h"]).stdout.splitlines()) == jobs, f"{jobs} jobs")
    lab.run("kill -KILL -- -$(cat /run/jobspace); rm /run/jobspace", node="n1", user="root")


@pytest.fixture(scope="module")
def stepd(lab: Lab) -> Iterator[None]:
    """Run a slurmd on n1 that starts each step in the namespaces that `hold` has made."""
    script = f'#!/bin/sh\nexec python3 {DIRECTORY}/jobspace.py "$@"\n'
    lab.run(f"mkdir {DIRECTORY}; cat > {DIRECTORY}/stepd; chmod 755 {DIRECTORY}/stepd", user="root", input=script)
    lab.run(f"cat > {DIRECTORY}/jobspace.py", user="root", input=(HERE / "jobspace.py").read_text())
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(DAEMONS, "slurmd", ["slurmd", "-d", f"{DIRECTORY}/stepd"])
        lab.restart_daemon("n1", "slurmd")
        yield
    lab.restart_daemon("n1", "slurmd")
    lab.run(["rm", "-r", DIRECTORY], user="root")


@pytest.fixture(params=list(MAPS))
def space(lab: Lab, stepd: None, request: pytest.FixtureRequest) -> Iterator[str]:
    hold(lab, request.param)
    yield request.param
    release(lab)
    assert_nothing_left(lab, "n1")


@pytest.mark.parity("containers work in a job with private user and PID namespaces")
def test_containers_in_the_namespaces_of_a_job(lab: Lab, space: str) -> None:
    assert srun(lab, "cat", "/proc/self/uid_map").split()[2] == ("1" if space == "few" else "4294967295")
    write = ["--container-writable", *sh("echo $IMAGE_NAME >> /x; cat /x")]
    assert srun(lab, IMAGE, *write) == "minimal\n"
    assert srun(lab, IMAGE, "--container-remap-root", "id", "-u") == "0\n"


@pytest.mark.parity("containers work in a job with private user and PID namespaces")
def test_a_helper_that_is_killed_there(lab: Lab, space: str) -> None:
    """Another process finishes the step, although its real group may be unmapped in the user namespace."""
    step = lab.popen(["srun", *ON_N1, IMAGE, "--container-writable", *sh("echo up; read line")])
    expect(step, "up")
    kill_helper(lab)
    _, err = end(step)
    assert (step.returncode, "cannot become the user" in err) == (0, False)
    until(lambda: not lab.run(["penroot", "list"], node="n1").stdout, "the container is removed")


@pytest.mark.parity("containers work in a job with private user and PID namespaces")
def test_a_container_of_another_job(lab: Lab, space: str) -> None:
    """A step of another job cannot join the container. The error says why."""
    name = "--container-name=one"
    step = lab.popen(["srun", *ON_N1, IMAGE, name, *sh("echo up; read line")])
    expect(step, "up")
    assert srun(lab, name, "echo", "same") == "same\n"
    lab.run("mv /run/jobspace /run/jobspace.1", node="n1", user="root")
    hold(lab, space)
    try:
        stderr = refused(lab, IMAGE, name, "true")
        assert "the container pyxis_one runs in step" in stderr
        assert "whose job has separate namespaces" in stderr
    finally:
        release(lab, jobs=1)
        lab.run("mv /run/jobspace.1 /run/jobspace", node="n1", user="root")
    end(step)
    lab.run(["penroot", "remove", "-f", "pyxis_one"], node="n1")
