"""start --memory --cpus --pids: a control group for one container."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.waiting import until

from .conftest import PREFIX, REGISTRY, Node, as_root

LIMITS = ("--memory=150M", "--cpus=0.5", "--pids=60")
FILES = {"memory.max": "149999616", "memory.swap.max": "0", "cpu.max": "50000 100000", "pids.max": "60"}
# Divide a group that systemd has delegated: move its processes to a leaf, and enable controllers for other children.
DIVIDE = """
import glob, os, subprocess, sys
group = "/sys/fs/cgroup" + open("/proc/self/cgroup").read().strip().rpartition(":")[2]
os.mkdir(f"{group}/leaf")
for name, text in {"leaf/cgroup.procs": "0", "cgroup.subtree_control": "+memory +cpu +pids"}.items():
    with open(f"{group}/{name}", "w") as file:
        file.write(text)
statuses = [subprocess.run(sys.argv[1:]).returncode for _ in range(2)]
print(statuses, len(glob.glob(f"{group}/penroot-*")))
"""


@pytest.fixture(scope="module")
def image(node: Node) -> str:
    node.run("penroot", "import", "--force", "-o", "/tmp/limits.sqsh", f"docker://{REGISTRY}#minimal:1")
    return "/tmp/limits.sqsh"


@pytest.fixture
def manager(node: Node) -> Iterator[str]:
    """Yield the variable by which a program finds the manager of alice's services."""
    uid = node.run("id", "-u").stdout.strip()
    as_root("loginctl", "enable-linger", "alice")
    until(lambda: Path(f"/run/user/{uid}/bus").exists(), "the manager of the user's services", 300)
    try:
        yield f"XDG_RUNTIME_DIR=/run/user/{uid}"
    finally:
        as_root("loginctl", "disable-linger", "alice")


def group_of(pid: str) -> Path:
    return Path("/sys/fs/cgroup" + Path(f"/proc/{pid}/cgroup").read_text().strip().rpartition(":")[2])


@pytest.mark.parity("start --memory", "start --cpus", "start --pids")
def test_limits_are_those_of_a_scope(node: Node, image: str, manager: str) -> None:
    start = ("env", manager, "penroot", "start", *LIMITS, image, "sh", "-c", "echo up; read go; exit 3")
    with node.popen(*start) as process:
        assert process.stdout
        assert process.stdout.readline() == "up\n"
        pids = subprocess.run(["pgrep", "-u", "alice", "-f", "read go"], capture_output=True, text=True).stdout.split()
        groups = {group_of(pid) for pid in pids if "penroot-" in str(group_of(pid))}
        (group,) = groups
        assert {name: (group / name).read_text().strip() for name in FILES} == FILES
        process.communicate("go\n", timeout=600)
    assert process.returncode == 3
    until(lambda: not group.exists(), "the end of the scope", 60)


def test_memory_beyond_the_limit_ends_the_program(node: Node, image: str, manager: str) -> None:
    done = node.run("env", manager, "penroot", "start", LIMITS[0], image, "tail", "/dev/zero", check=False)
    assert (done.stdout, done.returncode) == ("", 137), done
    assert node.run("env", manager, "penroot", "start", image, "echo", "free").stdout == "free\n"


def test_container_in_the_background_has_limits(node: Node, image: str, manager: str) -> None:
    penroot = ("env", manager, "penroot")
    name = node.run(*penroot, "start", "--detach", *LIMITS, image, "sleep", "1000").stdout.strip()
    pid = subprocess.run(["pgrep", "-u", "alice", "-x", "sleep"], capture_output=True, text=True).stdout.split()[0]
    group = group_of(pid)
    assert (group / "pids.max").read_text() == "60\n"
    node.run(*penroot, "stop", name)
    node.run(*penroot, "remove", "--force", name)
    until(lambda: not group.exists(), "the end of the scope", 60)


def test_delegated_group_is_divided(node: Node, image: str, manager: str) -> None:
    """A start with limits removes the group of the previous start."""
    scope = ["systemd-run", "--machine=alice@", "--user", "--pipe", "--wait", "--quiet", "-p", "Delegate=yes"]
    variables = ["env", f"PATH={PREFIX}/bin:/usr/bin", "HOME=/home/alice", "XDG_RUNTIME_DIR=/nowhere"]
    words = ["penroot", "start", *LIMITS, image, "sh", "-c", "exit 3"]
    command = [*scope, *variables, "/usr/bin/python3", "-c", DIVIDE, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.stdout == "[3, 3] 1\n", done.stderr


def test_job_keeps_its_processes(node: Node, image: str, manager: str) -> None:
    """A scope would take the processes out of the job's control group."""
    done = node.run("env", manager, "srun", "penroot", "start", LIMITS[0], image, "true", check=False)
    assert done.returncode != 0
    assert "--memory: no permission to make control groups" in done.stderr and "srun --mem" in done.stderr


def test_without_a_manager_there_are_no_limits(node: Node, image: str) -> None:
    done = node.run("env", "XDG_RUNTIME_DIR=/nowhere", "penroot", "start", LIMITS[1], image, "true", check=False)
    assert done.returncode != 0
    assert "--cpus: no permission to make control groups" in done.stderr and "enable-linger" in done.stderr
