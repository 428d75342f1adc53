"""Container steps on a real cluster, as an ordinary user."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.slurm.lab import Lab
from tests.slurm.steps import MINIMAL, PMIX, end, expect, next_line, refused, srun
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left")

MPI = "registry:5000#mpi:1"


def image(reference: str = MINIMAL) -> str:
    return f"--container-image={reference}"


@PMIX
def test_mpi_over_two_nodes(lab: Lab) -> None:
    out = srun(lab, "-N2", "--ntasks-per-node=2", "--mpi=pmix", image(MPI), "./hello")
    ranks = sorted(line for line in out.splitlines() if line.startswith("rank"))
    assert [line.split()[1] for line in ranks] == ["0", "1", "2", "3"]
    assert {line.split()[-1] for line in ranks} == {"n1", "n2"}
    assert "sum 6" in out.splitlines()


@pytest.mark.parity("PMIx: tasks get the variables and files of Slurm's PMIx server")
@PMIX
def test_pmix_files_and_variables(lab: Lab) -> None:
    script = 'test -d "$PMIX_SERVER_TMPDIR" && echo $PMIX_RANK $PMIX_SECURITY_MODE'
    out = srun(lab, "-n2", "--mpi=pmix", image(), "bash", "-c", script)
    assert sorted(out.splitlines()) == ["0 native", "1 native"]  # the image has no MUNGE
    # Slurm's PMIx may list modules that the image's PMIx lacks. Only modules that every PMIx has may be in the list.
    out = srun(lab, "-n2", "--mpi=pmix", "--container-image=registry:5000#mpi:1", "sh", "-c", "echo =$PMIX_MCA_gds")
    assert set(out.split()) <= {"=", "=hash"}


@pytest.mark.parity("PMI2")
def test_pmi2_descriptor_stays_open(lab: Lab) -> None:
    out = srun(lab, "-n2", "--mpi=pmi2", image(), "bash", "-c", "readlink /proc/self/fd/$PMI_FD; echo rank $PMI_RANK")
    assert out.count("socket:") == 2
    assert "rank 0" in out
    assert "rank 1" in out


@pytest.mark.parity("stray PMIX_ variables mount nothing with --mpi=none", "stray PMIX_ variables mount nothing")
def test_stray_pmix_variables_mount_nothing(lab: Lab) -> None:
    out = srun(
        lab, "--mpi=none", image(), "sh", "-c", "echo $PMIX_FOO", env={"PMIX_FOO": "1", "PMIX_SERVER_TMPDIR": "/x"}
    )
    assert out == "1\n"


@pytest.mark.parity(
    "ranks of a node share a user namespace",
    "--container-image: accepts a reference to an image in a registry",
    "all tasks of a step on a node share one container",
)
def test_one_container_for_the_tasks_of_a_node(lab: Lab) -> None:
    # All tasks must be alive at the same time: the kernel reuses the number of a namespace that has ended.
    script = "echo $(for n in user mnt cgroup; do readlink /proc/self/ns/$n; done); read line"
    for nodes, tasks in ((1, 4), (2, 2)):
        step = lab.popen(["srun", f"-N{nodes}", f"-n{tasks}", "-l", image(), "sh", "-c", script])
        out = [next_line(step).split(":", 1) for _ in range(tasks)]
        end(step)
        assert sorted(int(task) for task, _ in out) == list(range(tasks))
        assert len({line for _, line in out}) == nodes


def test_without_options_nothing_happens(lab: Lab) -> None:
    assert srun(lab, "readlink", "/proc/self/ns/mnt") == lab.run(["readlink", "/proc/self/ns/mnt"], node="n1").stdout


def test_no_python_without_options(lab: Lab) -> None:
    daemon = int(lab.run(["pgrep", "-o", "slurmd"], node="n1", user="root").stdout)
    trace = ["strace", "-f", "-qq", "-e", "trace=execve", "-o", "/tmp/trace"]
    watcher = lab.popen([*trace, "-p", str(daemon)], node="n1", user="root")
    try:
        status = ["grep", "-L", "TracerPid:\t0$", f"/proc/{daemon}/status"]
        until(lambda: lab.run(status, node="n1", user="root", check=False).stdout, "strace has attached to slurmd")
        done = lab.run(["strace", "-f", "-qq", "-e", "trace=execve", "srun", "-w", "n1", "true"])
        assert "python" not in done.stderr
    finally:
        lab.run(["pkill", "-INT", "strace"], node="n1", user="root")
        watcher.wait(120)
    execs = lab.run(["cat", "/tmp/trace"], node="n1", user="root").stdout
    lab.run(["rm", "/tmp/trace"], node="n1", user="root")
    assert "slurmstepd" in execs
    assert "python" not in execs


@pytest.mark.parity("--container-remap-root")
def test_user_and_groups(lab: Lab) -> None:
    assert srun(lab, image(), "id", "-un") == "alice\n"
    assert srun(lab, image(), "--container-remap-root", "id", "-u") == "0\n"
    assert srun(lab, image(), "--no-container-remap-root", "id", "-u") == "2001\n"


@pytest.mark.parity(
    "a program can read files of the user's supplementary groups", "supplementary groups of the user keep their access"
)
def test_supplementary_groups_keep_their_access(lab: Lab) -> None:
    lab.run("echo data > /home/shared-file; chgrp science /home/shared-file; chmod 640 /home/shared-file", user="root")
    try:
        assert srun(lab, image(), "--container-mounts=/home", "cat", "/home/shared-file") == "data\n"
    finally:
        lab.run(["rm", "/home/shared-file"], user="root")


@pytest.mark.parity("--container-writable")
def test_readonly_and_writable(lab: Lab) -> None:
    write = ("sh", "-c", "echo x > /made && cat /made")
    assert "Read-only" in refused(lab, image(), "--container-readonly", *write)
    assert srun(lab, image(), "--container-writable", *write) == "x\n"
    assert "Read-only" in refused(lab, image(), "--container-readonly", *write, env={"PYXIS_CONTAINER_WRITABLE": "1"})


@pytest.mark.parity("--container-mount-home")
def test_home(lab: Lab) -> None:
    lab.run(["touch", "mine"])
    try:
        assert "mine" in srun(lab, image(), "--container-mount-home", "sh", "-c", "ls $HOME")
        assert "mine" not in srun(lab, image(), "--no-container-mount-home", "sh", "-c", "ls $HOME")
        assert "mine" in srun(lab, image(), "--container-mount-home", "--container-remap-root", "ls", "/root")
    finally:
        lab.run(["rm", "mine"])


@pytest.mark.parity(
    "a mount below /tmp works although the container's /tmp is a tmpfs",
    "--container-mounts: accepts directories, files",
)
def test_mounts(lab: Lab) -> None:
    mounts = "--container-mounts=/etc/os-release:/tmp/host,/usr/share:/mnt/share:ro,tmpfs:/scratch"
    script = "test -s /tmp/host && ls -d /mnt/share/doc && stat -f -c %T /scratch && ! touch /mnt/share/x 2>/dev/null"
    assert srun(lab, image(), mounts, "sh", "-c", script) == "/mnt/share/doc\ntmpfs\n"


@pytest.mark.parity("--container-mounts: a source may be a relative path")
def test_relative_mount_source(lab: Lab) -> None:
    lab.run("mkdir -p data && echo here > data/file")
    try:
        assert srun(lab, image(), "--container-mounts=./data:/data", "cat", "/data/file") == "here\n"
    finally:
        lab.run(["rm", "-r", "data"])


@pytest.mark.parity("--container-mounts: umount:PATH removes a mount of the container")
def test_umount(lab: Lab) -> None:
    count = ("awk", '$2 == "/var/lock"', "/proc/mounts")
    assert srun(lab, image(), *count) != ""
    assert srun(lab, image(), "--container-mounts=umount:/var/lock", *count) == ""


@pytest.mark.parity("10-cgroups")
def test_limits_of_the_step_are_those_seen_inside(lab: Lab) -> None:
    find = "cat /sys/fs/cgroup/memory.max 2>/dev/null || cat /sys/fs/cgroup/memory/memory.limit_in_bytes"
    assert int(srun(lab, "--mem=200M", image(), "sh", "-c", find)) == 200 << 20
    assert "Read-only" in refused(lab, image(), "sh", "-c", "mkdir /sys/fs/cgroup/x || mkdir /sys/fs/cgroup/memory/x")


@pytest.mark.parity("--container-workdir")
def test_workdir(lab: Lab) -> None:
    assert srun(lab, image(), "pwd") == "/srv/work\n"
    assert srun(lab, image(), "--container-workdir=/usr", "pwd") == "/usr\n"
    stderr = refused(lab, image(), "--container-workdir=/no/such", "pwd")
    assert "working directory in the container (--container-workdir): /no/such: No such file" in stderr


@pytest.mark.parity(
    "PWD names the task's directory, also with --container-workdir (pyxis: always the image's directory); SHLVL is 0"
)
def test_tasks_know_their_directory(lab: Lab) -> None:
    """PWD names the directory in the container, not on the host. A shell would correct PWD, so the steps run none."""
    env = {"PWD": "/tmp", "SHLVL": "7"}

    def shown(*options: str) -> set[str]:
        lines = srun(lab, image(), *options, "env", env=env).splitlines()
        return {line for line in lines if line.startswith(("PWD=", "SHLVL="))}

    assert shown() == {"PWD=/srv/work", "SHLVL=0"}
    assert shown("--container-workdir=/usr/../etc/") == {"PWD=/etc", "SHLVL=0"}
    assert shown("--container-env=PWD,SHLVL") == {"PWD=/tmp", "SHLVL=7"}


@pytest.mark.parity(
    "--container-env ignores a variable that the job does not have",
    "LANG is not passed on to programs",
    "--container-env",
    "LANG, LANGUAGE and LC_ALL of the job are not passed on",
)
def test_environment(lab: Lab) -> None:
    names = "echo $IMAGE_NAME,$FOO,$LANG,$LC_ALL"
    env = {"FOO": "job", "IMAGE_NAME": "job", "LC_ALL": "C"}
    assert srun(lab, image(), "sh", "-c", names, env=env) == "minimal,job,,\n"
    kept = "--container-env=IMAGE_NAME,LC_ALL"
    assert srun(lab, image(), kept, "sh", "-c", names, env=env) == "job,job,,C\n"
    assert srun(lab, image(), "--container-env=IMAGE_NAME", "sh", "-c", names, env={"FOO": "1"}) == "minimal,1,,\n"


@pytest.mark.parity("LANG is not passed on to programs", "variables that could break an import")
def test_a_broken_environment_does_not_break_the_import(lab: Lab) -> None:
    env = {"LD_PRELOAD": "/no/such.so", "ENROOT_CACHE_PATH": "/no", "PYTHONPATH": "/no", "PYTHONHOME": "/no"}
    assert srun(lab, image(), "pwd", env=env) == "/srv/work\n"


@pytest.fixture
def squashfs(lab: Lab) -> Iterator[str]:
    lab.run(["penroot", "import", "-o", "minimal.sqsh", f"docker://{MINIMAL}"], node="n1")
    yield "./minimal.sqsh"
    lab.run(["rm", "-f", "minimal.sqsh"])


@pytest.mark.parity("--container-image: accepts a squashfs file as ./FILE or /FILE")
def test_squashfs_image(lab: Lab, squashfs: str) -> None:
    assert srun(lab, "-N2", image(squashfs), "sh", "-c", "echo $IMAGE_NAME $PWD") == "minimal /srv/work\n" * 2
    write = ("--container-writable", "sh", "-c", "echo x > /usr/made && cat /usr/made")
    assert srun(lab, "-N1", image(squashfs), *write) == "x\n"


BAD = [
    (("--container-image=registry:5999#minimal:1",), "5999"),
    (("--container-image=/etc/hostname",), "/etc/hostname"),
    (("--container-image=./no-such.sqsh",), "no-such.sqsh"),
    (("--container-image=no-such.sqsh",), "cannot read the image /home/alice/no-such.sqsh"),
    ((image(), "--container-mounts=/no/such/dir:/x"), "source path does not exist: /no/such/dir"),
    ((image(), "--container-mounts=/root/x:/x"), "source path: Permission denied: /root/x"),
    (("--container-name=never-made",), "never-made"),
]


@pytest.mark.parity(
    "one import serves all tasks on a node",
    "a failed set-up names the node",
    "--container-mounts: if a source is missing, the step fails",
    "if the set-up fails, one task reports the error",
)
@pytest.mark.parametrize(("options", "word"), BAD, ids=[" ".join(options) for options, _ in BAD])
def test_failure_on_a_node_names_the_node_once(lab: Lab, options: tuple[str, ...], word: str) -> None:
    stderr = refused(lab, "-n2", *options, "true")
    lines = [line for line in stderr.splitlines() if word in line and "pyxis" in line and "error" in line]
    assert len(lines) == 1, stderr
    assert "n1" in lines[0]


@pytest.mark.parity("bad values of options are refused at submission")
@pytest.mark.parametrize(
    "option",
    [
        "--container-image=",
        "--container-mounts=:",
        "--container-mounts=/tmp:",
        "--container-mounts=/tmp:relative",
        "--container-name=/tmp/foo",
        "--container-name=:exec",
        "--container-unshare=foo",
        "--container-env=A,",
        "--container-image=UPPER/Case:tag:tag",
    ],
)
def test_mistakes_are_refused_at_submit(lab: Lab, option: str) -> None:
    jobs = ["squeue", "-h", "-t", "all", "-o", "%i"]
    before = lab.run(jobs).stdout.split()
    stderr = refused(lab, image(), option, "true") if "image" not in option else refused(lab, option, "true")
    assert option.partition("=")[0] in stderr
    assert "spank:" not in stderr  # Slurm adds no lines of its own
    assert set(lab.run(jobs).stdout.split()) <= {*before}  # no new job; Slurm may forget old ones


def test_a_truncated_image(lab: Lab, squashfs: str) -> None:
    lab.run(["truncate", "-s", "1000000", squashfs])
    assert "truncated" in refused(lab, image(squashfs), "true")


def test_disk_full(lab: Lab) -> None:
    lab.run(["mount", "-t", "tmpfs", "-o", "size=1m,mode=1777", "tmpfs", "/var/tmp"], node="n2", user="root")
    try:
        stderr = refused(lab, "-w", "n2", image(MPI), "true")
        assert "No space left" in stderr
        assert "n2" in stderr
    finally:
        lab.run(["umount", "/var/tmp"], node="n2", user="root")


def test_read_only_step_needs_no_writable_data_path(lab: Lab) -> None:
    data = "/var/tmp/enroot-data-2001"
    lab.run(["mkdir", "-p", data], node="n1")
    lab.run(f"mount --bind {data} {data} && mount -o remount,bind,ro {data}", node="n1", user="root")
    try:
        assert "error" not in lab.run(["srun", "-w", "n1", image(), "true"]).stderr
        assert "is read-only: set ENROOT_DATA_PATH" in refused(lab, image(), "--container-writable", "true")
    finally:
        lab.run(["umount", data], node="n1", user="root")


@pytest.mark.parity(
    "scancel and Ctrl-C during an import leave nothing", "cancelled steps and imports leave nothing on the nodes"
)
@pytest.mark.parametrize("seconds", [0.05, 0.15, 0.3, 1.0])
def test_cancel_leaves_nothing(lab: Lab, seconds: float) -> None:
    job = lab.popen(["srun", "-N2", image(MPI), "--container-writable", "sleep", "60"])
    time.sleep(seconds)

    def cancelled() -> bool:  # the first attempt may precede the job
        lab.run(["scancel", "--user=alice"])
        return job.poll() is not None

    until(cancelled, "srun has ended")
    job.communicate()


@pytest.mark.parity("scancel and Ctrl-C during an import leave nothing")
def test_ctrl_c_leaves_nothing(lab: Lab) -> None:
    job = lab.popen(["srun", "-N1", image(), "sh", "-c", "echo up; exec sleep 600"])
    expect(job, "up")

    def interrupted() -> bool:
        lab.run("pkill -INT -x srun; pkill -INT -x srun", check=False)  # srun ends after two SIGINTs within a second
        return job.poll() is not None

    until(interrupted, "srun has ended")
    job.communicate()
    assert job.returncode != 0


def test_words_of_the_program_are_no_options_of_slurm(lab: Lab) -> None:
    echo = [image(), "echo", "--wait-for-children", "--no-shell"]
    assert lab.run(["salloc", "-Q", "-w", "n1", *echo]).stdout == "--wait-for-children --no-shell\n"
    assert lab.run(["srun", "-w", "n1", *echo]).stdout == "--wait-for-children --no-shell\n"
