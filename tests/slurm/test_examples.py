"""The examples, run on the lab as a user would run them. Other programs replace those that need GPUs or Jupyter."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from enroot_py.config import files, settings
from enroot_py.registry import site
from enroot_py.registry.reference import DOCKER_HUB
from enroot_py.runtime import fstab
from pyxis_py.request import settings as plugin_settings
from tests.installation import LIBRARY
from tests.slurm.lab import Lab, images
from tests.slurm.steps import ON_N1, PMIX, assert_nothing_left, sbatch
from tests.waiting import until

EXAMPLES = pathlib.Path(__file__).parent.parent.parent / "examples"
HELLO = pathlib.Path(__file__).parent / "lab/hello.c"
MINIMAL = "registry:5000#minimal:1"
MPI = "registry:5000#mpi:1"
PYTHON = {"PYTHONPATH": LIBRARY}


@pytest.fixture
def home(lab: Lab) -> Iterator[pathlib.Path]:
    """Copy the examples to the home of a user, which all nodes share."""
    lab.run(["mkdir", "examples"])
    copied = pathlib.Path(lab.root, "home/alice/examples")
    for path in EXAMPLES.iterdir():
        if path.is_file():
            shutil.copy(path, copied)
    yield copied
    shutil.rmtree(copied)


def run(lab: Lab, home: pathlib.Path, name: str, *options: str, **environ: str) -> str:
    """Run a job, which must succeed, and return its output."""
    done = sbatch(lab, "--output=out", *options, name, cwd="/home/alice/examples", env=environ, check=False)
    out = (home / "out").read_text()
    assert done.returncode == 0, out + done.stderr
    return out


@PMIX
def test_mpi(lab: Lab, home: pathlib.Path) -> None:
    out = run(lab, home, "mpi.sbatch", IMAGE=MPI, COMMAND="hello")
    assert len([line for line in out.splitlines() if line.startswith("rank ")]) == 4
    assert "sum 6" in out.splitlines()


SANDBOXES = ("srun", *ON_N1, "--mem=0", "python3", "sandboxes.py")


def test_step_has_two_hundred_sandboxes(lab: Lab, home: pathlib.Path) -> None:
    command = [*SANDBOXES, "200", f"docker://{MINIMAL}", "sh", "-c", "echo $N > /n; cat /n"]
    done = lab.run(command, cwd="/home/alice/examples", env=PYTHON)
    assert done.stdout.split() == [str(number) for number in range(200)]
    assert_nothing_left(lab)


def test_scancel_ends_all_sandboxes_of_a_step(lab: Lab, home: pathlib.Path) -> None:
    command = [*SANDBOXES, "50", f"docker://{MINIMAL}", "sleep", "600"]
    step = lab.popen(command, cwd="/home/alice/examples", env=PYTHON)
    try:
        running = "pgrep -xcu alice sleep || true"
        until(lambda: lab.run(running, node="n1").stdout == "50\n", "50 sandboxes run")
        lab.run("scancel $(squeue --noheader --format=%i)")
        step.wait(timeout=60)
    finally:
        step.kill()
    lab.run([*SANDBOXES, "1", f"docker://{MINIMAL}", "true"], cwd="/home/alice/examples", env=PYTHON)
    assert_nothing_left(lab)  # the last start has removed the killed containers' files


def test_steps_of_one_container(lab: Lab, home: pathlib.Path) -> None:
    try:
        prepare, command = "echo prepared > /opt-file", "echo $(cat /opt-file; id -un)"
        out = run(lab, home, "steps.sbatch", IMAGE=MINIMAL, PREPARE=prepare, COMMAND=command)
    finally:
        for node in lab.nodes:
            lab.run(["penroot", "remove", "-f", "pyxis_prepared"], node=node, check=False)
    assert out.splitlines().count("prepared alice") == 2
    assert list(home.glob("prepared-*.sqsh"))


# More ranks than processors: settings for Open MPI 4, and for PRRTE, which starts the ranks of Open MPI 5.
OVERSUBSCRIBED = {"OMPI_MCA_rmaps_base_oversubscribe": "1", "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}


def test_mpirun_of_the_host(lab: Lab, home: pathlib.Path) -> None:
    image = f"docker://{MPI}"
    script = f"./mpirun.sh 3 {image} hello"
    environ = {**images.OVER_NODES, **OVERSUBSCRIBED}
    done = lab.run(["sh", "-c", script], node="n1", cwd="/home/alice/examples", env=environ)
    assert "sum 3" in done.stdout.splitlines()
    assert "mpirun-" not in lab.run(["penroot", "list"], node="n1").stdout


@PMIX
def test_bandwidth_of_nccl(lab: Lab, home: pathlib.Path) -> None:
    """MPI ranks share the GPUs of two nodes, and get settings for NCCL and UCX."""
    show = 'test -n "$NCCL_DEBUG$CUDA_VISIBLE_DEVICES" && echo $UCX_TLS $CUDA_VISIBLE_DEVICES'
    program = f"{show} && env -u UCX_TLS hello"
    options = ["--gpus-per-node=2", "--ntasks-per-node=2"]
    out = run(lab, home, "nccl-tests.sbatch", *options, IMAGE=MPI, COMMAND=program).splitlines()
    assert out.count("rc,sm 0,1") == 4
    assert "sum 6" in out


def test_pytorch_finds_its_ranks(lab: Lab, home: pathlib.Path) -> None:
    options = ["--gpus-per-node=2", "--ntasks-per-node=2", "--cpus-per-task=1"]
    program = "ls pytorch-ddp.py && echo $RANK $LOCAL_RANK $WORLD_SIZE $MASTER_ADDR"
    variables = {"PYTORCH_VERSION": "2.4.0", "IMAGE": MINIMAL, "COMMAND": program}
    out = run(lab, home, "pytorch-ddp.sbatch", *options, **variables).splitlines()
    assert out.count("pytorch-ddp.py") == 4
    ranks = sorted(line for line in out if line[0].isdigit())
    assert ranks == ["0 0 4 n1", "1 1 4 n1", "2 0 4 n1", "3 1 4 n1"]


def test_script_of_pytorch_is_python() -> None:
    compile((EXAMPLES / "pytorch-ddp.py").read_text(), "pytorch-ddp.py", "exec")


def test_jupyter_answers(lab: Lab, home: pathlib.Path) -> None:
    """A file server replaces Jupyter; the client connects as the job's output says."""
    server = "echo notebook > /tmp/index.html && exec busybox httpd -f -p 28888 -h /tmp"
    env = {"IMAGE": MINIMAL, "PORT": "28888", "COMMAND": server}
    command = ["sbatch", "--parsable", "-w", "n2", "--gpus=1", "--cpus-per-task=1", "--output=out", "jupyter.sbatch"]
    job = lab.run(command, cwd="/home/alice/examples", env=env).stdout.strip()
    try:
        fetched = lab.run(["sh", "-c", FETCH], node="ctl", check=False, timeout=280)
        out = (home / "out").read_text()
        assert fetched.stdout == "notebook\n", out + fetched.stderr
        assert "ssh -N -L 28888:n2:28888" in out
    finally:
        lab.run(["scancel", job])


FETCH = "for i in $(seq 1200); do curl -fs http://n2:28888/ && exit; sleep 0.2; done; exit 1"


@pytest.fixture
def mpi_home(lab: Lab, home: pathlib.Path) -> str:
    """Collect the machine's Open MPI in one directory, as a site would install it. The image has no Open MPI."""
    lib = pathlib.Path(f"/usr/lib/{os.uname().machine}-linux-gnu")
    made = home / "openmpi"
    inside = made / "lib" / lib.name / "openmpi/lib"
    inside.mkdir(parents=True)
    for directory in (lib / "openmpi/lib").glob("openmpi*"):  # components outside of the library's directory
        shutil.copytree(directory, inside / directory.name)
    shutil.copytree("/usr/share/openmpi", made / "share/openmpi")
    shutil.copytree(lib / "pmix2", made / "pmix2", symlinks=True)
    subprocess.run(["mpicc", "-o", home / "hello", HELLO], check=True)
    plugins = [str(path) for path in inside.glob("openmpi*/*.so")]
    listed = subprocess.run(["ldd", home / "hello", *plugins], capture_output=True, text=True, check=False).stdout
    for path in {line.split()[2] for line in listed.splitlines() if " => /" in line}:
        # The image has its own C library.
        if not path.rpartition("/")[2].startswith(("libc.", "libm.", "libdl.", "libpthread.", "librt.", "ld-")):
            shutil.copy(path, made / "lib")
    return "/home/alice/examples/openmpi"


@PMIX
def test_mpi_of_the_site(lab: Lab, home: pathlib.Path, mpi_home: str) -> None:
    variables = {"IMAGE": MINIMAL, "MPI_HOME": mpi_home, "COMMAND": "./hello"}
    more = {"PMIX_INSTALL_PREFIX": f"{mpi_home}/pmix2", **images.OVER_NODES}
    out = run(lab, home, "host-mpi.sbatch", **variables, **more)
    assert len([line for line in out.splitlines() if line.startswith("rank ")]) == 4
    assert "sum 6" in out.splitlines()


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.sbatch")))
def test_slurm_takes_the_job(lab: Lab, home: pathlib.Path, name: str) -> None:
    subprocess.run(["bash", "-n", EXAMPLES / name], check=True)
    # The lab has fewer GPUs and processors.
    smaller = ["--gpus-per-node=1"] if "gpus-per-node" in (EXAMPLES / name).read_text() else []
    command = ["sbatch", "--test-only", *smaller, "--ntasks-per-node=1", "--cpus-per-task=1", name]
    assert "to start at" in lab.run(command, cwd="/home/alice/examples").stderr


def test_site_configuration_is_understood() -> None:
    environ = {"HOME": "/home/x", "ENROOT_SYSCONF_PATH": str(EXAMPLES / "site"), "XDG_CONFIG_HOME": "/nowhere"}
    loaded = settings.load(environ)
    assert loaded.data_path.startswith("/raid/enroot/data-")
    assert loaded.passed_on["MELLANOX_VISIBLE_DEVICES"] == "all"
    assert loaded.passed_on["https_proxy"] == "http://proxy.example.com:3128"
    assert "registry.example.com" in loaded.passed_on["no_proxy"]
    known = {name: site.rules(name, loaded, environ) for name in ("nvcr.io", DOCKER_HUB, "ghcr.io")}
    assert known["nvcr.io"].mirrors == ("registry.example.com:5000",)
    assert len(known[DOCKER_HUB].mirrors) == 2
    assert known["ghcr.io"].mirrors == ()
    assert site.rules("registry.example.com:5000", loaded, environ).ca == "/etc/ssl/certs/site.pem"
    for _, text in files.fragments((str(EXAMPLES / "site/mounts.d"),), ".fstab", {}):
        assert [mount.target for mount in fstab.parse_file(text, {}, "site")] == ["/scratch", "/data"]


@pytest.mark.clusters("Login nodes or nodes that reach no registry")
def test_mirror_behind_an_air_gap(lab: Lab) -> None:
    """The lab cannot resolve public names; the site's mirror has the images that users request."""
    text = (EXAMPLES / "site/registries.conf").read_text()
    lab.run(["mkdir", "-p", ".config/enroot"])
    conf = pathlib.Path(lab.root, "home/alice/.config/enroot/registries.conf")
    srun = ["srun", "--container-image=nvcr.io#minimal:1", "printenv", "IMAGE_NAME"]
    assert lab.run(srun, check=False).returncode != 0
    try:
        # The lab's registry serves HTTP on this port, and needs no CA.
        lines = [line for line in text.splitlines() if "ca=" not in line]
        conf.write_text("\n".join(lines).replace("registry.example.com:5000", "registry:5000") + "\n")
        assert lab.run(srun).stdout.split() == ["minimal"]
        lab.run(["penroot", "import", "-o", "carried.sqsh", "docker://nvcr.io#minimal:1"])
        done = lab.run(["srun", "--container-image=./carried.sqsh", "printenv", "IMAGE_NAME"])
        assert done.stdout.split() == ["minimal"]
    finally:
        lab.run(["rm", "-rf", ".config/enroot", "carried.sqsh"])


def test_line_of_plugstack_is_understood() -> None:
    [line] = [x for x in (EXAMPLES / "site/plugstack.conf").read_text().splitlines() if not x.startswith("#")]
    required, library, *arguments = line.split()
    assert required == "required"
    assert library.endswith("/spank_pyxis.so")
    read = plugin_settings.load(arguments)
    assert (read.runtime_path, read.container_scope) == ("/run/pyxis", "job")
