"""Containers on a node whose cgroups systemd manages: their cgroup, its owner, and their end."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.waiting import until

from .conftest import DEVICE, IMAGE, PREFIX, REGISTRY, SCOPE, Node, as_root

CHECK = f"{PREFIX}/bin/pyxis-py"


def minimal(node: Node) -> str:
    """Import an image to a file, which FUSE serves, and return the file's path."""
    node.run("penroot", "import", "--force", "-o", "/tmp/minimal.sqsh", f"docker://{REGISTRY}#minimal:1")
    return "/tmp/minimal.sqsh"


def test_node_is_found_ready(node: Node) -> None:
    done = node.run(CHECK, "check", user="root")
    assert "bad" not in done.stdout, done.stdout


@pytest.mark.clusters("Control groups, version 1 and 2")
def test_task_and_what_serves_it_are_in_the_cgroup_of_their_job(node: Node) -> None:
    image = minimal(node)
    with node.popen("srun", f"--container-image={image}", "sh", "-c", "echo $$; read go") as step:
        assert step.stdout
        own = Path(f"/proc/{step.stdout.readline().strip()}/cgroup").read_text().strip()
        assert re.search(r"slurmstepd\.scope/job_\d+/step_0/user/task_0$", own), own
        job = next(SCOPE.glob("job_*"))
        pids = {pid for procs in job.rglob("cgroup.procs") for pid in procs.read_text().split()}
        served = subprocess.run(["pgrep", "-u", "alice", "-f", "squashfuse"], capture_output=True, text=True)
        assert served.stdout.split()
        assert set(served.stdout.split()) <= pids
        step.communicate("go\n", timeout=600)
    assert step.returncode == 0


@pytest.mark.clusters("Control groups, version 1 and 2")
def test_memory_of_a_job_is_its_containers(node: Node) -> None:
    eater = "head -c 400M /dev/zero | tail; echo survived"
    done = node.run("srun", "--mem=150M", IMAGE, "sh", "-c", eater, check=False)
    assert done.returncode != 0
    assert "oom" in done.stderr.lower() or "out of memory" in done.stderr.lower(), done.stderr
    assert node.srun("--mem=150M", IMAGE, "echo", "next") == "next\n"


@pytest.mark.clusters("Control groups, version 1 and 2")
def test_ranks_of_mpi_find_each_other(node: Node) -> None:
    out = node.srun("--ntasks=2", "--mpi=pmix", f"--container-image={REGISTRY}#mpi:1", "./hello").splitlines()
    assert sum(line.startswith("rank") for line in out) == 2 and "sum 1" in out


def test_device_is_that_of_the_job(node: Node) -> None:
    """Slurm's eBPF program on the step's cgroup applies in the container too."""
    opened = (IMAGE, f"--container-mounts={DEVICE}", "sh", "-c", f"exec 3>{DEVICE} && echo opened")
    assert node.srun("--gres=gpu:1", *opened) == "opened\n"
    done = node.run("srun", *opened, check=False)
    assert done.returncode != 0
    assert "Operation not permitted" in done.stderr, done.stderr


def test_scancel_ends_what_has_left_its_session(node: Node) -> None:
    script = "setsid sleep 1000 & setsid setsid sleep 1000 & echo up; wait"
    with node.popen("srun", "--job-name=lost", IMAGE, "--container-name=lost", "sh", "-c", script) as step:
        assert step.stdout
        assert step.stdout.readline() == "up\n"
        node.run("scancel", "--name=lost")
        step.communicate(timeout=600)
    until(lambda: not node.left(), "the end of all that was in the container", 120)
    node.run("penroot", "remove", "-f", "pyxis_lost", check=False)  # a named container outlives its job


def test_steps_go_on_while_slurmd_is_restarted(node: Node) -> None:
    with node.popen("srun", IMAGE, "sh", "-c", "echo up; read go; echo $go") as step:
        assert step.stdout
        assert step.stdout.readline() == "up\n"
        as_root("systemctl", "restart", "slurmd")
        out, errors = step.communicate("on\n", timeout=600)
    assert (step.returncode, out) == (0, "on\n"), errors
    until(node.is_idle, "a node that is idle", 300)
    assert node.srun(IMAGE, "echo", "next") == "next\n"


def test_container_is_kept_from_step_to_step_and_saved(node: Node) -> None:
    kept = ("--container-name=kept", "--container-writable")
    script = (
        f"srun {IMAGE} {' '.join(kept)} touch /here && srun {' '.join(kept)} --container-save=/tmp/kept.sqsh ls /here"
    )
    assert node.run("salloc", "sh", "-c", script).stdout == "/here\n"
    assert node.srun("--container-image=/tmp/kept.sqsh", "ls", "/here") == "/here\n"
    node.run("rm", "/tmp/kept.sqsh")


def test_directory_of_a_login_that_is_over_is_not_missed(node: Node) -> None:
    """srun exports XDG_RUNTIME_DIR, and logind removes the directory with the user's last session."""
    done = node.run("env", "XDG_RUNTIME_DIR=/run/user/12345", "srun", IMAGE, "echo", "started")
    assert done.stdout == "started\n"


def test_container_of_a_users_own_service_has_its_limits(node: Node) -> None:
    """Start a container by systemd-run --user, without Slurm, as for a long-running notebook."""
    image = minimal(node)
    as_root("loginctl", "enable-linger", "alice")
    until(lambda: list(Path("/run/user").glob("*/bus")), "the manager of the user's services", 300)
    service = ["systemd-run", "--machine=alice@", "--user", "--pipe", "--wait", "--quiet", "-p", "MemoryMax=150M"]
    start = [f"{PREFIX}/bin/penroot", "start", image, "sh", "-c"]
    try:
        done = subprocess.run([*service, *start, "echo started"], capture_output=True, text=True, timeout=1800)
        assert done.stdout == "started\n", done
        eater = "head -c 400M /dev/zero | tail; echo survived"
        done = subprocess.run([*service, "-p", "MemorySwapMax=0", *start, eater], capture_output=True, timeout=1800)
        assert done.returncode != 0 and b"survived" not in done.stdout, done
    finally:
        as_root("loginctl", "disable-linger", "alice")
