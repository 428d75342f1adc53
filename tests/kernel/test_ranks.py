"""MPI without Slurm: mpirun starts penroot. The ranks connect to each other and share a container."""

from __future__ import annotations

import json
import pathlib
import shutil
import subprocess

import pytest

from tests.waiting import until

from .conftest import User, require, servers, squashed

HELLO = pathlib.Path(__file__).parent.parent / "slurm/lab/hello.c"
USR = ("--mount", "/usr:/usr")
OPEN_MPI = ("mpirun", "--oversubscribe", "-n", "4")
HYDRA = ("mpiexec.hydra", "-n", "4")
# Open MPI of Debian warns about a missing library at every start without InfiniBand.
QUIET = {"OMPI_MCA_mca_base_component_show_load_errors": "0", "OMPI_MCA_btl": "vader,self", "OMPI_MCA_pml": "ob1"}
# The four ranks wait for each other. A container that ended before the next rank began could not be shared.
SHOW = """
import os, time
open("/meet/" + os.environ["PMI_RANK"], "w").close()
while len(os.listdir("/meet")) < 4: time.sleep(0.02)
print(*(os.readlink(f"/proc/self/ns/{kind}") for kind in ("user", "mnt")), os.environ["PMI_RANK"])
"""


@pytest.fixture
def mpi(user: User) -> pathlib.Path:
    """Return the container ``mpi`` with MPI programs. Tests mount the host's /usr, as a site mounts its MPI."""
    for program in ("mpicc.openmpi", "mpirun", "mpicc.mpich", "mpiexec.hydra"):
        require(shutil.which(program), f"{program} is not installed")
    path = user.data / "mpi"
    for name in ("dev", "etc", "opt", "proc", "sys", "tmp", "usr"):
        (path / name).mkdir(parents=True)
    for name in ("bin", "lib", "lib64"):
        (path / name).symlink_to(f"usr/{name}")
    (path / "etc/environment").write_text("PATH=/usr/bin\n")
    shutil.copytree("/etc/openmpi", path / "etc/openmpi")
    for kind in ("openmpi", "mpich"):
        subprocess.run([f"mpicc.{kind}", "-o", path / f"opt/hello.{kind}", HELLO], check=True)
    user.own(user.data)
    return path


@pytest.fixture
def image(user: User, mpi: pathlib.Path) -> str:
    """Return the container ``mpi`` as a squashfs image."""
    return str(squashed(user, mpi))


@pytest.mark.parity("20-mpi (new): ranks work under mpirun of Open MPI and under Hydra")
@pytest.mark.parametrize("source", ["mpi", "image"])
def test_mpirun_of_open_mpi(user: User, image: str, source: str) -> None:
    command = ("penroot", "start", *USR, image if source == "image" else source, "/opt/hello.openmpi")
    done = user.run(*OPEN_MPI, *command, env=QUIET)
    assert sum(line.startswith("rank ") for line in done.stdout.splitlines()) == 4
    assert "sum 6" in done.stdout
    assert done.stderr == ""  # Open MPI also does not warn about cross-memory attach
    files = {path.name for path in (user.home / "run").iterdir()} - {"named-mpi", "servers"}  # later starts use these
    assert files == set()


def test_components_of_the_launcher(user: User, mpi: pathlib.Path) -> None:
    """mpirun of Open MPI 5 makes ranks load components from one directory, which is PMIx's in Debian 13 (5.0.7)."""
    component_path = ("-x", "OMPI_MCA_mca_base_component_path=/usr/lib/pmix")
    done = user.run(*OPEN_MPI, *component_path, "penroot", "start", *USR, "mpi", "/opt/hello.openmpi", env=QUIET)
    assert "sum 6" in done.stdout


@pytest.mark.parity("20-mpi (new): ranks work under mpirun of Open MPI and under Hydra")
@pytest.mark.parametrize("more", [(), ("--root",)])
def test_mpiexec_of_hydra(user: User, image: str, more: tuple[str, ...]) -> None:
    done = user.run(*HYDRA, "penroot", "start", *more, *USR, image, "/opt/hello.mpich")
    assert sum(line.startswith("rank ") for line in done.stdout.splitlines()) == 4
    assert "sum 6" in done.stdout


@pytest.mark.parity("20-mpi (new): ranks share a container")
def test_ranks_share_a_container_and_keep_their_own_variables(user: User, image: str) -> None:
    (user.home / "meet").mkdir()
    user.own(user.home / "meet")
    # The ranks share a container even if the user's script runs between the launcher and penroot.
    command = ("sh", "-c", 'penroot start "$@"; exit $?', "sh", *USR, "--mount", f"{user.home}/meet:/meet")
    command = (*command, image, "python3", "-c", SHOW)
    lines = [line.split() for line in user.run(*HYDRA, *command).stdout.splitlines()]
    assert len({(line[0], line[1]) for line in lines}) == 1
    assert sorted(line[2] for line in lines) == ["0", "1", "2", "3"]


@pytest.mark.parity("20-mpi (new): ranks work under mpirun of Open MPI and under Hydra")
def test_descriptors_of_pmi_stay_open(user: User, image: str) -> None:
    program = "import os, stat; print(stat.S_ISSOCK(os.fstat(int(os.environ['PMI_FD'])).st_mode))"
    for source, more in ((image, ()), ("mpi", ("--pid",)), (image, ("--pid",))):
        command = ("penroot", "start", *more, *USR, source, "python3", "-c", program)
        assert user.run(*HYDRA, *command).stdout.split() == ["True"] * 4


RANK = {"PMIX_RANK": "0", "PMIX_NAMESPACE": "job"}


@pytest.mark.parity("ENROOT_MPI", "20-mpi (new): ranks work under mpirun of Open MPI and under Hydra")
def test_variables_of_a_rank(user: User, rootfs: pathlib.Path) -> None:
    """A rank gets the variables of its MPI launcher, except those that name directories of the host's MPI."""
    odd = "a\n'b' \"$HOME\" \\ =ü"
    environ = {"OMPI_MCA_odd": odd, "I_MPI_PIN": "1", "PMIX_SERVER_TMPDIR": "/nowhere", "OTHER": "x"}
    environ |= {"OPAL_PREFIX": "/opt/openmpi", "I_MPI_ROOT": "/opt/intel"}
    show = ("--env", "I_MPI_PIN=2", "box", "cat", "/proc/self/environ")

    def variables(**more: str) -> dict[str, str]:
        pairs = user.start(*show, env={**environ, **more}).split("\0")[:-1]
        return dict(pair.partition("=")[::2] for pair in pairs)

    inside = variables(**RANK)
    assert inside["OMPI_MCA_odd"] == odd
    assert (inside["PMIX_RANK"], inside["I_MPI_PIN"]) == ("0", "2")
    assert not inside.keys() & {"OPAL_PREFIX", "I_MPI_ROOT", "OTHER"}
    assert "OMPI_MCA_odd" not in variables()
    assert "PMIX_RANK" not in variables(ENROOT_MPI="no", **RANK)


@pytest.mark.parity("ENROOT_MPI")
def test_directory_of_the_launcher_is_there(user: User, rootfs: pathlib.Path) -> None:
    """The directory that PMIX_SERVER_TMPDIR names is mounted in the container, unless ENROOT_MPI=no."""
    session = user.home / "session"
    session.mkdir()
    (session / "file").touch()
    user.own(session)
    environ = {**RANK, "PMIX_SERVER_TMPDIR": str(session)}
    assert user.start("box", "ls", f"{session}/file", env=environ) == f"{session}/file\n"
    user.penroot("start", "box", "ls", f"{session}/file", env={**environ, "ENROOT_MPI": "no"}, status=1)


@pytest.mark.parity("20-mpi (new): --root is refused if PMIx would refuse it because MUNGE is missing")
def test_root_whom_pmix_would_refuse(user: User, rootfs: pathlib.Path) -> None:
    environ = {**RANK, "OMPI_COMM_WORLD_SIZE": "2", "PMIX_SECURITY_MODE": "native"}
    done = user.penroot("start", "--root", "box", "true", env=environ, status=1)
    assert "[ERROR] --root: PMIx refuses" in done.stderr
    assert "omit --root" in done.stderr
    # A single process is usually a shell, whose programs are no ranks. It starts, without the variables of a rank.
    variables = user.start("--root", "box", "env", env={**environ, "OMPI_COMM_WORLD_SIZE": "1"})
    assert "PMIX_RANK" not in variables


# The first part of a Python program that starts ranks. With WHERE, a rank runs until end() is called.
LAUNCHER = """
import json, os, subprocess, sys, time
def start(rank, *arguments, **more):
    environ = {**os.environ, **more, **({"PMI_RANK": str(rank)} if rank is not None else {})}
    pipe = subprocess.PIPE
    return subprocess.Popen(["penroot", "start", *arguments], env=environ, stdin=pipe, stdout=pipe, text=True)
def line(process): return process.stdout.readline().strip()
def end(process):
    process.communicate("\\n", timeout=250)
    return process.returncode
WHERE = ("sh", "-c", "readlink /proc/self/ns/mnt; read line")
"""


def launch(user: User, script: str, *arguments: str, **env: str) -> list[object]:
    """Run LAUNCHER and a script, and return the list that the script prints as JSON."""
    done = user.run("/usr/bin/python3", "-c", LAUNCHER + script, *arguments, env=env)
    output = json.loads(done.stdout)
    assert isinstance(output, list)
    return output


@pytest.mark.parity("20-mpi (new): ranks share a container")
def test_the_first_rank_may_end_first(user: User, image: str) -> None:
    """Ranks can join the container as long as one of its ranks runs. A rank that starts later gets a new container."""
    script = """
image = sys.argv[1]
ranks = [start(n, "-m", "/usr:/usr", image, *WHERE) for n in (0, 1)]
seen = [line(rank) for rank in ranks]
end(ranks[0])
ranks.append(start(2, "-m", "/usr:/usr", image, *WHERE))
seen.append(line(ranks[2]))
ends = [end(rank) for rank in ranks[1:]]
late = start(3, "-m", "/usr:/usr", image, "echo", "late")
print(json.dumps([seen, ends, line(late), end(late)]))
"""
    seen, ends, late, status = launch(user, script, image)
    assert isinstance(seen, list)
    assert len(seen) == 3
    assert len(set(seen)) == 1
    assert (ends, late, status) == ([0, 0], "late", 0)
    until(lambda: not servers(image), "the server of the image ends")


@pytest.mark.parity("20-mpi (new): ranks share a container")
def test_rank_that_is_killed_in_its_setup_is_replaced(user: User, rootfs: pathlib.Path) -> None:
    script = 'touch "$HOME/here"; while test -e "$HOME/wait"; do sleep 0.02; done'
    (user.home / "conf").write_text(f"hooks() {{ {script}; }}\n")
    (user.home / "wait").touch()
    user.own(user.home / "wait")
    script = """
conf, here = os.environ["HOME"] + "/conf", os.environ["HOME"] + "/here"
first = start(0, "--conf", conf, "box", *WHERE)
while not os.path.exists(here): time.sleep(0.02)
others = [start(n, "--conf", conf, "box", *WHERE) for n in (1, 2)]
first.kill()
os.unlink(os.environ["HOME"] + "/wait")
print(json.dumps([[line(rank) for rank in others], [end(rank) for rank in others]]))
"""
    namespaces, ends = launch(user, script)
    assert isinstance(namespaces, list)
    assert len(set(namespaces)) == 1
    assert namespaces[0]
    assert ends == [0, 0]


READ = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
libc.prctl(0x59616d61, ctypes.c_ulong(-1))  # PR_SET_PTRACER, for Yama
if os.environ["PMI_RANK"] == "0":
    secret = ctypes.create_string_buffer(b"in the other's memory")
    print(os.getpid(), ctypes.addressof(secret), flush=True)
    input()
else:
    class Piece(ctypes.Structure): _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]
    pid, address = map(int, input().split())
    here = ctypes.create_string_buffer(21)
    pieces = [Piece(ctypes.addressof(here), 21), Piece(address, 21)]
    got = libc.process_vm_readv(pid, *(word for piece in pieces for word in (ctypes.byref(piece), 1)), 0)
    print(here.raw.decode() if got == 21 else os.strerror(ctypes.get_errno()), flush=True)
"""


@pytest.mark.parity("ENROOT_JOIN", "20-mpi (new): ranks share a container")
@pytest.mark.parametrize(("join", "result"), [("auto", "in the other's memory"), ("no", "Operation not permitted")])
def test_memory_of_another_rank(user: User, mpi: pathlib.Path, join: str, result: str) -> None:
    """Ranks can read each other's memory if they share a container, and not with ENROOT_JOIN=no."""
    script = """
ranks = [start(n, "-m", "/usr:/usr", "mpi", "python3", "-c", sys.argv[1]) for n in (0, 1)]
where = line(ranks[0])
found = ranks[1].communicate(where + "\\n")[0].strip()
print(json.dumps([found, end(ranks[0])]))
"""
    assert launch(user, script, READ, ENROOT_JOIN=join) == [result, 0]


@pytest.mark.parity("ENROOT_JOIN")
def test_processes_that_share_a_container(user: User, rootfs: pathlib.Path) -> None:
    """Ranks of one launcher share a container if they request the same one. Values of variables may differ."""
    script = """
asked = {
    "first": start(0, "box", *WHERE),
    "rank": start(1, "--env", "X=1", "box", *WHERE, PMI_SIZE="9"),
    "another": start(4, "--env", "X=2", "box", *WHERE),
    "same rank": start(0, "box", *WHERE),
    "mount": start(2, "--mount", "/etc:/etc", "box", *WHERE),
    "gpu": start(3, "box", *WHERE, NVIDIA_VISIBLE_DEVICES="void"),
    "no rank": start(None, "box", *WHERE),
}
where = {name: line(rank) for name, rank in asked.items()}
print(json.dumps([where, [end(rank) for rank in asked.values()]]))
"""
    namespaces, ends = launch(user, script)
    assert isinstance(namespaces, dict)
    assert ends == [0] * len(namespaces)
    assert namespaces["rank"] == namespaces["another"]  # they share, although their variables differ
    alone = ("first", "rank", "same rank", "mount", "gpu", "no rank")
    assert len({namespaces[name] for name in alone}) == len(alone)


def test_records_of_ended_launchers_are_removed(user: User, rootfs: pathlib.Path) -> None:
    launch(user, 'print(json.dumps([end(start(0, "box", "true"))]))')
    (user.home / "run/ranks-of-others").touch()
    several = """
starts = [start(0, "--mount", f"/etc:/etc{n}", "box", "true") for n in range(8)]
print(json.dumps([[end(one) for one in starts], len([n for n in os.listdir(sys.argv[1]) if n.startswith("ranks-")])]))
"""
    # Eight starts with other mounts make eight records, which remain while their launcher runs. The ninth is the file
    # ranks-of-others. The record of the first launcher, which has ended, is gone.
    assert launch(user, several, str(user.home / "run")) == [[0] * 8, 9]
    launch(user, 'print(json.dumps([end(start(0, "box", "true"))]))')
    assert len(list((user.home / "run").glob("ranks-*"))) == 2


def test_a_container_of_its_own_processes_is_not_shared(user: User, rootfs: pathlib.Path) -> None:
    assert user.start("--pid", "box", "echo", "mine", env=RANK) == "mine\n"
