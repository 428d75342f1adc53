"""Attacks on a step's helper, the process that makes its container, by a program in the container.

The helper and the program run as the same user.
"""

from __future__ import annotations

import pathlib
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from tests.slurm.lab import Lab
from tests.slurm.steps import IMAGE, ON_N1, PMIX, clear, end, expect, on_node, refused, sbatch, sh, srun
from tests.slurm.test_lifecycle import FIRST, all_wait, gated, open_gate
from tests.waiting import until

__all__ = ["gated"]

HIJACK = pathlib.Path(__file__).parent / "hijack.py"
NAME = "--container-name=one"
USR = "--container-mounts=/usr:/usr,./hijack.py:/hijack.py"
RUN = ",/run/pyxis:/run/pyxis"
WHERE = sh("echo ${EVIL-no} $(readlink /proc/self/ns/mnt)")


@pytest.fixture(autouse=True)
def nothing_left(lab: Lab) -> Iterator[None]:
    yield
    clear(lab)


@pytest.fixture(scope="module", autouse=True)
def hijack(lab: Lab) -> Iterator[None]:
    path = pathlib.Path(lab.root, "home/alice/hijack.py")
    shutil.copy(HIJACK, path)
    path.chmod(0o644)
    yield
    path.unlink()


def attacking(lab: Lab, mode: str, *options: str, mounts: str = USR) -> subprocess.Popen[str]:
    step = lab.popen(["srun", *ON_N1, *options, mounts, "python3", "/hijack.py", mode])
    expect(step, "ready")
    return step


@pytest.mark.security("H1")
@pytest.mark.parametrize("mounts", [USR, USR + RUN])
def test_impostor_of_the_helper_sends_no_task_to_the_node(lab: Lab, mounts: str) -> None:
    """An impostor answers the request to attach without namespaces. The next step must not run outside a container."""
    step = attacking(lab, "attach", IMAGE, NAME, mounts=mounts)
    done = lab.run(["srun", *ON_N1, NAME, *WHERE], check=False)
    end(step)
    host = lab.run(["readlink", "/proc/self/ns/mnt"], node="n1").stdout.strip()
    assert "yes" not in done.stdout and host not in done.stdout
    if RUN in mounts:  # containers do not see the sockets of helpers, but this user mounts them
        assert "is not the helper process of a step: it is in a container" in done.stderr
    else:
        assert done.returncode == 0, done.stderr


@pytest.mark.security("H1")
def test_impostor_of_the_helper_does_not_hold_the_step(lab: Lab) -> None:
    """An impostor never answers the request to finish. The step must not hang, and Slurm must not drain the node."""
    step = attacking(lab, "silent", IMAGE)
    step.communicate("", timeout=300)
    try:
        until(
            lambda: not lab.run(["squeue", "-h", "-u", "alice"]).stdout, "the job has ended", 50
        )  # after a minute, Slurm would give the step up
    finally:
        on_node(lab, "pkill -KILL -f '[h]ijack.py'")


@pytest.mark.security("H1")
@pytest.mark.parametrize("mounts", [USR, USR + RUN])
def test_idle_client_delays_no_other(lab: Lab, mounts: str) -> None:
    """A client connects to the helper's socket and sends nothing."""
    step = attacking(lab, "idle", IMAGE, NAME, mounts=mounts)
    second = lab.popen(["srun", *ON_N1, NAME, *WHERE])
    try:
        out, err = second.communicate(timeout=250)
    finally:
        end(step)
        second.kill()
    assert second.returncode == 0, err
    assert out.startswith("no mnt:")


@pytest.mark.security("C1")
def test_nobody_looks_at_the_helper(lab: Lab) -> None:
    """A tracer would get the helper's descriptors, and could forge its answers."""
    step = lab.popen(["srun", *ON_N1, IMAGE, *sh("echo up; read line")])
    expect(step, "up")
    helper = "p=$(pgrep -o -u alice -f '[p]yxis_py.helper')"
    look = f"{helper} && cat /proc/$p/comm && ! ls /proc/$p/fd/ && ! cat /proc/$p/environ"
    done = lab.run(look, node="n1", check=False)
    end(step)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "python" in done.stdout


@pytest.mark.security("H2")
@pytest.mark.parametrize("options", [("--container-writable",), ("--container-save=over.sqsh",)])
def test_task_killed_in_setup_leaves_container_to_next(
    lab: Lab, gated: tuple[str, ...], options: tuple[str, ...]
) -> None:
    """The helper of the next task must not fail because the killed task's container exists."""
    step = lab.popen(["srun", *ON_N1, "-n3", "--cpu-bind=none", *gated, *options, *sh("echo done")])
    made = "ls -d /var/tmp/*/pyxis_*.0 /home/alice/*/pyxis_*.0 /home/alice/.local/share/enroot/pyxis_*.0"
    all_wait(lab, 3)
    until(lambda: on_node(lab, f"{made} 2>/dev/null"), "the container is made")
    on_node(lab, f"kill -KILL $({FIRST})")
    open_gate(lab)
    out, err = end(step)
    lab.run("rm -f gate/open over.sqsh")
    assert out.count("done") == 2, err


@pytest.mark.security("H2")
def test_an_attached_step_has_its_own_variables(lab: Lab) -> None:
    """--container-env of the first step must not override the second job's variables."""
    env = {"GIVEN": "first", "IMAGE_NAME": "first"}
    step = lab.popen(
        ["srun", *ON_N1, IMAGE, NAME, "--container-env=GIVEN,IMAGE_NAME", *sh("echo up; read line")], env=env
    )
    expect(step, "up")
    out = srun(lab, NAME, *sh("echo $GIVEN $IMAGE_NAME"), env={"GIVEN": "second", "IMAGE_NAME": "second"})
    end(step)
    assert out == "second minimal\n"


@pytest.mark.security("H2")
def test_srun_pty_says_what_is_wrong(lab: Lab) -> None:
    """With --pty, a task whose output Slurm drops must still show its error."""
    for _ in range(3):
        stderr = refused(lab, "--pty", "-n4", "--cpu-bind=none", "--container-name=nothing", "true")
        assert "there is no such container on this node" in stderr


COVER = "--container-mounts=./cover:/opt/covered"
# Make the path of another step's mount, and each name in a new /proc/self/fd, lead to /opt/covered.
SWAP = """
exec 5< /proc/self/mountinfo
echo up
while ! place=$(cut -d' ' -f5 /proc/self/mountinfo | grep /pmix); do sleep 0.05; done
above=${place%/*}
mv $above $above.moved && mkdir $above && ln -s /opt/covered $place && ls $place > /dev/null && echo swapped
if [ $(id -u) = 0 ]; then
    mount -t tmpfs none /proc && mkdir -p /proc/self/fd
    for number in $(seq 0 99); do ln -s /opt/covered /proc/self/fd/$number; done
fi
echo ready
read line
cat <&5 | cut -d' ' -f5 | grep -e pmix -e covered
cat /opt/covered/file
"""


@pytest.fixture
def cover(lab: Lab) -> Iterator[None]:
    lab.run("mkdir cover; echo cover > cover/file")
    yield
    lab.run("rm -r cover")


@pytest.mark.parity("a step that ends detaches only its own mounts")
@pytest.mark.security("C8")
@PMIX
@pytest.mark.parametrize("root", ["--container-remap-root", "--no-container-remap-root"])
def test_step_that_ends_detaches_its_own_mounts_only(lab: Lab, cover: None, root: str) -> None:
    """The second step's mount point has become a link to a mount of the first step, which must stay mounted."""
    first = lab.popen(["srun", *ON_N1, IMAGE, NAME, COVER, "--container-writable", root, *sh(SWAP)])
    expect(first, "up")
    second = lab.popen(["srun", *ON_N1, "--mpi=pmix", NAME, *sh("echo up; read line")])
    expect(second, "up")
    expect(first, "swapped", "ready")
    _, err = end(second)
    assert second.returncode == 0, err
    out, err = end(first)
    assert out == "/opt/covered\ncover\n", err


@pytest.mark.parity("a step that ends detaches only its own mounts")
@pytest.mark.security("C8")
def test_no_link_leads_a_batch_script_to_a_cover(lab: Lab, cover: None) -> None:
    """Where Slurm's batch script is to be mounted, the container has links to a mount of the user."""
    before = "mkdir -p /var/spool/slurmd; for i in $(seq 1 2000); do ln -s /opt/covered $(printf $job $i); done"
    script = f"job=/var/spool/slurmd/job%05d; {before}; echo up; read line; cat /proc/self/mountinfo | grep -c covered"
    first = lab.popen(["srun", *ON_N1, IMAGE, NAME, COVER, "--container-writable", *sh(script)])
    expect(first, "up")
    done = sbatch(lab, "-n1", "-w", "n1", "-o", "out", NAME, "--wrap", "echo ran", check=False)
    output = lab.run("cat out; rm -f out").stdout
    assert done.returncode != 0
    assert "cannot mount the batch script in the running container one: " in output
    assert "it leads into a mount of n1" in output
    out, err = end(first)
    assert out == "1\n", err
    assert lab.run("ls cover").stdout == "file\n"
