"""The examples, run on the lab as a user would run them; those for GPUs are read by their shells and by Slurm."""

from __future__ import annotations

import pathlib
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from enroot_py import configs, mounts, settings
from tests.slurm.lab import Lab

EXAMPLES = pathlib.Path(__file__).parent.parent.parent / "examples"
MINIMAL = "registry:5000#minimal:1"
MPI = "registry:5000#mpi:1"


@pytest.fixture
def home(lab: Lab) -> Iterator[pathlib.Path]:
    """The examples in the home directory of a user, which all nodes share."""
    lab.run(["mkdir", "examples"])
    copied = pathlib.Path(lab.root, "home/alice/examples")
    for path in EXAMPLES.iterdir():
        if path.is_file():
            shutil.copy(path, copied)
    yield copied
    lab.run(["rm", "-rf", "examples"])


def sbatch(lab: Lab, home: pathlib.Path, name: str, *options: str, **environ: str) -> str:
    """What a job wrote, which must succeed."""
    command = ["sbatch", "--wait", "--output=out", *options, name]
    done = lab.run(command, cwd="/home/alice/examples", env=environ, check=False)
    out = (home / "out").read_text()
    assert done.returncode == 0, out + done.stderr
    return out


def test_mpi(lab: Lab, home: pathlib.Path) -> None:
    out = sbatch(lab, home, "mpi.sbatch", IMAGE=MPI, COMMAND="hello")
    assert len([line for line in out.splitlines() if line.startswith("rank ")]) == 4
    assert "sum 6" in out.splitlines()


def test_steps_of_one_container(lab: Lab, home: pathlib.Path) -> None:
    try:
        prepare, command = "echo prepared > /opt-file", "cat /opt-file; id -un"
        out = sbatch(lab, home, "steps.sbatch", IMAGE=MINIMAL, PREPARE=prepare, COMMAND=command)
    finally:
        for node in lab.nodes:
            lab.run(["penroot", "remove", "-f", "pyxis_prepared"], node=node, check=False)
    words = [line for line in out.splitlines() if line in ("prepared", "alice")]
    assert words == ["prepared", "alice"] * 2
    assert list(home.glob("prepared-*.sqsh"))


def test_mpirun_of_the_host(lab: Lab, home: pathlib.Path) -> None:
    image = f"docker://{MPI}"
    script = f"./mpirun.sh 3 {image} hello"
    environ = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "tcp,vader,self", "OMPI_MCA_rmaps_base_oversubscribe": "1"}
    done = lab.run(["sh", "-c", script], node="n1", cwd="/home/alice/examples", env=environ)
    assert "sum 3" in done.stdout.splitlines()
    assert "mpirun-" not in lab.run(["penroot", "list"], node="n1").stdout


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.sbatch")))
def test_slurm_takes_the_job(lab: Lab, home: pathlib.Path, name: str) -> None:
    subprocess.run(["bash", "-n", EXAMPLES / name], check=True)
    # The lab has neither that many GPUs nor that many processors.
    smaller = ["--gpus-per-node=1"] if "gpus-per-node" in (EXAMPLES / name).read_text() else []
    command = ["sbatch", "--test-only", *smaller, "--ntasks-per-node=1", "--cpus-per-task=1", name]
    assert "to start at" in lab.run(command, cwd="/home/alice/examples").stderr


def test_site_configuration_is_understood() -> None:
    environ = {"HOME": "/home/x", "ENROOT_SYSCONF_PATH": str(EXAMPLES / "site"), "XDG_CONFIG_HOME": "/nowhere"}
    loaded = settings.load(environ)
    assert loaded.data_path.startswith("/raid/enroot/data-")
    assert loaded.passed_on["MELLANOX_VISIBLE_DEVICES"] == "all"
    for _, text in configs.fragments((str(EXAMPLES / "site/mounts.d"),), ".fstab", {}):
        assert [mount.target for mount in mounts.parse_file(text, {}, "site")] == ["/scratch", "/data"]
