"""A job that asked for a container never runs on the host: each way to request a container, and to lose the request.

The table in docs/explanation/security.md names the tests of each way.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.lab import Lab
from tests.slurm.steps import IMAGE, MINIMAL, assert_nothing_left, plugin_argument, sbatch, srun
from tests.waiting import until

PROLOG = Path(__file__).parents[2] / "examples/site/prolog"
VARIABLE = {"PYXIS_CONTAINER_IMAGE": MINIMAL}
INSIDE = "test -e /etc/lab-release && echo container || echo host"
LINE = IMAGE.replace("#", r"\#")  # in an #SBATCH line, a plain # begins a comment


@pytest.fixture(autouse=True)
def nothing_left(lab: Lab) -> Iterator[None]:
    lab.run("mkdir way")
    yield
    lab.run("rm -rf way")
    assert_nothing_left(lab)


def batch(lab: Lab, *options: str, lines: str = "", script: str = INSIDE, env: dict[str, str] | None = None) -> str:
    """Return the output of a batch script, even if the job fails."""
    lab.run("cat > job.sh", cwd="/home/alice/way", input=f"#!/bin/sh\n{lines}\n{script}\n")
    wrapped = any(option.startswith("--wrap") for option in options)
    words = (*options, *(() if wrapped else ("job.sh",)))
    sbatch(lab, "-w", "n1", "-o", "out", *words, check=False, cwd="/home/alice/way", env=env)
    return lab.run("cat out", cwd="/home/alice/way").stdout


def refused_submission(lab: Lab, *command: str, env: dict[str, str] | None = None) -> str:
    """Run a command that must fail without queuing a job, and return its stderr."""
    before = lab.run(["squeue", "--noheader", "--Format=JobID"]).stdout
    done = lab.run(list(command), check=False, cwd="/home/alice/way", env=env)
    assert done.returncode != 0, done.stdout
    assert lab.run(["squeue", "--noheader", "--Format=JobID"]).stdout == before
    return done.stderr


# ---- requests that could get lost between sbatch and its script


@pytest.mark.security("H7", "H8")
@pytest.mark.parametrize("file", ["FOO=1", "PATH=/usr/bin:/bin\\0HOME=/home/alice"])
def test_an_export_file(lab: Lab, file: str) -> None:
    """For --export-file, sbatch clears its environment: the script gets only the variables of the file."""
    lab.run(f"printf '{file}\\0' > file", cwd="/home/alice/way")
    assert batch(lab, "--export-file=file", IMAGE, "--container-mounts=/usr:/mnt/of it").endswith("container\n")
    flags = (IMAGE, "--container-name=flags", "--container-readonly")
    try:
        script = "touch /here 2>/dev/null && echo writable; env | grep -c PYXIS_CONTAINER; " + INSIDE
        assert batch(lab, "--export-file=file", *flags, script=script).endswith("0\ncontainer\n")
    finally:
        lab.run(["penroot", "remove", "-f", "pyxis_flags"], node="n1")


@pytest.mark.security("H8")
def test_an_export_file_and_variables(lab: Lab) -> None:
    lab.run("printf 'FOO=1\\0' > file", cwd="/home/alice/way")
    script = f"{INSIDE}; echo $PYXIS_CONTAINER_IMAGE; env | grep SLURM_SPANK_PYXIS"
    assert batch(lab, "--export-file=file", script=script, env=VARIABLE).endswith(f"container\n{MINIMAL}\n")


@pytest.mark.security("H9")
@pytest.mark.parametrize("export", ["NONE", "NIL", "FOO=1", "ALL,FOO=1"])
def test_whatever_is_exported(lab: Lab, export: str) -> None:
    assert batch(lab, f"--export={export}", IMAGE).endswith("container\n")
    assert batch(lab, f"--export={export}", env=VARIABLE).endswith("container\n")


@pytest.mark.security("H13")
def test_a_job_that_is_requeued(lab: Lab) -> None:
    script = f'{INSIDE}; echo restarts ${{SLURM_RESTART_COUNT:-0}}; test -n "$SLURM_RESTART_COUNT" || sleep 300'
    lab.run("cat > job.sh", cwd="/home/alice/way", input=f"#!/bin/sh\n{script}\n")
    command = ["sbatch", "--parsable", "-w", "n1", "--requeue", "--open-mode=append", "--export=NONE", "-o", "out"]
    job = lab.run([*command, IMAGE, "job.sh"], cwd="/home/alice/way").stdout.strip()
    show = "grep -c restarts out || true"
    until(lambda: lab.run(show, cwd="/home/alice/way").stdout == "1\n", "the job runs")
    lab.run(["scontrol", "requeue", job], user="root")
    until(lambda: "PENDING" in lab.run(["scontrol", "show", "job", job]).stdout, "the job is queued again")
    lab.run(["scontrol", "update", f"JobId={job}", "StartTime=now"], user="root")  # instead of two minutes later
    until(lambda: lab.run(show, cwd="/home/alice/way").stdout == "2\n", "the job runs again", 250)
    until(lambda: "COMPLETED" in lab.run(["scontrol", "show", "job", job]).stdout, "the job ends")
    out = lab.run("grep -v ^pyxis: out", cwd="/home/alice/way").stdout
    assert [line for line in out.splitlines() if line in ("container", "host")] == ["container", "container"]


@pytest.mark.security("H13")
def test_arrays_and_wrapped_commands(lab: Lab) -> None:
    assert batch(lab, IMAGE, "--export=NONE", f"--wrap={INSIDE}").endswith("container\n")
    lab.run("cat > job.sh", cwd="/home/alice/way", input=f"#!/bin/sh\n{INSIDE}\n")
    array = ("--array=1-3", "--export=NONE", "-o", "out.%a", IMAGE, "job.sh")
    sbatch(lab, "-w", "n1", *array, check=False, cwd="/home/alice/way")
    out = lab.run("cat out.*", cwd="/home/alice/way").stdout
    assert (out.count("container\n"), out.count("host\n")) == (3, 0)


@pytest.mark.security("H14")
def test_options_that_are_switched_off_meanwhile(lab: Lab) -> None:
    """The site sets sbatch_support=0 after the submission: the node refuses the job.

    The node does the same if only nodes have this setting, or if the client is not sbatch.
    """
    lab.run("cat > job.sh", cwd="/home/alice/way", input=f"#!/bin/sh\n{INSIDE}\n")
    held = ["sbatch", "--parsable", "--hold", "-w", "n1", "-o", "out", IMAGE, "job.sh"]
    job = lab.run(held, cwd="/home/alice/way").stdout.strip()
    with plugin_argument(lab, "sbatch_support=0"):
        lab.run(["scontrol", "release", job])
        until(lambda: "FAILED" in lab.run(["scontrol", "show", "job", job]).stdout, "the job has failed")
        out = lab.run("cat out", cwd="/home/alice/way").stdout
    assert "--container-image: container options of sbatch are switched off on this cluster" in out
    assert "host\n" not in out


# ---- #SBATCH lines that sbatch has not read


@pytest.mark.security("H16")
@pytest.mark.parametrize("line", [f"#SBATCH {LINE}", "#SBATCH -t 5 --container-name=x", f'#SBATCH "{LINE}"'])
def test_lines_of_a_wrapped_script(lab: Lab, line: str) -> None:
    """sbatch does not read #SBATCH lines of a wrapped script. slurmrestd does not read them in any script."""
    out = batch(lab, f"--wrap={line}\n{INSIDE}")
    assert "host\n" not in out
    assert "Slurm has not read this line of the script" in out
    name = "NAME" if "name" in line else "IMAGE"
    assert f"set PYXIS_CONTAINER_{name} in the environment of the job" in out


@pytest.mark.security("H16")
@pytest.mark.parametrize(
    "line",
    [
        "#SBATCH --container-mounts=/usr",
        f"##SBATCH {LINE}",
        f"# {LINE}",
        f"#SBATCH -t 5 # {LINE}",
        f": a command\n#SBATCH {LINE}",
        "#SBATCH --comment=container-image",
    ],
)
def test_lines_that_ask_for_no_container(lab: Lab, line: str) -> None:
    assert batch(lab, f"--wrap={line}\n{INSIDE}").endswith("host\n")


@pytest.mark.security("H15")
def test_lines_of_a_script_count_for_sbatch(lab: Lab) -> None:
    assert batch(lab, lines=f"#SBATCH {LINE}").endswith("container\n")
    assert batch(lab, "--export=NONE", lines=f"#SBATCH {LINE}").endswith("container\n")


# ---- components of heterogeneous jobs


@pytest.mark.security("H18")
def test_components_of_a_batch_job(lab: Lab) -> None:
    lab.run("cat > job.sh", cwd="/home/alice/way", input=f"#!/bin/sh\n{INSIDE}\n")
    stderr = refused_submission(lab, "sbatch", "-w", "n1", "-o", "out", ":", "-w", "n2", IMAGE, "job.sh")
    assert "--container-image: the script of a heterogeneous job runs in its first component" in stderr
    lab.run("cat > job.sh", cwd="/home/alice/way", input=f"#!/bin/sh\n#SBATCH hetjob\n#SBATCH {LINE}\n{INSIDE}\n")
    assert "give it before the first ':' or #SBATCH hetjob" in refused_submission(lab, "sbatch", "-o", "out", "job.sh")
    assert batch(lab, IMAGE, ":", "-w", "n2").endswith("container\n")


@pytest.mark.security("H19")
@pytest.mark.parametrize("first", [(IMAGE,), ()])
def test_components_of_a_step(lab: Lab, first: tuple[str, ...]) -> None:
    """Slurm passes the options of all components to each component."""
    then = () if first else (IMAGE,)
    done = lab.run(["srun", "-w", "n1", *first, "sh", "-c", INSIDE, ":", "-w", "n2", *then, "sh", "-c", INSIDE])
    assert done.stdout == "container\ncontainer\n"


# ---- salloc, and steps that are started in other ways


@pytest.mark.security("H21")
def test_an_allocation_without_a_shell(lab: Lab) -> None:
    stderr = refused_submission(lab, "salloc", "--no-shell", "-w", "n1", IMAGE)
    assert "--no-shell: salloc passes container options" in stderr


@pytest.mark.security("H20")
def test_steps_of_an_allocation(lab: Lab) -> None:
    """salloc's command runs on salloc's host, and is not part of the job."""
    script = f"{INSIDE}; srun --export=NONE sh -c '{INSIDE}'; srun --jobid=$SLURM_JOB_ID --overlap sh -c '{INSIDE}'"
    out = lab.run(["salloc", "-Q", "-w", "n1", IMAGE, "sh", "-c", script]).stdout
    assert out == "host\ncontainer\ncontainer\n"


@pytest.mark.security("H20")
def test_an_interactive_step(lab: Lab) -> None:
    """Run the command that salloc runs with LaunchParameters=use_interactive_step."""
    command = f"srun --interactive --preserve-env sh -c '{INSIDE}'"
    assert lab.run(["salloc", "-Q", "-w", "n1", IMAGE, "sh", "-c", command]).stdout == "container\n"


@pytest.mark.security("H22")
def test_a_step_that_another_job_runs(lab: Lab) -> None:
    """srun --jobid from outside the job has its own options, like any other srun."""
    holder = lab.popen(["salloc", "-Q", "-w", "n1", "sh", "-c", "echo $SLURM_JOB_ID; read line"])
    assert holder.stdout is not None
    job = holder.stdout.readline().strip()
    try:
        assert lab.run(["srun", f"--jobid={job}", IMAGE, "sh", "-c", INSIDE]).stdout == "container\n"
        assert lab.run(["srun", f"--jobid={job}", "sh", "-c", INSIDE], env=VARIABLE).stdout == "container\n"
    finally:
        holder.communicate("go\n", timeout=300)


@pytest.mark.security("H25", "H26")
def test_options_that_come_by_the_environment_alone(lab: Lab) -> None:
    """A step of srun --async (Slurm 26.05) gets its options only so: a daemon without srun's options launches it."""
    assert srun(lab, "sh", "-c", INSIDE, env={"_SLURM_SPANK_OPTION_pyxis_container_image": MINIMAL}) == "container\n"


SPAWN = """\
ask() { printf "$1" >&$PMI_FD; read -r line <&$PMI_FD; }
ask 'cmd=init pmi_version=1 pmi_subversion=1\\n'
test -e /etc/lab-release && echo container || echo host
if [ -z "$PMI_SPAWNED" ]; then
    ask 'mcmd=spawn\\nnprocs=1\\nexecname=/bin/sh\\narg1=/home/alice/way/spawn.sh\\nargcnt=1\\ntotspawns=1\\n\
spawnssofar=1\\npreput_num=0\\ninfo_num=0\\nendcmd\\n'
    touch /home/alice/way/answered
else
    # The spawning process gets its answer through this process's srun, and loses the answer if that srun ends at once.
    until test -e /home/alice/way/answered; do sleep 0.1; done
fi
ask 'cmd=finalize\\n'
"""


@pytest.mark.security("H23")
@pytest.mark.parametrize("export", ["ALL", "NONE"])
def test_processes_that_mpi_spawns(lab: Lab, export: str) -> None:
    """A spawn request by PMI-2 makes srun execute another srun with the same environment: spawn.c of mpi/pmi2."""
    lab.run("cat > spawn.sh; rm -f answered", cwd="/home/alice/way", input=SPAWN)
    options = ("--mpi=pmi2", f"--export={export}", IMAGE, "--container-mount-home", "sh", "/home/alice/way/spawn.sh")
    assert srun(lab, *options, env={"SLURM_OVERLAP": "1"}) == "container\ncontainer\n"


# ---- a node that does not load the plugin: only Slurm could notice that, and Slurm does not report it


@pytest.mark.security("H27")
def test_a_node_without_the_plugin_is_found_by_its_prolog(lab: Lab) -> None:
    """If the prolog fails, Slurm drains the node, so no job starts there. pyxis-py check also reports the node."""
    line = f"{lab.root}/etc/slurm/plugstack.conf.d/pyxis.conf"
    run_prolog = ["sh", "-c", PROLOG.read_text()]
    assert lab.run(run_prolog, node="n2", user="root").returncode == 0
    lab.run(["mount", "--bind", "/dev/null", line.removeprefix(lab.root)], node="n2", user="root")
    try:
        assert lab.run(["srun", "-w", "n2", IMAGE, "sh", "-c", INSIDE]).stdout == "host\n"
        done = lab.run(run_prolog, node="n2", user="root", check=False)
        assert done.returncode == 1
        assert done.stderr == "plugstack.conf on n2 does not load spank_pyxis.so: run pyxis-py check\n"
    finally:
        lab.run(["umount", line.removeprefix(lab.root)], node="n2", user="root")
