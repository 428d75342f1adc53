"""Tests of the lab itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.installation import PREFIX
from tests.slurm.lab import CommandFailed, Lab, LabError, cgroups, images
from tests.slurm.steps import PMIX
from tests.waiting import until

REPOSITORY = Path(__file__).parents[2]
HELLO = Path(__file__).parent / "lab" / "hello.c"


def test_srun_reaches_both_nodes_as_an_ordinary_user(lab: Lab) -> None:
    done = lab.run("srun -N2 sh -c 'echo $(hostname) $(id -un) $(id -Gn)'")
    assert sorted(done.stdout.splitlines()) == ["n1 alice alice science", "n2 alice alice science"]


def test_failure_of_a_command_is_raised_with_its_output(lab: Lab) -> None:
    with pytest.raises(CommandFailed, match="no-such-file"):
        lab.run(["ls", "/no-such-file"])
    assert lab.run("exit 7", check=False).returncode == 7


def test_timeout_ends_the_command(lab: Lab) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        lab.run("exec sleep 98765", node="n1", timeout=0.5)
    assert "98765" not in lab.run("ps -eo args", node="n1").stdout.replace("ps -eo args", "")


@pytest.mark.parametrize("kind", ["pmix", "pmi2"])
def test_slurm_offers_mpi_plugins(lab: Lab, kind: str, request: pytest.FixtureRequest) -> None:
    if kind == "pmix":
        request.getfixturevalue("pmix")
    assert kind in lab.run(["srun", "--mpi=list"]).stdout.split() + lab.run(["srun", "--mpi=list"]).stderr.split()


@PMIX
def test_mpi_runs_over_both_nodes(lab: Lab) -> None:
    """Use the machine's Open MPI, Slurm's PMIx and the lab's network, without a container."""
    program = Path(lab.root, "home", "alice", "hello")
    subprocess.run(["mpicc", "-o", program, HELLO], check=True)
    program.chmod(0o755)
    done = lab.run("srun -N2 --ntasks-per-node=2 --mpi=pmix ./hello", env=images.OVER_NODES)
    lines = sorted(line for line in done.stdout.splitlines() if line)
    hosts = ["n1", "n1", "n2", "n2"]
    assert lines == [f"rank {rank} of 4 on {host}" for rank, host in enumerate(hosts)] + ["sum 6"]
    program.unlink()


def test_memory_limit_is_enforced_on_a_step(lab: Lab) -> None:
    done = lab.run(["srun", "--mem=40M", "/usr/bin/python3", "-c", "bytearray(200 << 20)"], check=False)
    assert done.returncode != 0
    assert "Out Of Memory" in done.stderr


def test_nodes_keep_their_files_to_themselves_and_share_home(lab: Lab) -> None:
    lab.run("touch /tmp/mine /dev/shm/mine ~/ours", node="n1")
    assert lab.run("ls /tmp/mine /dev/shm/mine", node="n2", check=False).stdout == ""
    assert not os.path.exists("/tmp/mine")
    lab.run("rm ~/ours", node="n2")
    lab.run("rm /tmp/mine /dev/shm/mine", node="n1")


@pytest.mark.parametrize("url", ["http://registry:5000", "https://registry.lab", "https://registry-1.docker.io"])
def test_registry_answers_on_a_node(lab: Lab, url: str) -> None:
    script = "import json, sys, urllib.request as u; print(json.load(u.urlopen(sys.argv[1] + '/v2/mpi/tags/list')))"
    done = lab.run(["/usr/bin/python3", "-c", script, url], node="n2")
    assert done.stdout.strip() == "{'name': 'mpi', 'tags': ['1']}"


def test_images_hold_what_they_promise(lab: Lab) -> None:
    def manifest(image: str) -> dict[str, object]:
        raw = lab.run(["skopeo", "inspect", "--raw", f"docker://registry.lab/{image}"], node="n1").stdout
        answer: dict[str, object] = json.loads(raw)
        return answer

    def layer_types(image: str) -> list[str]:
        layers = manifest(image)["layers"]
        assert isinstance(layers, list)
        return [layer["mediaType"].rpartition(".")[2] for layer in layers]

    assert layer_types("minimal:1") == ["tar+gzip", "tar+zstd", "tar+gzip"]
    assert layer_types("minimal:docker") == ["gzip", "gzip", "gzip"]
    index = manifest("minimal:multi")["manifests"]
    assert isinstance(index, list)
    architectures = [entry["platform"]["architecture"] for entry in index]
    assert architectures[0] in ("arm64", "amd64") and architectures[1:] == ["unknown", images.architecture()]


def test_unknown_node_and_user_are_errors(lab: Lab) -> None:
    with pytest.raises(LabError, match="no node n9"):
        lab.run("true", node="n9")
    with pytest.raises(LabError, match="no user carol"):
        lab.run("true", user="carol")


def test_up_again_starts_nothing_and_other_arguments_are_refused(lab: Lab) -> None:
    before = [lab.node(node).pid for node in lab.nodes]
    lab.up(nodes=2, prefix=PREFIX)
    assert [lab.node(node).pid for node in lab.nodes] == before
    with pytest.raises(LabError, match="other arguments"):
        lab.up(nodes=3)


@PMIX
def test_jobs_leave_nothing(lab: Lab) -> None:
    for _ in range(3):
        lab.run("srun -N2 --mpi=pmix true")
    job = lab.run("sbatch --parsable -N2 -o /dev/null --wrap 'srun sleep 1000'").stdout.strip()
    wait_for_step(lab, job)
    lab.run(["scancel", job])
    assert {node: lab.residue(node) for node in lab.nodes} == {"n1": [], "n2": []}


SLEEP = "setsid --fork sleep 54321 </dev/null >/dev/null 2>&1"  # may return before the child has executed sleep
PLANTS = {
    "processes": f"{SLEEP}; until pgrep -x sleep >/dev/null; do :; done; echo 'pkill -x sleep'",
    "files": "mkdir -p /var/tmp/enroot-data-2001/pyxis_1.0; echo 'rm -r /var/tmp/enroot-data-2001'",
    "mounts": "mount -t tmpfs planted /mnt; echo 'umount /mnt'",
    "cgroups": "cd /sys/fs/cgroup; cd freezer 2>&1; mkdir -p job_9/step_0; echo rmdir $PWD/job_9{/step_0,}",
}


@pytest.mark.parametrize("kind", PLANTS)
def test_residue_finds_what_is_planted(lab: Lab, kind: str) -> None:
    undo = lab.run(PLANTS[kind], user="root", node="n1").stdout
    try:
        assert [line for line in lab.residue("n1", settle=0) if line.startswith(f"{kind}: ")]
        assert lab.residue("n2") == []
    finally:
        lab.run(undo, user="root", node="n1")
    assert lab.residue("n1") == []


def test_leftovers_of_slurm_do_not_count_as_residue(lab: Lab) -> None:
    _, step, job = lab.run(PLANTS["cgroups"], user="root", node="n1").stdout.split()
    lab.run(["rmdir", step], user="root", node="n1")
    try:
        assert lab.residue("n1", settle=0) == []
    finally:
        lab.run(["rmdir", job], user="root", node="n1")


def test_residue_of_one_test_is_not_that_of_the_next(lab: Lab) -> None:
    lab.run(f"{SLEEP}; mkdir -p /var/tmp/enroot-data-2001/kept", node="n1")
    assert lab.residue("n1", settle=0)
    lab.clear("n1")
    assert lab.residue("n1", settle=0) == []
    assert lab.run("pgrep -x sleep", node="n1", check=False).stdout == ""
    lab.run("rm -rf /var/tmp/enroot-data-2001/kept", node="n1")


HOLDER = """
import os, socket, sys
s = socket.socket(socket.AF_UNIX); s.bind("\\0penroot-planted")
os.makedirs("/tmp/enroot-run-2001", exist_ok=True)
fd = os.open("/tmp/enroot-run-2001", os.O_RDONLY)
print("ready", flush=True); sys.stdin.read()
"""


def test_residue_finds_a_socket_and_a_held_directory(lab: Lab) -> None:
    process = lab.popen(["/usr/bin/python3", "-c", HOLDER], node="n1")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    left = "\n".join(lab.residue("n1", settle=0))
    process.communicate()
    assert "sockets: @penroot-planted" in left
    assert "holds /tmp/enroot-run-2001" in left
    assert lab.residue("n1") == []


def test_a_daemon_can_be_restarted(lab: Lab) -> None:
    lab.restart_daemon("n2", "slurmd")
    lab.stop_daemon("registry", "registry-http")
    assert lab.run("curl -s http://registry:5000/v2/", node="n1", check=False).returncode == 7  # connection refused
    lab.restart_daemon("registry", "registry-http")
    assert lab.run("curl -s http://registry:5000/v2/", node="n1").stdout == "{}"
    assert lab.run("srun -w n2 hostname").stdout == "n2\n"
    assert lab.residue("n2") == []


@pytest.fixture
def second(tmp_path_factory: pytest.TempPathFactory, lab: Lab) -> Iterator[Lab]:
    """Yield a second lab, which a test may start."""
    second = Lab(lab.root + "-second")
    yield second
    second.down()


def test_two_labs_live_side_by_side_and_one_goes_alone(lab: Lab, second: Lab) -> None:
    second.up(nodes=1)
    assert second.run("srun hostname").stdout == "n1\n"
    second.down()
    assert not os.path.exists(second.root)
    assert not cgroups.exists(second.branch)
    assert lab.run("srun hostname").returncode == 0


@pytest.mark.parametrize("moment", ["namespaces", "daemons"])
def test_down_cleans_a_half_started_lab(second: Lab, moment: str) -> None:
    half_start(second, processes=1 if moment == "namespaces" else 10)
    second.down()
    assert not os.path.exists(second.root)
    assert not cgroups.exists(second.branch)
    assert processes_mentioning(second.root) == []


def test_up_makes_a_half_started_lab_anew(second: Lab) -> None:
    half_start(second, processes=1)
    second.up(nodes=1)
    assert second.run("srun hostname").stdout == "n1\n"


def half_start(lab: Lab, processes: int) -> None:
    """Kill ``up`` once the lab has at least ``processes`` processes, which keep running."""
    environ = {**os.environ, "PENROOT_LAB": lab.root}
    up = subprocess.Popen([sys.executable, "-m", "tests.slurm.lab", "up"], cwd=REPOSITORY, env=environ)
    until(lambda: len(cgroups.processes(lab.branch)) >= processes, "the lab has begun")
    up.send_signal(signal.SIGKILL)
    up.wait()


def processes_mentioning(text: str) -> list[str]:
    shown = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    return [line for line in shown.splitlines() if text in line]


def wait_for_step(lab: Lab, job: str) -> None:
    """Wait until step 0 of ``job`` runs."""
    steps = ["squeue", "-s", "-h", "-j", job, "-o", "%i"]
    until(lambda: f"{job}.0" in lab.run(steps).stdout.split(), f"step 0 of job {job} runs")
