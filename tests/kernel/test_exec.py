"""``penroot exec`` and ``cp``: options, what a killed client leaves, and copies of files that a container controls."""

from __future__ import annotations

import os
import pathlib
import signal
import time
from collections.abc import Iterator

import pytest

from tests.kernel.conftest import User
from tests.kernel.test_detached import detach, kill_the_rest, processes, program
from tests.waiting import until

pytestmark = pytest.mark.usefixtures(kill_the_rest.__name__)

TREE = "setsid sleep 1111 & sh -c 'sleep 2222 & sleep 3333; true'; true"  # three sleeps, one in another session


@pytest.fixture
def job(user: User, rootfs: pathlib.Path) -> Iterator[User]:
    """Return a user who runs the writable container ``job`` in the background. Its program sleeps."""
    detach(user, "--rw", "box", "sleep", "600")
    yield user
    user.penroot("stop", "--timeout", "1", "job")
    until(lambda: not processes(user), "nothing is left", 20)


def sleeping(user: User, *numbers: int) -> list[int]:
    """Return the user's processes that run ``sleep`` with one of ``numbers``."""
    pids = (pid for number in numbers for pid in processes(user, f"sleep {number} "))
    return [pid for pid in pids if comm(pid) == "sleep"]


def comm(pid: int) -> str:
    try:
        return pathlib.Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


@pytest.mark.parity("exec --workdir")
def test_exec_runs_in_a_directory(job: User) -> None:
    assert job.penroot("exec", "--workdir", "/opt", "job", "sh", "-c", "pwd; echo $PWD").stdout == "/opt\n/opt\n"
    done = job.penroot("exec", "-w", "/none", "job", "pwd", status=1)
    assert "cannot enter the working directory /none of the container" in done.stderr


@pytest.mark.parity("exec --user")
def test_exec_as_root_and_as_the_caller(job: User) -> None:
    for user in ("root", "0", "0:0"):
        assert job.penroot("exec", "--user", user, "job", "id", "-u").stdout == "0\n"
    assert job.penroot("exec", "-u", str(job.uid), "job", "id", "-u").stdout == f"{job.uid}\n"
    done = job.penroot("exec", "--user", "daemon", "job", "true", status=1)
    assert "the container does not have this user" in done.stderr
    script = "mount -t tmpfs none /tmp || echo refused; echo x > /opt/by-root"
    assert "refused" in job.penroot("exec", "--user", "root", "job", "sh", "-c", script).stdout
    assert (job.data / "box/opt/by-root").stat().st_uid == job.uid


@pytest.mark.parity("exec --interactive")
def test_options_of_docker_have_no_effect(job: User) -> None:
    assert job.penroot("exec", "-it", "job", "echo", "inside").stdout == "inside\n"
    assert job.penroot("exec", "-i", "--tty", "-e", "A=1", "job", "sh", "-c", "echo $A").stdout == "1\n"


def test_exec_as_the_caller_in_a_container_of_root(user: User, rootfs: pathlib.Path) -> None:
    detach(user, "--root", "box", "sleep", "600")
    assert user.penroot("exec", "job", "id", "-u").stdout == "0\n"
    assert user.penroot("exec", "--user", "root", "job", "id", "-u").stdout == "0\n"
    assert "started with --root" in user.penroot("exec", "-u", str(user.uid), "job", "true", status=1).stderr
    user.penroot("stop", "job")


@pytest.mark.parity("exec --timeout")
@pytest.mark.parametrize("options", [(), ("--pid",)])
def test_timeout_ends_all_that_was_started(user: User, rootfs: pathlib.Path, options: tuple[str, ...]) -> None:
    detach(user, *options, "box", "sleep", "600")
    user.penroot("exec", "--timeout", "0.3", "job", "sh", "-c", TREE, status=124)
    assert not sleeping(user, 1111, 2222, 3333)
    assert user.penroot("exec", "--timeout", "60", "job", "sh", "-c", "exit 5", status=5)
    assert "not a number of seconds" in user.penroot("exec", "--timeout", "x", "job", "true", status=1).stderr
    user.penroot("stop", "--timeout", "0.1", "job")


def test_stopped_command_is_ended_by_the_timeout(job: User) -> None:
    job.penroot("exec", "--timeout", "0.3", "job", "sh", "-c", "kill -STOP $$", status=124, prefix=("setsid", "-w"))


@pytest.mark.parity("exec: if exec is killed", "penroot-guard")
@pytest.mark.parametrize("options", [(), ("--pid",), ("--root",)])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_killed_client_ends_grandchildren(
    user: User, rootfs: pathlib.Path, options: tuple[str, ...], number: signal.Signals
) -> None:
    detach(user, *options, "box", "sleep", "600")
    tree = TREE if number == signal.SIGKILL else "exec sleep 3333"
    client = user.begin("penroot", "exec", "job", "sh", "-c", tree)
    until(lambda: sleeping(user, 3333), "it runs", 20)
    client.send_signal(number)
    assert client.wait(20) == (-number if number == signal.SIGKILL else 128 + number)
    until(lambda: not sleeping(user, 1111, 2222, 3333), "all have ended", 20)
    assert user.penroot("exec", "job", "echo", "alive").stdout == "alive\n"
    user.penroot("stop", "--timeout", "0.1", "job")


def test_client_that_is_killed_while_stopped_leaves_nothing(job: User) -> None:
    client = job.begin("penroot", "exec", "job", "sh", "-c", TREE, start_new_session=True)
    until(lambda: sleeping(job, 3333), "it runs", 20)
    os.killpg(client.pid, signal.SIGSTOP)
    client.kill()
    client.wait()
    until(lambda: not sleeping(job, 1111, 2222, 3333), "all have ended", 20)


def test_background_process_of_a_finished_command_goes_on(job: User) -> None:
    job.penroot("exec", "job", "sh", "-c", "sleep 4444 > /dev/null 2>&1 & exit 3", status=3)
    until(lambda: len(sleeping(job, 4444)) == 1, "it runs", 20)
    assert "sleep 4444" in job.penroot("ps", "job").stdout


def test_closed_stdin_and_stdout_end_with_the_command(job: User) -> None:
    script = 'yes | penroot exec job head -n 1; penroot exec job sh -c "exec >&-; exec sleep 5" | cat; echo $SECONDS'
    begun = time.monotonic()
    done = job.run("bash", "-c", script)
    assert done.stdout.startswith("y\n") and time.monotonic() - begun < 60


@pytest.mark.parity("cp")
def test_copies_both_ways(job: User) -> None:
    job.write("tree/a b/file", "text", 0o640)
    (job.home / "tree/link").symlink_to("a b/file")
    job.own(job.home / "tree")
    job.penroot("cp", "tree", "job:/opt")
    job.penroot("cp", "tree/.", "job:/opt/content")
    job.penroot("cp", "tree/a b/..", "job:/opt/parent")
    job.penroot("cp", "tree/a b/file", "job:/opt/new name")
    job.penroot("cp", "tree/a b/file", "job:/tmp/")
    show = (
        "sh",
        "-c",
        "cat /opt/tree/link '/opt/content/a b/file' '/opt/new name' '/opt/parent/a b/file' /tmp/file; rm /tmp/file",
    )
    assert job.penroot("exec", "job", *show).stdout == "text" * 5
    job.penroot("cp", "job:/opt/tree", "back")
    assert (job.home / "back/link").readlink() == pathlib.Path("a b/file")
    state = (job.home / "back/a b/file").stat()
    assert (state.st_mode & 0o7777, state.st_uid) == (0o640, job.uid)
    job.penroot("cp", "job:/opt/new name", ".")
    assert (job.home / "new name").read_text() == "text"


@pytest.mark.parity("cp")
def test_copy_errors_name_the_path(job: User) -> None:
    for words, reason in (
        (("none", "job:/opt"), "cannot copy none to job:/opt: No such file or directory"),
        (("job:/none", "."), "cannot copy job:/none to .: No such file or directory"),
        (("a", "b"), "name a container in one of the paths"),
        (("job:/a", "job:/b"), "copies between the host and one container"),
        (("/etc/hosts", "other:/tmp"), "no running container other"),
        (("/etc/hosts", "job:/none/"), "No such file or directory"),
    ):
        assert reason in job.penroot("cp", *words, status=125).stderr, words


def test_copy_into_a_read_only_container_says_so(user: User, rootfs: pathlib.Path) -> None:
    detach(user, "box", "sleep", "600")
    assert "start the container with --rw" in user.penroot("cp", "/etc/hosts", "job:/opt", status=125).stderr
    user.penroot("cp", "job:/etc/environment", "copied")
    assert "FROM_IMAGE" in (user.home / "copied").read_text()
    user.penroot("stop", "job")


@pytest.mark.security("I13")
def test_links_of_a_container_lead_nowhere_else(job: User) -> None:
    """``cp`` follows no link of the container to a file of the host: absolute, with ``..``, or through /proc.

    Nor does it follow a link that an earlier copy left on the host.
    """
    outside = job.write("outside/secret", "kept").parent
    job.write("bad", "written")
    up = "../" * 20
    script = (
        f"cd /opt; ln -s {outside} absolute; ln -s {up}{outside} relative; ln -s /proc/1/root/{outside} magic;"
        f"mkdir tree; ln -s {outside} tree/sub; ln -s {outside}/secret tree/secret; ln -s {outside}/secret target"
    )
    job.penroot("exec", "job", "sh", "-c", script)
    for link in ("absolute", "relative", "magic"):
        job.penroot("cp", "bad", f"job:/opt/{link}/secret", status=125)
        job.penroot("cp", f"job:/opt/{link}/secret", "stolen", status=125)
    job.penroot("cp", "bad", "job:/opt/target")  # replaces the link
    assert not (job.data / "box/opt/target").is_symlink()
    job.penroot("cp", "job:/opt/tree", "out")
    assert (job.home / "out/sub").readlink() == outside  # the link is copied as a link
    # In the container, a directory and a file replace the links that have been copied.
    job.penroot(
        "exec", "job", "sh", "-c", "cd /opt/tree; rm sub secret; mkdir sub; echo bad > sub/secret; echo new > secret"
    )
    job.penroot("cp", "job:/opt/tree/.", "out", status=125)
    assert (outside / "secret").read_text() == "kept" and not (job.home / "stolen").exists()


def test_special_files_are_not_copied(job: User) -> None:
    job.penroot(
        "exec", "job", "sh", "-c", "cd /opt; mkdir t; busybox mkfifo t/fifo; echo x > t/file; busybox chmod 6755 t/file"
    )
    done = job.penroot("cp", "job:/opt/t", "out")
    assert "not copied: fifo" in done.stderr
    assert sorted(path.name for path in (job.home / "out").iterdir()) == ["file"]
    assert (job.home / "out/file").stat().st_mode & 0o7777 == 0o755


def test_files_that_change_during_a_copy_stay_inside(job: User, soak: bool) -> None:
    """The container keeps swapping a directory with a link to the host's files, while cp reads and writes there."""
    outside = job.write("outside/secret", "kept").parent
    job.write("bad", "written")
    swap = (
        f"cd /opt; mkdir a b; echo inside > a/secret; ln -s {outside} l; "
        "while :; do busybox mv a c; busybox mv l a; busybox mv a l; busybox mv c a; done"
    )
    with job.running("penroot", "exec", "job", "sh", "-c", swap):
        for _ in range(200 if soak else 10):
            job.penroot("cp", "bad", "job:/opt/a/secret", status=None)
            job.penroot("cp", "job:/opt/a", "out", status=None)
            assert (outside / "secret").read_text() == "kept"
            if not (job.home / "out").is_symlink():
                assert not [path for path in (job.home / "out").rglob("secret") if path.read_text() == "kept"]
            job.run("rm", "-rf", "out")


@pytest.mark.parity("exec: if exec is killed")
def test_exec_reads_no_proc_of_other_processes(job: User) -> None:
    """The start has recorded the PID of the container's process, so exec does not search /proc for that process."""
    pid = program(job)
    trace = job.home / "trace"
    for target in ("job", "box"):
        job.penroot(
            "exec", target, "true", prefix=("strace", "-f", "-qq", "-e", "trace=file,getdents64", "-o", str(trace))
        )
        others = {
            word.split("/")[2]
            for word in trace.read_text().split('"')
            if word.startswith("/proc/") and word.split("/")[2].isdecimal()
        }
        assert others <= {str(pid), *others & {str(n) for n in range(pid, pid + 10000)}}, others
        assert '"/proc", O_RDONLY|O_NONBLOCK|O_CLOEXEC|O_DIRECTORY' not in trace.read_text()
