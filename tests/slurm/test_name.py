"""Named containers: attaching to a running container, sharing it, and its removal with the job."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.kernel.registry import Server
from tests.slurm.lab import Lab
from tests.slurm.steps import (
    IMAGE,
    ON_N1,
    clear,
    end,
    expect,
    kill_helper,
    next_line,
    plugin_argument,
    refused,
    sbatch,
    sh,
    srun,
)
from tests.slurm.test_pins import Tag
from tests.slurm.test_pull import front
from tests.waiting import until

NAME = "--container-name=one"


@pytest.fixture(autouse=True)
def nothing_left(lab: Lab) -> Iterator[None]:
    yield
    clear(lab)


@contextmanager
def running(lab: Lab, *options: str, before: str = "true", after: str = "true") -> Iterator[subprocess.Popen[str]]:
    """Run a step until the block ends. It runs the shell command ``before`` first, and ``after`` at its end."""
    script = f"{before}; echo up; read line; {after}"
    step = lab.popen(["srun", *ON_N1, *options, *sh(script)])
    expect(step, "up")
    try:
        yield step
    finally:
        end(step)
    assert step.returncode == 0


@pytest.mark.parity("--container-name: a step joins the container if it is running")
def test_attaching_joins_the_namespaces(lab: Lab) -> None:
    mount = "mkdir /m && mount -t tmpfs none /m && touch /m/x"
    with running(lab, IMAGE, NAME, "--container-remap-root", "--container-writable", before=mount):
        assert srun(lab, NAME, "ls", "/m") == "x\n"
        assert srun(lab, NAME + ":exec", "sh", "-c", "pwd; echo $IMAGE_NAME") == "/srv/work\nminimal\n"
        # With :no_exec, the step has a separate container on the same files.
        assert srun(lab, NAME + ":no_exec", "ls", "/m") == ""


@pytest.mark.parity("a step that joined a container continues after the step that made the container ends")
def test_attached_step_outlives_the_first(lab: Lab) -> None:
    with running(lab, NAME, IMAGE, "--container-writable", before="echo 1 > /kept"):
        second = lab.popen(["srun", *ON_N1, NAME, *sh("echo up; read line; cat /kept")])
        expect(second, "up")
    out, _ = end(second)
    assert (second.returncode, out) == (0, "1\n")


@pytest.mark.parity("mounts are ignored, with a message", "mounts are ignored if a step joins a running container")
def test_mounts_of_an_attached_step_are_ignored_and_said_so(lab: Lab) -> None:
    with running(lab, IMAGE, NAME):
        done = lab.run(["srun", *ON_N1, NAME, "--container-mounts=/usr:/mine", "ls", "/mine"], check=False)
        assert "ignoring --container-mounts when attaching" in done.stderr
        assert done.returncode != 0


def test_user_in_a_running_container_is_fixed_at_its_start(lab: Lab) -> None:
    with running(lab, IMAGE, NAME):
        done = lab.run(["srun", *ON_N1, NAME, "--container-remap-root", "id", "-un"])
        assert done.stdout == "alice\n"
        assert "ignoring --container-remap-root when attaching" in done.stderr
        assert "ignoring" not in lab.run(["srun", *ON_N1, NAME, "--no-container-remap-root", "true"]).stderr


def test_container_stays_usable_without_its_image(lab: Lab) -> None:
    gone = "--container-image=registry:5000#minimal:gone"
    srun(lab, IMAGE, NAME, "true")
    assert "error" not in lab.run(["srun", *ON_N1, gone, NAME, "true"]).stderr
    assert "minimal has no tag gone" in refused(lab, gone, "--container-name=two", "true")


@pytest.mark.parity("--container-name=JOB.STEP joins the unnamed container of that step", "names: pyxis_NAME")
def test_unnamed_container_has_the_name_of_its_step(lab: Lab) -> None:
    # The first step prints JOB.STEP, the name of its container.
    step = lab.popen(["srun", *ON_N1, IMAGE, *sh("echo $SLURM_JOB_ID.$SLURM_STEP_ID; read line")])
    name = next_line(step).strip()
    namespace = srun(lab, f"--container-name={name}", "readlink", "/proc/self/ns/mnt")
    assert namespace != lab.run(["readlink", "/proc/self/ns/mnt"], node="n1").stdout
    end(step)


@pytest.mark.parity(
    "--container-name: without it, `penroot list -f` and `penroot exec` know the container as pyxis_JOB.STEP"
)
@pytest.mark.parametrize("options", [(), ("--container-writable",), ("--container-remap-root",)])
def test_unnamed_step_is_listed_by_its_number(lab: Lab, options: tuple[str, ...]) -> None:
    with step_of(lab, IMAGE, *options) as step:
        fancy = [line.split() for line in lab.run(["penroot", "list", "-f"], node="n1").stdout.splitlines()]
        assert [line[0] for line in fancy if line[2:3] == ["sh"]] == [f"pyxis_{step}"]
        assert lab.run(["penroot", "exec", f"pyxis_{step}", "printenv", "IMAGE_NAME"], node="n1").stdout == "minimal\n"


def test_exec_enters_a_named_container_by_its_step(lab: Lab) -> None:
    with step_of(lab, IMAGE, NAME) as step:
        for target in (step, step.partition(".")[0]):
            assert lab.run(["penroot", "exec", target, "printenv", "IMAGE_NAME"], node="n1").stdout == "minimal\n"
    lab.run(["penroot", "remove", "-f", "pyxis_one"], node="n1")


def test_exec_enters_the_container_of_a_batch_script(lab: Lab) -> None:
    script = "#!/bin/sh\ncd /home/alice\nenv > up\nuntil [ -e over ]; do sleep 0.05; done\n"
    job = lab.run(["sbatch", "--parsable", "-w", "n1", IMAGE, "--container-mount-home"],
                  input=script).stdout.strip()  # fmt: skip
    try:
        until(lambda: lab.run("test -s up", check=False).returncode == 0, "the script runs")
        out = lab.run(["penroot", "exec", f"{job}.batch", "printenv", "IMAGE_NAME"], node="n1").stdout
        assert out == "minimal\n"
    finally:
        lab.run("touch over")
        until(lambda: not lab.run(["squeue", "-h", "-j", job], check=False).stdout, "the job ends")
        lab.run("rm -f over up slurm-*.out")


@pytest.mark.parity("an unnamed container that other steps have joined is removed")
def test_unnamed_container_ends_with_the_last_step_in_it(lab: Lab) -> None:
    script = sh("echo $SLURM_JOB_ID.$SLURM_STEP_ID; echo 1 > /kept; read line")
    first = lab.popen(["srun", *ON_N1, IMAGE, "--container-writable", *script])
    name = f"--container-name={next_line(first).strip()}"
    second = lab.popen(["srun", *ON_N1, name, *sh("echo up; read line; cat /kept; echo 2 > /kept; cat /kept")])
    expect(second, "up")
    end(first)
    # The container must also survive the epilog of the first job.
    until(lambda: len(lab.run(["squeue", "-h", "-u", "alice"]).stdout.splitlines()) == 1, "the first job is gone")
    assert srun(lab, name + ":exec", "cat", "/kept") == "1\n"
    out, _ = end(second)
    assert (second.returncode, out) == (0, "1\n2\n")
    assert lab.run(["penroot", "list"], node="n1").stdout == ""


@pytest.mark.parity("joining a container whose squashfuse belongs to another step")
def test_attaching_to_what_ends_with_another_step_is_said(lab: Lab) -> None:
    srun(lab, IMAGE, "--container-save=name.sqsh", "true")
    try:
        script = sh("echo $SLURM_JOB_ID.$SLURM_STEP_ID; read line")
        first = lab.popen(["srun", *ON_N1, "--container-image=./name.sqsh", *script])
        name = next_line(first).strip()
        done = lab.run(["srun", *ON_N1, f"--container-name={name}", "true"])
        assert f"come from a process of step {name} and disappear when that step ends" in done.stderr
        end(first)
    finally:
        lab.run(["rm", "-f", "name.sqsh"])


@contextmanager
def step_of(lab: Lab, *options: str, before: str = "true") -> Iterator[str]:
    """Run a step that waits until the block ends. Yield JOB.STEP, which is also the name of an unnamed container."""
    step = lab.popen(["srun", *ON_N1, *options, *sh(f"{before}; echo $SLURM_JOB_ID.$SLURM_STEP_ID; read line")])
    try:
        yield next_line(step).strip()
    finally:
        end(step)
    assert step.returncode == 0


@contextmanager
def suspended(lab: Lab, step: str) -> Iterator[str]:
    """Suspend the job of a step until the block ends. Yield the job's id."""
    job = step.partition(".")[0]
    lab.run(["scontrol", "suspend", job], user="root")
    states = f"cat $(find /sys/fs/cgroup -path '*job_{job}/*' \\( -name freezer.state -o -name cgroup.events \\))"
    until(lambda: re.search("FROZEN|frozen 1", lab.run(states, node="n1").stdout), "its processes are stopped")
    try:
        yield job
    finally:
        lab.run(["scontrol", "resume", job], user="root")


@pytest.mark.parity("joining a container of a suspended job fails at once")
def test_a_container_of_a_job_that_is_suspended(lab: Lab) -> None:
    """A step fails at once. It once waited for the suspended job's helper, and blocked all steps for half a minute."""
    with step_of(lab, IMAGE, NAME) as first, suspended(lab, first) as job:
        error = refused(lab, NAME, "true")
        assert (
            f"step {first} runs the container one, and its helper process does nothing: its job is suspended" in error
        )
        assert f"resume a suspended job: scontrol resume {job};" in error


@pytest.mark.parity("joining a container of a suspended job fails at once")
def test_a_container_whose_files_a_suspended_job_has(lab: Lab) -> None:
    """Another step in the container could admit ours, but the suspended job serves the files of the container."""
    srun(lab, IMAGE, "--container-save=name.sqsh", "true")
    try:
        with step_of(lab, "--container-image=./name.sqsh") as first, step_of(lab, f"--container-name={first}"):
            with suspended(lab, first):
                stderr = refused(lab, f"--container-name={first}", "true")
            assert f"step {first} runs the container {first}, and its helper process does nothing: its job is" in stderr
    finally:
        lab.run(["rm", "-f", "name.sqsh"])


@pytest.mark.parity("joining a container of a suspended job fails at once")
def test_a_suspended_job_that_has_the_lock_of_a_name(lab: Lab) -> None:
    """A step that uses the name fails with a message. Such steps once waited for the lock silently."""
    directory = "/run/pyxis/2001/running/pyxis_one"
    lock = f"mkdir -p {directory}; exec flock {directory} sh -c 'echo $SLURM_JOB_ID.$SLURM_STEP_ID; read line'"
    with step_of(lab, before=lock) as first, suspended(lab, first):
        stderr = refused(lab, IMAGE, NAME, "true")
    assert f"suspended) of job {first.partition('.')[0]} makes no progress making or removing" in stderr


@pytest.mark.parity(
    "--container-name :create refuses a container that exists, and :exec one that does not run",
    "--container-name=NAME:create fails if the container exists",
)
def test_modes(lab: Lab) -> None:
    """:create refuses a container that exists, and :exec refuses a container that is not running."""
    assert "is not running" in refused(lab, IMAGE, NAME + ":exec", "true")
    with running(lab, IMAGE, NAME):
        assert "running" in refused(lab, IMAGE, NAME + ":create", "true")
    assert "exists" in refused(lab, IMAGE, NAME + ":create", "true")
    assert "is not running" in refused(lab, NAME + ":exec", "true")


def test_prefixed_name_is_reported(lab: Lab) -> None:
    srun(lab, IMAGE, NAME, "true")
    assert "the container pyxis_one, use --container-name=one" in refused(lab, "--container-name=pyxis_one", "true")
    lab.run(["penroot", "create", "--name", "own", "docker://registry:5000#minimal:1"], node="n1")
    assert "penroot create --name pyxis_own" in refused(lab, "--container-name=own", "true")
    assert "add --container-image" in refused(lab, "--container-name=nobody", "true")


def test_two_writable_containers_on_one_name_see_one_file_system(lab: Lab) -> None:
    with running(lab, IMAGE, NAME, "--container-writable", before="ls /later 2>/dev/null", after="cat /later"):
        srun(lab, NAME + ":no_exec", "--container-writable", *sh("echo seen > /later"))
    assert srun(lab, NAME, "cat", "/later") == "seen\n"


def test_removed_container_is_not_the_new_one_of_its_name(lab: Lab) -> None:
    """Files of a running container are deleted by hand. Later steps of that name share a new container."""
    with running(lab, IMAGE, NAME, "--container-writable"):
        done = lab.run(["penroot", "remove", "--force", "pyxis_one"], node="n1", check=False)
        assert done.returncode == 1 and "runs in the container pyxis_one" in done.stderr
        data = "/var/tmp/enroot-data-2001"
        lab.run(f"chmod -R u+rwX {data}/pyxis_one; rm -rf {data}/pyxis_one {data}/.pyxis_one.node", node="n1")
        with running(lab, IMAGE, NAME, "--container-writable", before="echo new > /made"):
            assert srun(lab, NAME, "cat", "/made") == "new\n"


@pytest.mark.parametrize("name", ["a\\b", "a b", "a,b", "..", "-x", "*$HOME'", "é"])
def test_names_of_unusual_characters(lab: Lab, name: str) -> None:
    srun(lab, IMAGE, f"--container-name={name}", "--container-writable", *sh("echo 1 > /kept"))
    assert srun(lab, f"--container-name={name}", "cat", "/kept") == "1\n"
    lab.run(["penroot", "remove", "-f", "--", f"pyxis_{name}"], node="n1")


@pytest.mark.parity(
    "--container-name :create refuses a container that exists, and :exec one that does not run",
    "--container-name=NAME:no_exec mounts the files again instead of joining",
)
def test_fifty_concurrent_reuses(lab: Lab) -> None:
    names = [f"--container-name=many{i}" for i in range(5)]
    for name in names:
        srun(lab, IMAGE, name, "--container-writable", "true")
    steps = [
        lab.popen(
            ["srun", *ON_N1, names[i % 5] + ":no_exec", "--container-writable", *sh(f"echo {i} > /f{i}; sleep 1")]
        )
        for i in range(50)
    ]
    errors = [step.communicate(timeout=3000)[1] for step in steps]
    assert [step.returncode for step in steps] == [0] * 50, "".join(errors)
    for i, name in enumerate(names):
        assert len(srun(lab, name, *sh("ls -d /f*")).split()) == 10, i


@pytest.mark.parity("--container-name=NAME:auto, the default")
def test_two_steps_create_one_container(lab: Lab) -> None:
    """Steps that start at the same time with a new name do not fail."""
    steps = [lab.popen(["srun", *ON_N1, IMAGE, NAME, "readlink", "/proc/self/ns/mnt"]) for _ in range(4)]
    for step in steps:
        _, err = step.communicate(timeout=300)
        assert step.returncode == 0, err


@pytest.mark.parity(
    "--container-unshare is an error if the running container",
    "--container-unshare must name namespaces that the container has",
)
def test_unshare_must_fit_what_runs(lab: Lab) -> None:
    with running(lab, IMAGE, NAME, "--container-unshare=uts"):
        assert srun(lab, NAME, "--container-unshare=uts", "true") == ""
        for kind, word in (("net", "network"), ("ipc", "IPC")):
            stderr = refused(lab, NAME, f"--container-unshare={kind}", "true")
            assert f"is not in a separate {word} namespace" in stderr


def test_a_killed_helper_does_not_hide_the_container(lab: Lab) -> None:
    with running(lab, IMAGE, NAME, "--container-writable", after="true") as step:
        kill_helper(lab)
        assert srun(lab, NAME, "echo", "fine") == "fine\n"
        assert step.poll() is None


@pytest.fixture
def job_scope(lab: Lab) -> Iterator[None]:
    with plugin_argument(lab, "container_scope=job"):
        yield


@pytest.mark.clusters("Containers that should not outlive their job")
@pytest.mark.parity("container_scope=job", "names: pyxis_NAME")
def test_job_scope_ends_with_the_job(lab: Lab, job_scope: None) -> None:
    """With container_scope=job, the epilog of a job removes the job's named containers."""
    inside = f"srun {IMAGE} {NAME} true; srun {NAME} true && penroot list"
    out = lab.run(["salloc", "-Q", "-w", "n1", "srun", "-n1", *sh("true")]).stdout
    script = f"#!/bin/sh\n{inside}\n"
    lab.run(f"cat > job.sh <<'E'\n{script}E")
    sbatch(lab, "-w", "n1", "-o", "job.out", "job.sh")
    out = lab.run("cat job.out; rm job.out job.sh").stdout
    assert "_one" in out, out
    until(lambda: not lab.run(["penroot", "list"], node="n1").stdout, "the epilog has removed the container")
    assert lab.run(["sinfo", "-h", "-N", "-n", "n1", "-o", "%t"]).stdout.strip() in ("idle", "mix", "comp")


@pytest.fixture
def passwd(lab: Lab) -> Iterator[None]:
    """Restore the accounts of n1 at the end."""
    lab.run(["cp", "/etc/passwd", "/etc/passwd.was"], node="n1", user="root")
    yield
    lab.run(["mv", "/etc/passwd.was", "/etc/passwd"], node="n1", user="root")


@pytest.mark.parity(
    "a bad runtime_path or a failed clean-up drains no node", "the epilog removes what a killed slurmstepd left"
)
@pytest.mark.parametrize("user", ["there", "gone"])
def test_the_epilog_removes_what_a_killed_step_left(lab: Lab, passwd: None, user: str) -> None:
    step = lab.popen(["srun", *ON_N1, IMAGE, "--container-writable", *sh("echo up; sleep 60")])
    expect(step, "up")
    assert lab.run(["penroot", "list"], node="n1").stdout.startswith("pyxis_")
    lab.run("pkill -KILL -f [p]yxis_py.helper; pkill -KILL slurmstepd; pkill -KILL -u alice", node="n1", user="root")
    if user == "gone":
        lab.run("grep -v ^alice: /etc/passwd.was > /etc/passwd", node="n1", user="root")
    lab.run(["scancel", "--user=alice"])
    step.communicate(timeout=300)
    find = ["find", "/run/pyxis/2001", "/var/tmp/enroot-data-2001", "-mindepth", "1", "!", "-name", ".records"]
    until(lambda: not lab.run(find, node="n1", user="root").stdout, "the epilog has removed the files")
    assert lab.run(["sinfo", "-h", "-N", "-n", "n1", "-o", "%t"]).stdout.strip() in ("idle", "mix", "comp")
    # The killed slurmstepd could not remove its cgroups.
    remove = "find /sys/fs/cgroup -depth -type d -path '*job_*' -exec rmdir {} +"
    until(lambda: lab.run(remove, node="n1", user="root", check=False).returncode == 0, "the job's cgroups are empty")


@pytest.mark.parity("a rebooted node runs the next step, which removes leftovers")
def test_next_start_removes_leftovers_from_before_a_boot(lab: Lab) -> None:
    directory = "/var/tmp/enroot-data-2001"
    with running(lab, IMAGE, "--container-writable"):
        # The state of a node after a power failure.
        lab.run(
            f"cd {directory} && mkdir -p pyxis_1.0/upper pyxis_2.0/upper && cp pyxis_*.0/.penroot pyxis_1.0 &&"
            " echo n1 earlier > pyxis_1.0/.step && echo n9 earlier > pyxis_2.0/.step",
            node="n1",
        )
        srun(lab, IMAGE, "--container-writable", "true")
        left = lab.run(["ls", directory], node="n1").stdout.split()
        assert "pyxis_1.0" not in left
        assert "pyxis_2.0" in left  # a container of another node that shares the directory
        assert len(left) == 2


@pytest.mark.parity("srun --x11: the display also works if the step joins a running container")
def test_display_of_a_step_is_in_a_running_container_too(lab: Lab) -> None:
    """The container has the display's key only while a step of that job is in it. srun --x11 makes the key file."""
    key = "/tmp/.Xauthority-job"
    with running(lab, IMAGE, NAME, after=f"! grep -q Xauthority /proc/self/mountinfo && ! test -s {key}"):
        lab.run(f"echo key > {key}", node="n1")
        try:
            assert srun(lab, NAME, *sh("cat $XAUTHORITY"), env={"XAUTHORITY": key}) == "key\n"
        finally:
            lab.run(["rm", key], node="n1")


@pytest.mark.parity("an existing container of --container-name")
@pytest.mark.parametrize("nodes", ["n1", "n1,n2"])
def test_existing_container_asks_no_registry(lab: Lab, registry: Server, nodes: str) -> None:
    """srun does not resolve the tag. The nodes that lack the container resolve it, with one request for all of them."""
    with front(lab, registry) as shown:
        tag = Tag(registry, shown, f"named{len(nodes)}")
        count = len(nodes.split(","))
        words = [f"-N{count}", "-w", nodes, "--container-name=kept", f"--container-image={tag.image}"]

        def numbers(words: list[str]) -> list[str]:
            done = lab.run(["srun", *words, *sh("cat /number; echo")])
            assert "different images" not in done.stderr
            return sorted(done.stdout.split())

        assert numbers(words) == ["1"] * count
        shown.seen.clear()
        tag.move()
        assert numbers(words) == ["1"] * count
        assert shown.seen == []
        lab.run(["penroot", "remove", "-f", "pyxis_kept"], node=nodes[-2:])
        assert numbers(words) == ["1"] * (count - 1) + ["2"]
        assert tag.asked.count("GET") == 1
        for node in nodes.split(","):
            lab.run(["penroot", "remove", "-f", "pyxis_kept"], node=node)
        shown.seen.clear()
        tag.move()
        assert numbers(words) == ["3"] * count
        assert tag.asked.count("GET") == 1
        for node in nodes.split(","):
            lab.run(["penroot", "remove", "-f", "pyxis_kept"], node=node)


@pytest.mark.parity("an existing container of --container-name")
def test_missing_image_of_a_name_is_reported_once(lab: Lab, registry: Server) -> None:
    with front(lab, registry) as shown:
        words = ("-N2", "--container-name=none", f"--container-image={shown.host}#names/none:a", "true")
        stderr = refused(lab, *words)
        assert stderr.count("no repository names/none") == 1, stderr
