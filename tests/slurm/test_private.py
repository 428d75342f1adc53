"""Slurm's setup of a job before its steps: a private /tmp, and a connection to the user's display."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from tests.installation import PREFIX
from tests.slurm.lab import Lab
from tests.slurm.steps import IMAGE, assert_nothing_left, end, expect, sbatch, sh
from tests.waiting import until

TMP = "--container-mounts=/tmp"
X11_PORTS = 6000  # X11_TCP_PORT_OFFSET of Slurm: display 0's port


@pytest.fixture(scope="module")
def lab(lab: Lab) -> Iterator[Lab]:
    """Yield a cluster of one node, where each job has its own /tmp, and srun has --x11."""
    private = Lab(lab.root + "-private")
    lines = ("JobContainerType=job_container/tmpfs", "PrologFlags=Contain,X11")
    private.up(nodes=1, prefix=PREFIX, slurm_conf=lines)
    yield private
    private.down()


@pytest.fixture(autouse=True)
def nothing_left(lab: Lab) -> Iterator[None]:
    yield
    until(lambda: not os.listdir(f"{lab.root}/nodes/n1/var/spool/jobs/n1"), "the directories of all jobs are gone")
    assert_nothing_left(lab)


@pytest.mark.clusters("A `/tmp` for each job")
@pytest.mark.parity("job_container/tmpfs")
def test_a_step_has_the_tmp_of_its_job(lab: Lab) -> None:
    steps = f"srun touch /tmp/job; srun {IMAGE} {TMP} sh -c 'ls /tmp/job; touch /tmp/step'; srun ls /tmp/step"
    assert lab.run(["salloc", "-Q", *sh(steps)]).stdout == "/tmp/job\n/tmp/step\n"
    assert not os.path.exists(f"{lab.root}/nodes/n1/tmp/step")


@pytest.mark.parity("job_container/tmpfs")
def test_without_the_mount_tmp_is_the_container_s(lab: Lab) -> None:
    steps = f"srun touch /tmp/job; srun {IMAGE} sh -c 'ls -A /tmp; touch /tmp/step'; srun find /tmp -name step"
    assert lab.run(["salloc", "-Q", *sh(steps)]).stdout == ""


@pytest.mark.parity("job_container/tmpfs")
def test_jobs_have_separate_tmp_directories(lab: Lab) -> None:
    first = lab.popen(["srun", "--overlap", IMAGE, TMP, *sh("touch /tmp/first; echo up; read line; ls /tmp/second")])
    expect(first, "up")
    script = sh("ls /tmp/first 2>/dev/null || echo private; touch /tmp/second")
    assert lab.run(["srun", "--overlap", IMAGE, TMP, *script]).stdout == "private\n"
    out, _ = end(first)
    assert (first.returncode, out) == (2, "")


@pytest.mark.parity("job_container/tmpfs")
def test_batch_script_has_a_private_tmp(lab: Lab) -> None:
    script = "#!/bin/sh\necho $IMAGE_NAME > /tmp/batch\ncat /tmp/batch\n"
    sbatch(lab, "-o", "batch.out", IMAGE, TMP, input=script)
    assert lab.run("cat batch.out; rm batch.out").stdout.splitlines()[-1] == "minimal"
    assert not os.path.exists(f"{lab.root}/nodes/n1/tmp/batch")


@pytest.mark.parity("srun --x11: the display is reachable")
def test_a_display_is_reached_from_inside(lab: Lab) -> None:
    display = lab.listener("registry")
    number = display.getsockname()[1] - X11_PORTS

    def greet() -> None:
        connection, _ = display.accept()
        connection.sendall(b"a display\n")
        connection.close()

    thread = threading.Thread(target=greet, daemon=True)
    thread.start()
    connect = "d=${DISPLAY#*:}; exec 3<>/dev/tcp/localhost/$((6000 + ${d%.*})); cat <&3"
    key = "test -s $XAUTHORITY && echo key"
    try:
        lab.run(f"touch .Xauthority; xauth add registry:{number} . 00112233445566778899aabbccddeeff")
        env = {"DISPLAY": f"registry:{number}"}
        out = lab.run(["srun", "--x11", IMAGE, "bash", "-c", f"{connect}; {key}"], env=env).stdout
    finally:
        # slurmstepd makes the key file before it enters the job's /tmp, and leaves an empty file in the node's /tmp.
        lab.run("rm -f .Xauthority* /tmp/.Xauthority-*", node="n1")
        display.close()
    assert out == "a display\nkey\n"
