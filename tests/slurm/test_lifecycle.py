"""What happens when something of a step is killed, cancelled, or runs out: the others go on, and nothing is left."""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Iterator

import pytest

from tests.slurm.lab import Lab
from tests.slurm.steps import IMAGE, ON_N1, sh, srun

HELPER = "[p]yxis_py.helper"


@pytest.fixture(autouse=True)
def nothing_left(lab: Lab) -> Iterator[None]:
    yield
    left = [f"{node}: {line}" for node in lab.nodes for line in lab.residue(node, 20)]
    assert not left, "\n".join(left)


def kill(lab: Lab, *pattern: str) -> None:
    lab.run(["pkill", "-KILL", *pattern], node="n1", user="root", check=False)


@pytest.fixture(scope="module")
def file(lab: Lab) -> Iterator[str]:
    srun(lab, IMAGE, "--container-save=life.sqsh", "true")
    yield "--container-image=./life.sqsh"
    lab.run(["rm", "life.sqsh"])


@pytest.mark.parametrize("seconds", [0.02, 0.06, 0.1, 0.15, 0.25])
def test_the_helper_is_killed_while_eight_tasks_start(lab: Lab, seconds: float) -> None:
    step = lab.popen(["srun", *ON_N1, "-n8", IMAGE, *sh("sleep 0.5; echo done")])
    time.sleep(seconds)
    kill(lab, "-f", HELPER)
    out, err = step.communicate(timeout=120)
    # Those that had joined run on, the others end with one line.
    assert "Traceback" not in err
    assert out.count("done") == 8 or step.returncode != 0


def test_the_helper_is_killed_after_all_have_joined(lab: Lab) -> None:
    step = lab.popen(["srun", *ON_N1, "-n4", IMAGE, "--container-writable", *sh("echo up; sleep 1; cat /etc/passwd")])
    assert step.stdout is not None
    for _ in range(4):
        assert step.stdout.readline() == "up\n"
    kill(lab, "-f", HELPER)
    out, _ = step.communicate(timeout=120)
    assert step.returncode == 0
    assert out.count("alice:x:2001") == 4


def test_the_server_of_an_image_is_killed(lab: Lab, file: str) -> None:
    step = lab.popen(["srun", *ON_N1, file, *sh("echo up; sleep 1; cat /usr/bin/* > /dev/null")])
    assert step.stdout is not None
    assert step.stdout.readline() == "up\n"
    kill(lab, "-f", "[s]quashfuse")
    step.communicate(timeout=120)
    assert step.returncode != 0
    assert srun(lab, file, "echo", "again") == "again\n"


def test_the_first_task_ends_before_the_others(lab: Lab, file: str) -> None:
    script = "[ $SLURM_LOCALID = 0 ] && exit 0; sleep 1; cat /usr/bin/* > /dev/null && echo read"
    assert srun(lab, file, "-n3", *sh(script)) == "read\nread\n"


@pytest.mark.parametrize("how", ["scancel", "time"])
def test_a_program_that_writes_a_checkpoint_at_the_end_can_read_its_files(lab: Lab, file: str, how: str) -> None:
    save = "find /usr/bin -type f | xargs cat > /dev/null && echo saved; exit 0"
    step = lab.popen(["srun", *ON_N1, "--time=1", file, *sh(f"trap '{save}' TERM; echo up; sleep 120 & wait")])
    assert step.stdout is not None
    assert step.stdout.readline() == "up\n"
    lab.run("scancel --signal=TERM $(squeue -h -o %i)" if how == "scancel" else "sleep 0.1")
    if how == "time":
        lab.run("scontrol update JobId=$(squeue -h -o %i) EndTime=now", user="root", check=False)
    out, _ = step.communicate(timeout=120)
    assert "saved" in out


def test_wait_sees_no_child_but_its_own(lab: Lab) -> None:
    begun = time.monotonic()
    srun(lab, "-n2", IMAGE, *sh("wait; cat /proc/$$/task/$$/children | wc -w"))
    assert time.monotonic() - begun < 5


def test_a_terminal(lab: Lab) -> None:
    out = lab.run(
        ["script", "-qec", f"srun -w n1 --overlap --pty {IMAGE} sh -c 'test -t 0 && echo terminal'", "/dev/null"]
    )
    assert "terminal" in out.stdout


@pytest.mark.soak
def test_soak(lab: Lab, soak: bool, rng: random.Random) -> None:
    """Steps in a row, some at once, some cancelled at random moments: all others exit 0."""
    count, at_once, cancelled = (200, 50, 30) if soak else (20, 10, 4)
    doomed = set(rng.sample(range(count), cancelled))
    running: list[tuple[int, subprocess.Popen[str]]] = []

    def end_first() -> None:
        number, step = running.pop(0)
        _, err = step.communicate(timeout=180)
        assert number in doomed or step.returncode == 0, err

    for i in range(count):
        running.append((i, lab.popen(["srun", "-N1", "--overlap", f"--job-name=soak{i}", IMAGE, *sh("sleep 0.2")])))
        if i in doomed:
            time.sleep(rng.random() * 0.5)
            lab.run(["scancel", f"--name=soak{i}"])
        if len(running) >= at_once:
            end_first()
    while running:
        end_first()
