"""MPI and PyTorch in containers: with the user's own id and as root of a user namespace, over one and two nodes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.lab import Lab
from tests.slurm.steps import IMAGE, ON_N1, PMIX, assert_nothing_left, clear, end, expect, refused, sh, srun
from tests.waiting import until

MPI = "--container-image=registry:5000#mpi:1"
TWO_NODES = ("-N2", "--ntasks-per-node=2")


@pytest.mark.parity("50-slurm-pmi", "MPI works for the user, and with --container-remap-root")
@PMIX
@pytest.mark.parametrize("root", ["--container-remap-root", "--no-container-remap-root"])
@pytest.mark.parametrize("writable", ["--container-writable", "--container-readonly"])
def test_ranks_find_each_other(lab: Lab, root: str, writable: str) -> None:
    command = ["srun", "-N2", "--ntasks-per-node=2", "--mpi=pmix", root, writable, MPI, "./hello"]
    out = lab.run(command).stdout.splitlines()
    assert sum(line.startswith("rank") for line in out) == 4
    assert "sum 6" in out


@PMIX
def test_no_slurmstepd_stays_behind(lab: Lab) -> None:
    lab.run(["srun", "-N2", "--mpi=pmix", "--container-remap-root", MPI, "./hello"])
    assert_nothing_left(lab)


@pytest.mark.parity("MPI works if the step joins a running container")
@PMIX
@pytest.mark.parametrize("root", ["--container-remap-root", "--no-container-remap-root"])
@pytest.mark.parametrize("writable", ["--container-writable", "--container-readonly"])
def test_ranks_find_each_other_in_a_container_that_runs(lab: Lab, root: str, writable: str) -> None:
    first = ["srun", *ON_N1, MPI, "--container-name=runs", root, writable]
    step = lab.popen([*first, *sh("echo up; read line; grep -c pmix /proc/self/mountinfo")])
    expect(step, "up")
    done = lab.run(["srun", *ON_N1, "-n2", "--mpi=pmix", "--container-name=runs:exec", "./hello"])
    assert sorted(done.stdout.splitlines()) == ["rank 0 of 2 on n1", "rank 1 of 2 on n1", "sum 1"]
    assert "PMIX ERROR" not in done.stderr
    out, _ = end(step)
    assert out == "0\n"  # the second step's mounts are gone
    clear(lab)


@pytest.mark.parity("20-mpi (new): ranks work on several nodes under mpirun, mpiexec and srun")
@pytest.mark.parametrize(
    ("launcher", "image"),
    [
        (("salloc", "-Q", *TWO_NODES, "mpirun", "-n", "4"), "mpi"),
        (("salloc", "-Q", *TWO_NODES, "mpiexec.hydra", "-n", "4"), "mpich"),
        (("srun", *TWO_NODES, "--mpi=pmix"), "mpi"),
        (("srun", *TWO_NODES, "--mpi=pmi2"), "mpich"),
    ],
)
def test_penroot_as_the_program_of_a_launcher(
    lab: Lab, launcher: tuple[str, ...], image: str, request: pytest.FixtureRequest
) -> None:
    """Ranks on two nodes do not need the plugin: Slurm runs orted and Hydra's proxies as ordinary programs."""
    if "--mpi=pmix" in launcher:
        request.getfixturevalue("pmix")
    done = lab.run([*launcher, "penroot", "start", f"docker://registry:5000#{image}:1", "hello"])
    assert sum(line.startswith("rank ") for line in done.stdout.splitlines()) == 4
    assert "sum 6" in done.stdout.splitlines()
    for node in lab.nodes:  # without a runtime directory, the launcher's record of its ranks stays until the next start
        lab.run(["sh", "-c", "rm -f /tmp/enroot-run-*/ranks-*"], node=node)
    assert_nothing_left(lab)


MPICH = "--container-image=registry:5000#mpich:1"


@pytest.mark.parity("MPICH works with --mpi=pmi2")
@pytest.mark.parametrize("root", ["--container-remap-root", "--no-container-remap-root"])
def test_mpich_by_pmi2(lab: Lab, root: str) -> None:
    done = lab.run(["srun", *TWO_NODES, "--mpi=pmi2", root, MPICH, "hello"])
    assert sum(line.startswith("rank ") for line in done.stdout.splitlines()) == 4
    assert "sum 6" in done.stdout.splitlines()
    assert "the image's MPI" not in done.stderr


@pytest.mark.parity("if the image's MPI cannot use the --mpi of srun")
@pytest.mark.parametrize(
    ("image", "kind", "hint"),
    [
        (MPICH, "pmix", "use --mpi=pmi2"),
        (MPICH, "none", ""),
        (MPI, "pmi2", "use --mpi=pmix"),
        (MPI, "pmix", ""),
        (IMAGE, "pmix", ""),
    ],
)
def test_an_mpi_that_does_not_speak_what_srun_offers_is_said(
    lab: Lab, image: str, kind: str, hint: str, request: pytest.FixtureRequest
) -> None:
    if kind == "pmix":
        request.getfixturevalue("pmix")
    done = lab.run(["srun", *TWO_NODES, f"--mpi={kind}", image, "true"])
    assert done.stderr.count("the image's MPI is") == (1 if hint else 0)
    assert hint in done.stderr


@pytest.mark.parity("mpi4py works on several nodes")
@PMIX
def test_mpi4py(lab: Lab) -> None:
    program = "from mpi4py import MPI; c = MPI.COMM_WORLD; print(c.rank, c.size, c.allreduce(c.rank))"
    image = "--container-image=registry:5000#mpi4py:1"
    out = lab.run(["srun", *TWO_NODES, "--mpi=pmix", image, "python3", "-c", program]).stdout
    assert sorted(out.splitlines()) == [f"{rank} 4 6" for rank in range(4)]


@pytest.mark.parity("PMIx 3 and 5 in the image work with Slurm's PMIx 4")
@PMIX
@pytest.mark.parametrize("version", ["4", "5"])
def test_pmix_3_and_5_in_the_image(lab: Lab, version: str) -> None:
    """Slurm has PMIx 4 and offers MUNGE, which the images' PMIx 3 and 5 do not support."""
    image = f"--container-image=registry:5000#openmpi:{version}"
    done = lab.run(["srun", *ON_N1, "-n2", "--mpi=pmix", image, "hello"])
    assert "sum 1" in done.stdout.splitlines()
    assert "requested component was not found" not in done.stderr
    stderr = refused(lab, image, "-n2", "--mpi=pmix", "--container-remap-root", "hello")
    assert "the image has no libmunge.so.2 (PMIX_SECURITY_MODE=munge,native)" in stderr
    assert "do not become root in the container" in stderr
    clear(lab)


def test_files_of_crays_pmi_are_in_the_container(lab: Lab) -> None:
    """mpi/cray_shasta is the Slurm plugin for HPE's systems. libpmi finds the plugin's files at their paths."""
    show = 'test -s "$PALS_APINFO" && touch "$PALS_SPOOL_DIR/$PALS_RANKID" && echo $PALS_RANKID'
    out = srun(lab, IMAGE, "-n2", "--mpi=cray_shasta", *sh(show))
    assert sorted(out.splitlines()) == ["0", "1"]
    assert_nothing_left(lab, "n1")


@pytest.fixture
def native(lab: Lab, pmix: None) -> Iterator[None]:
    """Configure Slurm's PMIx so that it does not offer MUNGE."""

    def reconfigure(modes: str) -> None:
        lab.reconfigure()
        show = ["srun", *ON_N1, "--mpi=pmix", *sh("echo $PMIX_SECURITY_MODE")]
        until(lambda: lab.run(show, check=False).stdout == f"{modes}\n", f"PMIx offers {modes}")

    before = Path(lab.root, "etc/slurm/mpi.conf").read_text()
    lab.configure("mpi.conf", f"{before}PMIxEnv=PMIX_MCA_psec=native\n")
    try:
        reconfigure("native")
        yield
    finally:
        lab.configure("mpi.conf", before)
        reconfigure("munge,native")


def test_a_step_without_mpi_within_one_with_it(lab: Lab, native: None) -> None:
    """The inner step inherits PMIx variables, but is no MPI step: Slurm does not set SLURM_MPI_TYPE for it."""
    inner = [
        "srun",
        *ON_N1,
        "-n2",
        "-c1",
        "--mpi=none",
        IMAGE,
        "--container-remap-root",
        *sh("id -u; echo $PMIX_NAMESPACE"),
    ]
    done = lab.run(["srun", *ON_N1, "-n1", "-c2", "--mpi=pmix", *inner])
    lines = done.stdout.splitlines()
    assert sorted(lines)[:2] == ["0", "0"]
    assert all(line.startswith("slurm.pmix.") for line in sorted(lines)[2:])
    assert "PMIx" not in done.stderr


@pytest.mark.parity("PMIx with --container-remap-root and without MUNGE is refused")
def test_root_without_munge_is_refused_with_the_way_out(lab: Lab, native: None) -> None:
    stderr = refused(lab, MPI, "-n2", "--mpi=pmix", "--container-remap-root", "./hello")
    assert "it offers no MUNGE here (PMIX_SECURITY_MODE=native)" in stderr
    assert "use --no-container-remap-root" in stderr
    assert "sum 1" in srun(lab, MPI, "-n2", "--mpi=pmix", "--no-container-remap-root", "./hello")
    # A single task is not refused, because it need not be an MPI program. With more tasks, an MPI program that fails in
    # MPI_Init would make slurmstepd hang.
    alone = lab.run(["srun", *ON_N1, MPI, "-n1", "--mpi=pmix", "--container-remap-root", "./hello"], check=False)
    assert "MPI will not work with --container-remap-root" in alone.stderr
    clear(lab, "rm -f /dev/shm/sm_segment.*")  # leftovers of an Open MPI 5 that gives up
    step = lab.popen(
        ["srun", *ON_N1, MPI, "--container-name=runs", "--container-remap-root", *sh("echo up; read line")]
    )
    expect(step, "up")
    assert "it offers no MUNGE here" in refused(lab, "-n2", "--mpi=pmix", "--container-name=runs:exec", "./hello")
    end(step)
    clear(lab)


@pytest.mark.parity("50-slurm-pytorch", "RANK")
def test_pytorch_variables(lab: Lab) -> None:
    names = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK", "OMP_NUM_THREADS")
    show = sh("echo " + " ".join(f"${name}" for name in names))
    env = {"PYTORCH_VERSION": "2", "OMP_NUM_THREADS": "7"}
    command = ["srun", "-N2", "--ntasks-per-node=2", IMAGE, *show]
    lines = sorted(line.split() for line in lab.run(command, env=env).stdout.splitlines())
    assert {line[0] for line in lines} == {"n1"}
    assert len({line[1] for line in lines}) == 1
    assert {line[2] for line in lines} == {"4"}
    assert sorted(line[3] for line in lines) == ["0", "1", "2", "3"]
    assert sorted(line[4] for line in lines) == ["0", "0", "1", "1"]
    assert {line[5] for line in lines} == {"7"}
    assert srun(lab, "-n1", IMAGE, *show).strip() == ""
    assert lab.run(["srun", "-n1", IMAGE, *sh("echo $WORLD_SIZE")], env={"PYTORCH_VERSION": "2"}).stdout == "1\n"
