"""Hooks of a site in steps, on one node and on two: which hooks ran, and their messages on failure."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import bashhooks
from tests.slurm.lab import Lab
from tests.slurm.steps import IMAGE, ON_N1, PMIX, assert_nothing_left, clear, end, expect, refused, sh, srun

MPI = "--container-image=registry:5000#mpi:1"


@pytest.fixture
def site(lab: Lab) -> Iterator[Path]:
    """Yield the directory hooks.d, which all nodes share."""
    directory = Path(lab.root, "etc/enroot/hooks.d")
    directory.mkdir(parents=True)
    yield directory
    shutil.rmtree(directory)
    assert_nothing_left(lab)


@pytest.mark.parity("hooks: /proc/self/cgroup shows the caller's cgroup")
@pytest.mark.parametrize("nodes", [1, 2])
def test_all_of_enroots_and_of_pyxiss_run(lab: Lab, site: Path, nodes: int) -> None:
    """Bash hooks that are modelled on those of enroot and pyxis all run, once on each node."""
    bashhooks.write(site, bashhooks.LIKE_ENROOTS | bashhooks.LIKE_PYXIS)
    names = " ".join(sorted([*bashhooks.LIKE_ENROOTS, *bashhooks.LIKE_PYXIS]))
    script = (
        'echo "$RAN, leader $LEADER"; grep -c "^guest:" /etc/passwd; '
        'case $CGROUP in */step_*) ;; *) echo "$CGROUP"; esac'
    )
    out = srun(lab, f"-N{nodes}", "--ntasks-per-node=1", IMAGE, *sh(script)).splitlines()
    assert sorted(out) == ["1"] * nodes + [f"{names}, leader n1"] * nodes


def test_path_is_that_of_slurmd(lab: Lab, site: Path) -> None:
    """Hooks get slurmd's PATH, which has env(1), coreutils and scontrol, and never the PATH that the user controls."""
    bashhooks.write(site, {"50-path": 'printf "SEEN=%s\\n" "${PATH}" >> "${ENROOT_ENVIRON}"\n'})
    out = srun(lab, IMAGE, *sh("echo $SEEN"), env={"PATH": "/home/alice/bin:/usr/bin:/bin"}).strip().split(":")
    assert out[0].endswith("/libexec")
    assert {"/usr/bin", "/bin", "/usr/sbin", "/sbin"} <= set(out)
    assert "/home/alice/bin" not in out


def test_output_of_a_hook_is_shown(lab: Lab, site: Path) -> None:
    bashhooks.write(site, {"50-bad": 'echo "the disk is missing" >&2; common::err "cannot go on"\n'})
    stderr = refused(lab, "-n2", IMAGE, "true")
    lines = [line.partition("pyxis: ")[2] for line in stderr.splitlines() if "pyxis: n1: " in line]
    assert lines[:2] == ["n1: the disk is missing", "n1: cannot go on"]
    assert "50-bad.sh failed with status 1" in lines[2]
    assert len(lines) < 6


def test_warnings_of_a_hook_are_shown(lab: Lab, site: Path) -> None:
    bashhooks.write(site, {"50-warns": 'common::log WARN "an old driver"; common::log INFO "went well"\n'})
    done = lab.run(["srun", *ON_N1, IMAGE, "true"])
    assert "an old driver" in done.stderr
    assert "went well" not in done.stderr


@PMIX
@pytest.mark.parametrize("tasks", [("-N1", "-n2"), ("-N2", "--ntasks-per-node=2")])
def test_pmi_of_a_hook_and_of_penroot(lab: Lab, site: Path, tasks: tuple[str, str]) -> None:
    """A hook like pyxis's sets up PMIx too. PMIx is still mounted once, and each task has its own variables.

    PMIx uses no credential type that the image lacks.
    """
    bashhooks.write(site, {"50-slurm-pmi": bashhooks.LIKE_PYXIS["50-slurm-pmi"]})
    script = (
        'hello; echo "mounted $(grep -c " ${PMIX_SERVER_TMPDIR%/} " /proc/self/mountinfo)"; '
        'test "${PMIX_MCA_psec-$PMIX_SECURITY_MODE}" = "$PMIX_SECURITY_MODE" && echo fits; '
        'echo "task $SLURM_PROCID $PMIX_RANK $SLURM_NODEID"'
    )
    done = lab.run(["srun", *ON_N1, *tasks, "--mpi=pmix", MPI, *sh(script)])
    out = done.stdout.splitlines()
    count = 2 if "-n2" in tasks else 4
    assert "PMIX ERROR" not in done.stderr
    assert f"sum {sum(range(count))}" in out
    assert out.count("mounted 1") == count
    assert out.count("fits") == count
    per_node = 2
    assert sorted(line for line in out if line.startswith("task")) == [
        f"task {n} {n} {n // per_node}" for n in range(count)
    ]


@PMIX
def test_credential_unknown_to_the_image_is_in_no_variable(lab: Lab, site: Path) -> None:
    bashhooks.write(site, {"50-slurm-pmi": bashhooks.LIKE_PYXIS["50-slurm-pmi"]})
    show = sh("echo $PMIX_SECURITY_MODE $PMIX_MCA_psec")
    outside = srun(lab, "--mpi=pmix", *show)
    assert "munge" in outside
    assert srun(lab, "--mpi=pmix", IMAGE, *show) == "native native\n"
    rank = ("penroot", "start", "docker://registry:5000#minimal:1")
    assert srun(lab, "--mpi=pmix", *rank, *show) == "native native\n"
    mounted = sh('grep -c " ${PMIX_SERVER_TMPDIR%/} " /proc/self/mountinfo')
    assert srun(lab, "--mpi=pmix", *rank, *mounted) == "1\n"


def test_pmi2_of_a_hook_and_of_penroot(lab: Lab, site: Path) -> None:
    """A hook like pyxis's sets up PMI, too. Each task still has its own rank and its socket."""
    bashhooks.write(site, {"50-slurm-pmi": bashhooks.LIKE_PYXIS["50-slurm-pmi"]})
    out = srun(lab, "-n2", "--mpi=pmi2", IMAGE, *sh("echo $PMI_RANK; readlink /proc/self/fd/$PMI_FD"))
    assert out.count("socket:") == 2
    assert {"0", "1"} <= set(out.split())


def test_second_step_in_a_container_has_own_variables(lab: Lab, site: Path) -> None:
    """The second step does not get the variables that a hook has copied from the first step."""
    bashhooks.write(site, {"50-slurm-pmi": bashhooks.LIKE_PYXIS["50-slurm-pmi"]})
    step = lab.popen(["srun", *ON_N1, IMAGE, "--container-name=own", *sh("echo up; read line; echo $SLURM_JOB_ID")])
    expect(step, "up")
    second = srun(lab, "--container-name=own:exec", *sh("echo $SLURM_JOB_ID"))
    out, _ = end(step)
    assert out.strip().isdecimal()
    assert second.strip().isdecimal()
    assert second != out
    clear(lab)


FLOOD = 20_000_000  # lines: more than a step of 100 MB can keep in memory


def test_output_of_bash_hook_is_bounded(lab: Lab, site: Path) -> None:
    flood = f"echo first words >&2; seq {FLOOD} >&2; echo last words >&2; exit {{}}\n"
    bashhooks.write(site, {"50-flood": flood.format(1)})
    stderr = refused(lab, *ON_N1, "--mem=100", IMAGE, "true")
    assert "first words" in stderr and "last words" in stderr and "failed with status 1" in stderr
    assert "bytes of output are omitted here" in stderr and len(stderr) < 1_000_000
    bashhooks.write(site, {"50-flood": flood.format(0)})
    assert srun(lab, *ON_N1, "--mem=100", IMAGE, "echo", "up") == "up\n"


def python_hook(site: Path, text: str) -> None:
    (site / "50-hook.py").write_text(f"import os, sys, time\ndef run(context):\n{text}")


def test_output_of_python_hook_is_bounded(lab: Lab, site: Path) -> None:
    flood = "    for _ in range(20000): sys.stderr.write('x' * 9999 + chr(10))\n"
    flood += "    sys.stderr.write('last words' + chr(10))\n"
    python_hook(site, flood)
    assert srun(lab, *ON_N1, "--mem=100", IMAGE, "echo", "up") == "up\n"
    python_hook(site, f"{flood}    raise ValueError('broken')\n")
    stderr = refused(lab, *ON_N1, "--mem=100", IMAGE, "true")
    assert "last words" in stderr and "ValueError: broken" in stderr and len(stderr) < 1_000_000


def test_python_hook_that_ends_the_process_is_named(lab: Lab, site: Path) -> None:
    python_hook(site, "    os._exit(0)\n")
    stderr = refused(lab, *ON_N1, IMAGE, "true")
    assert "50-hook.py:3 failed" in stderr and "return from the hook instead" in stderr


def test_python_hook_that_leaves_a_thread_is_named(lab: Lab, site: Path) -> None:
    python_hook(site, "    import _thread\n    _thread.start_new_thread(time.sleep, (600,))\n")
    stderr = refused(lab, *ON_N1, IMAGE, "true")
    assert "leaves a thread running" in stderr and "join the thread before run() returns" in stderr


# One daemon closes its stderr, the other keeps writing to it.
DAEMONS = {
    "python": "    if os.fork() == 0:\n        os.close(2); time.sleep(600); os._exit(0)\n",
    "python that writes": "    if os.fork() == 0:\n        while True: os.write(2, b'x' * 50000); time.sleep(0.01)\n",
}


@pytest.mark.security("C9")
@pytest.mark.parametrize("daemon", [*DAEMONS, "bash"])
def test_daemon_of_a_hook_is_no_other_step(lab: Lab, site: Path, daemon: str) -> None:
    """The daemon does not keep the container's lock, so the step ends silently, and the container is removed."""
    if daemon == "bash":
        bashhooks.write(site, {"50-hook": "(while :; do echo spam; sleep 0.01; done) >&2 &\n"})
    else:
        python_hook(site, DAEMONS[daemon])
    done = lab.run(["srun", *ON_N1, "--container-writable", IMAGE, *sh("sleep 1; echo up")])
    assert done.stdout == "up\n"
    assert "another step" not in done.stderr and "left to the end of the job" not in done.stderr
