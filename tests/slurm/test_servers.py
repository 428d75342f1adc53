"""Steps whose image is a squashfs file: squashfuse is killed, or the files in the image belong to other users."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kernel.conftest import PREFIX
from tests.slurm.lab import Lab
from tests.slurm.steps import IMAGE, ON_N1, end, expect, on_node, sh, srun

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture(scope="module")
def image(lab: Lab) -> Iterator[str]:
    """Return a squashfs image whose files belong to several users."""
    srun(lab, IMAGE, "--container-save=saved.sqsh", "true")
    lab.run("unsquashfs -quiet -no-progress -dest tree saved.sqsh && chmod -R u+rwX tree")
    lab.run("mksquashfs tree own.sqsh -quiet -no-progress -p '/etc m 755 7 8'")
    yield "--container-image=./own.sqsh"
    lab.run("rm -rf tree own.sqsh saved.sqsh")


@pytest.mark.parametrize("options", [(), ("--container-remap-root",), ("--container-writable",)], ids=" ".join)
def test_image_of_other_owners_runs_in_steps(lab: Lab, image: str, options: tuple[str, ...]) -> None:
    uid = "0" if "--container-remap-root" in options else "2001"
    assert srun(lab, image, *options, "stat", "-c", "%u", "/etc", "/bin/sh") == f"{uid}\n{uid}\n"


def test_step_names_killed_squashfuse(lab: Lab, image: str) -> None:
    step = lab.popen(["srun", *ON_N1, image, *sh("echo up; read line; /bin/ls /usr/bin > /dev/null; exit 3")])
    expect(step, "up")
    on_node(lab, "pkill -KILL -u alice squashfuse")
    _, err = end(step)
    assert step.returncode == 3 or step.returncode > 100
    assert "squashfuse of ./own.sqsh was killed by signal 9 while the container ran" in err
    assert err.count(" was killed") == 1


def test_step_says_nothing_of_squashfuse_that_ended(lab: Lab, image: str) -> None:
    step = lab.popen(["srun", *ON_N1, image, *sh("echo up; read line")])
    expect(step, "up")
    _, err = end(step)
    assert step.returncode == 0 and "squashfuse" not in err


def test_containers_of_a_step_share_a_server(lab: Lab, image: str) -> None:
    """The containers of two tasks share a server. Another step has its own server, which outlives the first step."""
    start = f"{PREFIX}/bin/penroot start ./own.sqsh sh -c 'echo up; read line; /bin/ls /bin > /dev/null && echo read'"
    steps = []
    try:
        for count in (1, 2):
            steps.append(lab.popen(["srun", *ON_N1, "--ntasks=2", "--overcommit", *sh(start)]))
            expect(steps[-1], "up", "up")
            assert len(on_node(lab, "pgrep -u alice squashfuse").split()) == count
        lab.run("scancel $(squeue --noheader --sort=i --format=%i | head -1)")
        steps[0].wait(timeout=60)
        out, err = end(steps[1])
        assert steps[1].returncode == 0 and out == "read\nread\n" and "squashfuse" not in err
    finally:
        for step in steps:
            step.kill()
