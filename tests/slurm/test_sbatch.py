"""Containers of batch jobs: options of sbatch and #SBATCH, steps inside, arrays, heterogeneous jobs, importers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.slurm.lab import Lab
from tests.slurm.steps import IMAGE, MINIMAL, ON_N1, assert_nothing_left, clear, end, expect, sbatch, sh, srun
from tests.waiting import until


@pytest.fixture(autouse=True)
def nothing_left(lab: Lab) -> Iterator[None]:
    yield
    lab.run("rm -rf job.sh out.* log")
    assert_nothing_left(lab)


def batch(lab: Lab, body: str, *options: str) -> str:
    """Run a batch job, which must succeed, and return its output."""
    lab.run("cat > job.sh", input=f"#!/bin/sh\n{body}\n")
    done = sbatch(lab, "-w", "n1", "-o", "out.%j", *options, "job.sh", check=False)
    out = lab.run("cat out.*; rm out.*").stdout
    assert done.returncode == 0, out + done.stderr
    return out


@pytest.fixture
def plugin(lab: Lab) -> Iterator[str]:
    """Return the line that loads the plugin, and restore it after the test."""
    with open(f"{lab.root}/etc/slurm/plugstack.conf.d/pyxis.conf") as file:
        line = file.read().strip()
    yield line
    lab.install_plugin(line)


@pytest.mark.parity(
    "the batch script is readable in the container", "sbatch: the script is mounted read-only at its own path"
)
def test_the_script_runs_in_the_container(lab: Lab) -> None:
    assert "minimal /srv/work" in batch(lab, 'echo "$IMAGE_NAME $(pwd)"', IMAGE)


@pytest.mark.parity("sbatch: the script is mounted read-only at its own path")
def test_a_script_of_a_job_with_several_tasks(lab: Lab) -> None:
    # Slurm tells the plugin how many tasks the job has, but not that the batch script is a single process.
    out = batch(lab, "echo $IMAGE_NAME", IMAGE, "-w", "n1,n2", "-n2")
    assert out.splitlines()[-1] == "minimal"
    assert "srun" not in out


@pytest.mark.parity("sbatch: #SBATCH")
def test_options_in_the_script_itself(lab: Lab) -> None:
    # In an #SBATCH line, a plain # begins a comment.
    escaped = MINIMAL.replace("#", r"\#")
    assert "minimal" in batch(lab, f"#SBATCH --container-image={escaped}\necho $IMAGE_NAME")


@pytest.mark.parity("sbatch --export=NONE and --export=NAME keep the container options of the job (not in pyxis)")
@pytest.mark.parametrize("export", ["NONE", "FOO"])
def test_options_reach_the_script_whatever_is_exported(lab: Lab, export: str) -> None:
    mount = "--container-mounts=./job.sh:/job"
    out = batch(lab, "echo $IMAGE_NAME $(cat /job); env", f"--export={export}", IMAGE, mount)
    assert "minimal #!/bin/sh" in out
    # The steps of the script use the tag's digest at submit.
    assert [line.partition("=")[0] for line in out.splitlines() if "PYXIS" in line] == ["PYXIS_PINNED"]


@pytest.mark.parity("sbatch: each step in a batch script has a separate container")
def test_steps_inside_have_containers_of_their_own(lab: Lab) -> None:
    out = batch(
        lab, f"echo outer=$IMAGE_NAME\nsrun {IMAGE} sh -c 'echo inner=$IMAGE_NAME'\nsrun sh -c 'echo $IMAGE_NAME'"
    )
    assert "outer=\n" in out
    assert "inner=minimal\n" in out


@pytest.mark.parity("job arrays: each element has a container")
def test_arrays(lab: Lab) -> None:
    assert batch(lab, "echo $IMAGE_NAME $SLURM_ARRAY_TASK_ID", IMAGE, "--array=1-3").count("minimal ") == 3


@pytest.mark.parity("heterogeneous jobs: each component may have a container, also with --het-group")
def test_heterogeneous_jobs(lab: Lab) -> None:
    done = lab.run(["srun", "-w", "n1", IMAGE, "sh", "-c", "echo $IMAGE_NAME", ":", "-w", "n2", "hostname"])
    assert sorted(done.stdout.split()) == ["minimal", "n2"]


@pytest.mark.parity("sbatch_support")
def test_options_of_sbatch_can_be_switched_off(lab: Lab, plugin: str) -> None:
    lab.install_plugin(f"{plugin} sbatch_support=0")
    lab.run("cat > job.sh", input="#!/bin/sh\ntrue\n")
    done = lab.run(["sbatch", IMAGE, "job.sh"], check=False)
    assert done.returncode != 0
    assert "switched off" in done.stderr
    assert "minimal" in srun(lab, IMAGE, "sh", "-c", "echo $IMAGE_NAME")


@pytest.mark.parity("image.sqsh without ./ is a file if it exists", "--container-image: accepts a bare file name")
def test_a_bare_file_name_that_exists_is_that_file(lab: Lab) -> None:
    srun(lab, IMAGE, "--container-save=bare.sqsh", "true")
    try:
        done = lab.run(["srun", "-w", "n1", "--container-image=bare.sqsh", "sh", "-c", "echo $IMAGE_NAME"])
        assert done.stdout == "minimal\n"
        assert "using the file" in done.stderr
    finally:
        lab.run(["rm", "bare.sqsh"])


IMPORTER = """#!/bin/sh
echo "$1 $2 $PYXIS_RUNTIME_PATH $SLURM_JOB_UID" >> /home/alice/log
case $1 in
get) [ "$2" = docker://registry:5000#minimal:1 ] || { echo "not mine: $2" >&2; exit 1; }; echo /home/alice/given.sqsh ;;
esac
"""


@pytest.mark.parity("PYXIS_RUNTIME_PATH", "importer")
def test_an_importer_gives_the_image(lab: Lab, plugin: str) -> None:
    """importer= in plugstack.conf names a program of the site that provides images."""
    srun(lab, IMAGE, "--container-save=given.sqsh", "true")
    lab.run("cat > importer; chmod 755 importer", input=IMPORTER)
    lab.install_plugin(f"{plugin} importer=/home/alice/importer")
    try:
        assert srun(lab, IMAGE, "sh", "-c", "echo $IMAGE_NAME") == "minimal\n"
        log = lab.run("cat log; rm log").stdout.splitlines()
        assert log[0] == "get docker://registry:5000#minimal:1 /run/pyxis 2001"
        assert {line.split()[0] for line in log[1:]} == {"release"}
        done = lab.run(["srun", "-w", "n1", "--container-image=registry:5000#other:1", "true"], check=False)
        assert done.returncode != 0
        assert "not mine" in done.stderr
        assert "release" in lab.run("cat log").stdout
    finally:
        lab.run("rm -f given.sqsh importer")


NAME = "--container-name=joined"


@pytest.mark.parity("sbatch: the script may run in a container that is already running")
@pytest.mark.parametrize("user", ["alice", "root"])
@pytest.mark.parametrize("options", [(), ("--container-writable",), ("--container-remap-root",)])
def test_batch_script_joins_a_running_container(lab: Lab, options: tuple[str, ...], user: str) -> None:
    """slurmstepd executes the script by its path, which does not exist in another job's container."""
    show = "echo up; read line; grep -c slurm_script /proc/self/mountinfo"
    step = lab.popen(["srun", *ON_N1, IMAGE, NAME, *options, *sh(show)], user=user)
    try:
        expect(step, "up")
        lab.run("cat > job.sh", input='#!/bin/sh\necho "$IMAGE_NAME $(readlink /proc/self/ns/mnt)"\n', user=user)
        job = ["-n1", "-w", "n1", "-o", "out.%a", "--array=1-3", NAME, "job.sh"]
        done = sbatch(lab, *job, check=False, user=user)
        out = lab.run("cat out.*; rm -f out.* job.sh", user=user).stdout
        assert done.returncode == 0, out + done.stderr
        assert [line.split()[0] for line in out.splitlines()] == ["minimal"] * 3, out
        assert len(set(out.splitlines())) == 1, out
        rest, err = end(step)
        assert rest == "0\n", err  # no script of an ended job stays mounted
    finally:
        step.kill()
        lab.run("rm -f out.* job.sh; penroot remove -f pyxis_joined", node="n1", user=user, check=False)
    clear(lab)


@pytest.mark.parity("sbatch: the script may run in a container that is already running")
def test_two_batch_jobs_with_one_new_name_both_run(lab: Lab) -> None:
    """The job that made the container ends first. The other job keeps using the container."""
    body = "echo begun $1; while ! test -e ~/go$1; do sleep 0.1; done; echo ended $1"
    lab.run("cat > job.sh", input=f"#!/bin/sh\n{body}\n")
    options = ("--parsable", "-n1", "-w", "n1", IMAGE, NAME, "--container-mount-home")
    jobs = [lab.run(["sbatch", *options, "-o", f"out.{number}", "job.sh", number]).stdout.strip() for number in "12"]

    def says(number: str, word: str) -> bool:
        return f"{word} {number}\n" in lab.run(f"cat out.{number}", check=False).stdout

    for number in "12":
        until(lambda number=number: says(number, "begun"), "both jobs run", 60)
    for number in "12":
        lab.run(f"touch go{number}")
        until(lambda number=number: says(number, "ended"), f"the end of job {jobs[int(number) - 1]}", 60)
    lab.run("rm go1 go2")
    clear(lab)
