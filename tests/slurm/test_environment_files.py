"""--environment: a file's settings reach the step even if nodes cannot see the file, or if it changes later."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.lab import Lab
from tests.slurm.steps import MINIMAL, assert_nothing_left, clear, refused, sbatch, sh, srun
from tests.waiting import until

LOGIN = "/tmp/edf"  # each node has its own /tmp: only the submit host has this file
FILE = """\
base_environment = "base"
workdir = "/usr/${PART}"
mounts = ["/etc/hostname:/mnt/node", "tmpfs:/mnt/job-${SLURM_JOB_ID}"]
[env]
PATH = "${PATH}:/custom"
WHO = "${PART}"
LANG = ""
NCCL_DEBUG = "WARN"
"""
BASE = f"""\
image = "{MINIMAL}"
[env]
NCCL_DEBUG = "INFO"
FROM_BASE = "1"
"""
ENV = {"EDF_PATH": LOGIN, "PART": "lib", "LANG": "C", "NCCL_DEBUG": "job"}
INSIDE = "test -e /etc/lab-release && echo container || echo host"


def write(lab: Lab, name: str, text: str) -> None:
    lab.run(f"mkdir -p {LOGIN}; cat > {LOGIN}/{name}.toml", input=text)


DOCS = (Path(__file__).parents[2] / "docs/reference/environments.md").read_text()


@pytest.fixture(autouse=True)
def files(lab: Lab) -> Iterator[None]:
    write(lab, "base", BASE)
    write(lab, "it", FILE)
    yield
    lab.run(f"rm -rf {LOGIN} out out.* job.sh")
    assert_nothing_left(lab)


def submit(lab: Lab, *words: str, script: str = INSIDE, env: dict[str, str] | None = None) -> str:
    """Submit a batch job and return its id."""
    lab.run("cat > job.sh", input=f"#!/bin/sh\n{script}\n")
    return lab.run(["sbatch", "--parsable", "-w", "n1", "-o", "out", *words, "job.sh"], env=env or ENV).stdout.strip()


@pytest.mark.parity("srun --environment: the file applies to each task on each node")
def test_file_applies_to_each_task_of_each_node(lab: Lab) -> None:
    script = sh('echo at $(pwd) $(cat /mnt/node) $IMAGE_NAME $WHO ${LANG-unset} $NCCL_DEBUG $FROM_BASE $PYXIS_EDF; '
                'ls -d /mnt/job-$SLURM_JOB_ID; touch /new && echo writable; echo $PATH')  # fmt: skip
    out = lab.run(["srun", "-N2", "--ntasks-per-node=2", "--environment=it", *script], env=ENV).stdout.splitlines()
    assert sorted(line for line in out if line.startswith("at ")) == [
        line for node in ("n1", "n2") for line in [f"at /usr/lib {node} minimal lib unset WARN 1"] * 2
    ]
    assert sum(line.startswith("/mnt/job-") for line in out) == out.count("writable") == 4
    assert sum(line.endswith("/bin:/custom") for line in out) == 4


@pytest.mark.parity("srun --environment: a file that only the login node has")
@pytest.mark.security("H10")
@pytest.mark.parametrize("export", ["ALL", "NONE", "FOO=1"])
def test_file_applies_whatever_is_exported(lab: Lab, export: str) -> None:
    assert srun(lab, f"--export={export}", "--environment=it", *sh("pwd; echo $WHO"), env=ENV) == "/usr/lib\nlib\n"


@pytest.mark.parity("srun --environment: options take precedence over the file")
def test_options_override_the_file_and_the_file_variables(lab: Lab) -> None:
    more = ("--container-workdir=/etc", "--container-mounts=/etc/passwd:/mnt/node", "--container-readonly")
    script = sh("pwd; grep -c ^root: /mnt/node; touch /new 2> /dev/null || echo read-only; echo $WHO $NCCL_DEBUG")
    env = {**ENV, "PYXIS_CONTAINER_IMAGE": "registry:5000#none:1", "PYXIS_CONTAINER_WORKDIR": "/bin"}
    out = srun(lab, "--environment=it", *more, "--container-env=WHO=option,NCCL_DEBUG", *script, env=env)
    assert out == "/etc\n1\nread-only\noption job\n"


@pytest.mark.parity("PYXIS_ENVIRONMENT")
def test_file_by_a_variable(lab: Lab) -> None:
    env = {**ENV, "PYXIS_ENVIRONMENT": "it"}
    assert srun(lab, *sh("echo $IMAGE_NAME $WHO"), env=env) == "minimal lib\n"
    submitted = {**env, "EDF_PATH": LOGIN}
    submit(lab, "--wait", "--export=NONE", env=submitted, script=f"{INSIDE}; echo $WHO")
    assert lab.run("cat out").stdout.endswith("container\nlib\n")


@pytest.mark.parity("srun, sbatch, salloc --environment")
@pytest.mark.parametrize("command", ["srun", "sbatch", "salloc"])
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('image = "a"\nvolumes = []\n', f"{LOGIN}/bad.toml:2: unknown key 'volumes'"),
        ('image = "a"\nmounts = ["/a:/b:rodent"]\n', f"{LOGIN}/bad.toml:2: mounts"),
        ('workdir = "/x"\n', "--environment=bad: neither the file nor its bases name an image"),
        ('image = "a"\nworkdir = "${NOTHING}"\n', f"{LOGIN}/bad.toml:2: workdir: the variable NOTHING is not set"),
        ('base_environment = "none"\n', f"{LOGIN}/bad.toml:1: base_environment: there is no none.toml in {LOGIN}"),
        ('image = "a\0b"\n', f"{LOGIN}/bad.toml:1: Illegal character"),
    ],
)
def test_error_in_a_file_is_reported_at_submit(lab: Lab, command: str, text: str, says: str) -> None:
    write(lab, "bad", text)
    lab.run("cat > job.sh", input=f"#!/bin/sh\n{INSIDE}\n")
    before = lab.run(["squeue", "--noheader", "--Format=JobID"]).stdout
    done = lab.run([command, "-w", "n1", "--environment=bad", "./job.sh"], check=False, env=ENV)
    assert done.returncode != 0 and f"pyxis: {says}" in done.stderr, done.stderr
    assert lab.run(["squeue", "--noheader", "--Format=JobID"]).stdout == before


def test_error_that_only_the_node_finds_names_the_line(lab: Lab) -> None:
    write(lab, "bad", f'image = "{MINIMAL}"\nmounts = ["{LOGIN}:/x"]\n')
    stderr = refused(lab, "--environment=bad", "true", env=ENV)
    assert f"{LOGIN}/bad.toml:2: mounts: source path does not exist: {LOGIN}" in stderr
    write(lab, "bad", f'image = "{MINIMAL}"\nmounts = ["/etc/hostname:/x:sqsh"]\n')
    stderr = refused(lab, "--environment=bad", "true", env=ENV)
    assert f"{LOGIN}/bad.toml:2: mounts: /etc/hostname is not a squashfs file" in stderr and "Traceback" not in stderr
    write(lab, "bad", f'image = "{MINIMAL}"\nworkdir = "/nowhere"\n')
    stderr = refused(lab, "--environment=bad", "true", env=ENV)
    assert f"working directory in the container ({LOGIN}/bad.toml:2: workdir): /nowhere: No such file" in stderr
    write(lab, "bad", f'image = "{MINIMAL}"\n\n[env]\nA = "${{NOBODY_HAS_IT}}"\n')
    assert f"{LOGIN}/bad.toml:4: A: the variable NOBODY_HAS_IT is not set" in refused(
        lab, "--environment=bad", "true", env=ENV
    )


@pytest.mark.parity("sbatch --environment: the file's content at submission")
@pytest.mark.security("H10")
def test_batch_job_has_the_file_of_its_submission(lab: Lab) -> None:
    """The file applies as it was at submission, even if the job is requeued, and whatever variables are exported."""
    script = f'{INSIDE}; echo restart ${{SLURM_RESTART_COUNT:-0}} $WHO; test -n "$SLURM_RESTART_COUNT" || sleep 300'
    job = submit(lab, "--requeue", "--open-mode=append", "--hold", "--export=NONE", "--environment=it", script=script)
    write(lab, "it", "image = 'registry:5000#none:1'\n")
    lab.run(["scontrol", "release", job])
    until(lambda: "restart 0 lib\n" in lab.run("cat out || true").stdout, "the job runs")
    lab.run(["scontrol", "requeue", job], user="root")
    until(lambda: "PENDING" in lab.run(["scontrol", "show", "job", job]).stdout, "the job is queued again")
    lab.run(["scontrol", "update", f"JobId={job}", "StartTime=now"], user="root")  # instead of two minutes later
    until(lambda: "restart 1 lib\n" in lab.run("cat out").stdout, "the job runs again", 250)
    until(lambda: "COMPLETED" in lab.run(["scontrol", "show", "job", job]).stdout, "the job ends")
    assert lab.run("grep -c ^container out").stdout == "2\n"


@pytest.mark.parity("sbatch --environment: in #SBATCH lines")
@pytest.mark.security("H10")
def test_lines_of_a_script_and_an_export_file(lab: Lab) -> None:
    lab.run("printf 'FOO=1\\0' > out.file")
    for options in ((), ("--export-file=out.file",)):
        submit(lab, "--wait", *options, script=f"#SBATCH --environment=it\n{INSIDE}; echo $WHO")
        assert lab.run("cat out").stdout.endswith("container\nlib\n")


@pytest.mark.parity("sbatch --environment: if no program has read the #SBATCH line")
@pytest.mark.parametrize("line", ["#SBATCH --environment=it", "#SBATCH -t 5 --environ it"])
def test_lines_that_nobody_has_read(lab: Lab, line: str) -> None:
    """sbatch does not read #SBATCH lines of a wrapped script. The script must not run on the host."""
    sbatch(lab, "-w", "n1", "-o", "out", f"--wrap={line}\n{INSIDE}", check=False, env=ENV)
    out = lab.run("cat out").stdout
    assert "host\n" not in out and "set PYXIS_ENVIRONMENT in the environment of the job" in out


@pytest.mark.parity("salloc --environment")
def test_steps_of_an_allocation(lab: Lab) -> None:
    """Each srun in the allocation reads the file anew, on the host where srun runs."""
    script = f"{INSIDE}; srun sh -c '{INSIDE}; echo $WHO'; sed -i s,PART,NAME, {LOGIN}/it.toml; NAME=share srun pwd"
    out = lab.run(["salloc", "-Q", "-w", "n1", "--environment=it", "sh", "-c", script], env=ENV).stdout
    assert out == "host\ncontainer\nlib\n/usr/share\n"


def test_steps_of_a_batch_script_read_files_of_the_node(lab: Lab) -> None:
    lab.run("mkdir -p edf; cat > edf/own.toml", input=BASE)
    try:
        script = f"{INSIDE}; srun --environment=./edf/own.toml sh -c '{INSIDE}'; srun --environment=it true; echo $?"
        submit(lab, "--wait", script=script)
        out = lab.run("cat out").stdout
        assert out.startswith("host\n") and "container\n" in out and out.endswith("1\n")
        assert f"--environment=it: there is no it.toml in {LOGIN}" in out
    finally:
        lab.run("rm -rf edf")


@pytest.mark.parity("PYXIS_ENVIRONMENT of a job that was submitted without penroot")
@pytest.mark.security("H12")
def test_a_node_reads_the_file_where_nobody_has(lab: Lab) -> None:
    """As in a job from slurmrestd, only the variable PYXIS_ENVIRONMENT requests the file."""
    lab.run("mkdir -p .edf; cat > .edf/own.toml", input=BASE)
    try:
        job = ("--export=HOME,PYXIS_ENVIRONMENT=own",)
        assert srun(lab, *job, *sh(INSIDE)) == "container\n"
        stderr = refused(lab, "--export=HOME,PYXIS_ENVIRONMENT=none", "true")
        assert "there is no none.toml in /home/alice/.edf" in stderr and "the node n1 read the file itself" in stderr
    finally:
        lab.run("rm -rf .edf")


@pytest.mark.parity("srun --environment --container-name")
def test_a_container_that_runs_already(lab: Lab) -> None:
    """A step that joins the container gets the variables of the file, but not its mounts."""
    named = "--container-name=edf"
    first = lab.popen(["srun", "-w", "n1", "--overlap", "--environment=it", named, *sh("echo up; read line")], env=ENV)
    assert first.stdout is not None and first.stdout.readline() == "up\n"
    try:
        show = sh("echo $WHO ${LANG-unset} ${PATH##*:}")
        env = {**ENV, "PART": "share"}
        done = lab.run(["srun", "-w", "n1", "--overlap", "--environment=it", named, *show], env=env)
        assert done.stdout == "share unset /custom\n"
        assert f"ignoring {LOGIN}/it.toml:3: mounts when attaching to a running container" in done.stderr
        # A step that joins without the file does not get its variables.
        out = lab.run(["srun", "-w", "n1", "--overlap", named, *show], env={"WHO": "me"}).stdout
        assert out.startswith("me ") and "/custom" not in out
    finally:
        first.communicate("go\n", timeout=300)
        clear(lab)


@pytest.mark.parity("annotations: for hooks of a site")
def test_missing_hooks_are_reported_once(lab: Lab) -> None:
    write(lab, "hooks", f'{BASE}[annotations.com.hooks]\nnvidia_cuda_mps.enabled = "true"\nssh.enabled = "true"\n')
    done = lab.run(["srun", "-N2", "-n4", "--environment=hooks", "true"], env=ENV)
    lines = [line for line in done.stderr.splitlines() if "com.hooks." in line]
    assert len(lines) == 1 and "com.hooks.nvidia_cuda_mps" in lines[0] and "com.hooks.ssh" in lines[0], done.stderr


@pytest.mark.parity("annotations: com.pyxis.entrypoint_log")
@pytest.mark.parametrize(("value", "rank"), [("", "0"), ("true", "0"), ("false", "none")])
def test_names_of_tasks_for_pytorch(lab: Lab, value: str, rank: str) -> None:
    """In a PyTorch image, tasks get RANK, unless an annotation switches this off."""
    annotation = f'[annotations]\ncom.pyxis.pytorch_remap_vars = "{value}"\n' if value else ""
    write(lab, "torch", f'{BASE}PYTORCH_VERSION = "2.7"\n{annotation}')
    assert srun(lab, "--environment=torch", *sh("echo ${RANK-none}"), env=ENV) == f"{rank}\n"


def test_a_heterogeneous_job(lab: Lab) -> None:
    words = ["srun", "-w", "n1", "--environment=it", "pwd", ":", "-w", "n2", "--environment=it", "pwd"]
    assert lab.run(words, env=ENV).stdout == "/usr/lib\n" * 2


@pytest.mark.parity("the examples of docs/reference/environments.md")
def test_the_examples_of_the_documentation(lab: Lab) -> None:
    """Run the examples with an image, directories and a program that the lab has."""
    here = {"nvcr.io#nvidia/pytorch:24.05-py3": MINIMAL, "/data/sets": "/usr/share"}
    lab.run(["mkdir", "-p", ".edf", "scratch/run"])
    try:
        for name, text in re.findall(r"```toml\n# ~/\.edf/(\w+)\.toml\n(.*?)```", DOCS, re.S):
            for there, place in here.items():
                text = text.replace(there, place)
            lab.run(f"cat > .edf/{name}.toml", input=text)
        lines = re.search(r"```console\n(.*?)```", DOCS, re.S)
        assert lines
        commands = [line.removeprefix("$ ").partition("  #")[0].strip() for line in lines[1].splitlines()]
        env = {"SCRATCH": "/home/alice/scratch"}
        out = [lab.run(re.sub("python .*", "pwd", command), env=env, node="n1").stdout for command in commands]
        assert out[:2] == ["/home/alice/scratch/run\n"] * 2
        assert f'image = "{MINIMAL}"  # /home/alice/.edf/pytorch.toml:2' in out[2]
        assert out[3].splitlines() == [
            "/home/alice/.edf/common.toml is valid, but names no image",
            "/home/alice/.edf/pytorch.toml is valid",
        ]
    finally:
        lab.run("rm -rf .edf scratch")


@pytest.mark.parity("srun --edf")
def test_edf_is_the_same_as_environment(lab: Lab) -> None:
    """--edf is the name of the option in Sarus Suite. A file may use the variable expansions of Sarus Suite."""
    write(lab, "sarus", f'image = "{MINIMAL}"\nworkdir = "/usr/${{PART:0:2}}b"\n[env]\nWHO = "${{PART^^}}"\n')
    assert srun(lab, "--edf=sarus", *sh("pwd; echo $WHO"), env=ENV).split() == ["/usr/lib", "LIB"]
    stderr = refused(lab, "--edf=sarus", "--environment=it", "true", env=ENV)
    assert "--edf and --environment contradict each other" in stderr or "--environment and --edf contradict" in stderr
    assert "--edf=none: there is no none.toml" in refused(lab, "--edf=none", "true", env=ENV)
    job = submit(lab, "--edf=sarus")
    until(lambda: "COMPLETED" in lab.run(["scontrol", "show", "job", job]).stdout, f"job {job} ends")
    assert lab.run("cat out").stdout.endswith("container\n")
