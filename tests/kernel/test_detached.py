"""Containers in the background: ``start --detach``, ``logs``, ``wait``, ``stop``, ``ps`` and ``list``."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import subprocess
from collections.abc import Iterator

import pytest

from tests.kernel.conftest import User, ordinary_user
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("rootfs")

# Print a line, start a process in another session, and exit before it.
LEAVES = "echo begun; setsid sleep 1234 & sleep 0.1; exit 7"


@pytest.fixture(autouse=True)
def kill_the_rest(user: User) -> Iterator[None]:
    """After each test, kill the remaining processes of the user."""
    yield
    for pid in processes(user):
        os.kill(pid, signal.SIGKILL)


def processes(user: User, word: str = "") -> list[int]:
    """Return the user's running processes whose command line contains ``word``."""
    pids = []
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if path.stat().st_uid == user.uid and command and word in command:
                pids.append(int(path.name))
        except OSError:
            continue
    return pids


def detach(user: User, *words: str, name: str = "job") -> str:
    """Start a container in the background, and return the name that is printed."""
    return user.penroot("start", "--detach", "--name", name, *words).stdout.strip()


def listed(user: User, name: str) -> dict[str, object]:
    """Return the object of a container in ``list --json``, or {} if there is none."""
    containers = json.loads(user.penroot("list", "--json").stdout)
    return next((container for container in containers if container["name"] == name), {})


def program(user: User, name: str = "job") -> int:
    """Return the PID of a container's first process."""
    (process,) = listed(user, name)["processes"]  # type: ignore[misc]
    return int(process["pid"])


@pytest.mark.parity("start --name", "logs --follow", "wait", "ps --json", "list --json")
def test_container_in_the_background(user: User) -> None:
    assert detach(user, "box", "sh", "-c", "echo out; echo err >&2; exec sleep 600") == "job"
    assert user.penroot("logs", "job").stdout == "out\nerr\n"
    assert user.penroot("exec", "job", "echo", "inside").stdout == "inside\n"
    assert "sleep 600" in user.penroot("ps", "job").stdout
    user.penroot("stop", "job")
    assert user.penroot("wait", "job").stdout == "143\n"
    assert listed(user, "job")["exit_status"] == 143
    user.penroot("remove", "--force", "job")
    assert not listed(user, "job") and not processes(user)


@pytest.mark.parity("start --detach, -d: prints")
def test_name_is_generated(user: User) -> None:
    first, second = (user.penroot("start", "-d", "box", "sleep", "600").stdout.strip() for _ in range(2))
    assert first != second and first.startswith("box-")
    user.penroot("stop", first, second)


@pytest.mark.parametrize("options", [(), ("--pid",), ("--root",), ("--root", "--pid", "--ipc")])
def test_end_of_the_program_ends_its_background_processes(user: User, options: tuple[str, ...]) -> None:
    detach(user, *options, "box", "sh", "-c", LEAVES)
    assert user.penroot("wait", "job").stdout == "7\n"
    assert user.penroot("logs", "job").stdout == "begun\n"
    until(lambda: not processes(user), "nothing is left")


@pytest.mark.parity("start --detach, -d: 125", "start --workdir")
def test_failed_start_leaves_nothing(user: User) -> None:
    for words, status, reason in (
        (("nothing",), 125, "no such container: nothing"),
        (("box", "nonsense"), 127, "cannot run nonsense"),
        (("box", "/etc/environment"), 126, "cannot run /etc/environment"),
        (("--workdir", "/none", "box", "true"), 125, "cannot enter the working directory /none"),
        (("--mount", "/none:/none", "box", "true"), 125, "/none"),
        (("--pid", "box", "nonsense"), 127, "cannot run nonsense"),
    ):
        done = user.penroot("start", "--detach", "--name", "job", *words, status=status)
        assert reason in done.stderr and not done.stdout, words
        assert not listed(user, "job") and not processes(user)


def test_taken_name_is_refused_until_the_end(user: User) -> None:
    detach(user, "box", "sleep", "600")
    done = user.penroot("start", "--detach", "--name", "job", "box", "true", status=125)
    assert "a detached container job is running" in done.stderr
    assert "is running" in user.penroot("remove", "-f", "job", status=1).stderr
    user.penroot("stop", "job")
    detach(user, "box", "sh", "-c", "echo again")
    assert user.penroot("wait", "job").stdout == "0\n"
    assert user.penroot("logs", "job").stdout == "again\n"


@pytest.mark.parametrize("name", ["-x", "a b", "a\nb", "äöü", "$(id)", "'\"", "a:b", "n" * 200])
def test_odd_name_is_a_name(user: User, name: str) -> None:
    assert user.penroot("start", "--detach", f"--name={name}", "box", "sleep", "600").stdout == name + "\n"
    assert user.penroot("exec", "--", name, "echo", "inside").stdout == "inside\n"
    user.penroot("stop", "--", name)
    assert user.penroot("wait", "--", name).stdout == "143\n"


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", ".x", "12", "n" * 256])
def test_impossible_name_is_refused(user: User, name: str) -> None:
    done = user.penroot("start", "--detach", f"--name={name}", "box", "true", status=None)
    assert done.returncode in (1, 125) and "[ERROR]" in done.stderr and "Traceback" not in done.stderr
    assert not processes(user)


@pytest.mark.parity("start --detach, -d: a killed client")
def test_killed_program_is_reported(user: User) -> None:
    detach(user, "box", "sh", "-c", "sleep 1234 & exec sleep 600")
    os.kill(program(user), signal.SIGKILL)
    assert user.penroot("wait", "job").stdout == "137\n"
    until(lambda: not processes(user), "nothing is left")


@pytest.mark.parity("start --detach, -d: a killed client", "penroot-monitor")
@pytest.mark.parametrize("options", [(), ("--pid",)])
def test_killed_monitor_ends_its_container(user: User, options: tuple[str, ...]) -> None:
    detach(user, *options, "box", "sleep", "600")
    (monitor,) = processes(user, "penroot-monitor")
    os.kill(monitor, signal.SIGKILL)
    until(lambda: not processes(user), "the container has ended")
    assert user.penroot("wait", "job").stdout == "137\n"
    detach(user, "box", "sleep", "600")  # the name is free again
    user.penroot("stop", "job")


@pytest.mark.parity("start --detach, -d: a killed client")
def test_killed_client_leaves_a_container_or_nothing(user: User, soak: bool) -> None:
    """The client is killed at different moments. Afterwards, the container is listed, or no process is left."""

    def is_gone() -> bool:
        if listed(user, "job").get("processes"):
            user.penroot("stop", "job")
        return not processes(user)

    for number in range(100 if soak else 12):
        client = user.begin("penroot", "start", "--detach", "--name", "job", "box", "sleep", "600")
        with contextlib.suppress(subprocess.TimeoutExpired):
            client.wait(0.01 * number % 0.12 + 0.001)
        client.kill()
        client.wait()
        until(is_gone, f"nothing is left, {number}", 20)


def test_stopped_container_is_shown_and_ended(user: User) -> None:
    detach(user, "box", "sleep", "600")
    os.kill(program(user), signal.SIGSTOP)
    (process,) = listed(user, "job")["processes"]  # type: ignore[misc]
    assert process["state"] == "T"
    assert user.penroot("exec", "job", "echo", "inside").stdout == "inside\n"
    user.penroot("stop", "job")
    assert user.penroot("wait", "job").stdout == "143\n"


@pytest.mark.parity("stop --signal")
def test_program_that_ignores_signals_is_killed(user: User) -> None:
    detach(user, "box", "sh", "-c", "trap '' TERM HUP; echo ready; while :; do sleep 0.1; done")
    until(lambda: user.penroot("logs", "job").stdout, "the trap is set")
    assert "has not ended in time" in user.penroot("stop", "--signal", "HUP", "--timeout", "0.2", "job").stderr
    assert user.penroot("wait", "job").stdout == "137\n"
    until(lambda: not processes(user), "nothing is left")


def test_first_process_without_a_handler_is_killed_at_once(user: User) -> None:
    """The kernel drops other signals for process 1 of a PID namespace if it has no handler, so stop sends SIGKILL."""
    detach(user, "--pid", "box", "sleep", "600")
    assert "in time" not in user.penroot("stop", "--timeout", "600", "job").stderr
    assert user.penroot("wait", "job").stdout == "137\n"
    detach(user, "--pid", "box", "sh", "-c", "trap 'exit 3' TERM; echo ready; while :; do sleep 0.1; done")
    until(lambda: user.penroot("logs", "job").stdout, "the trap is set")
    user.penroot("stop", "--timeout", "600", "job")
    assert user.penroot("wait", "job").stdout == "3\n"


def test_stop_ends_a_foreground_container(user: User) -> None:
    with user.running("penroot", "start", "box", "sh", "-c", "setsid sleep 1234 & exec sleep 600") as process:
        until(lambda: "sleep 600" in user.penroot("list", "-f").stdout, "the container runs")
        user.penroot("stop", "box")
        assert process.wait(20) == -signal.SIGTERM
    until(lambda: not processes(user), "nothing is left")


@pytest.mark.parity("stop --signal")
def test_stop_of_several_names_reports_each(user: User) -> None:
    detach(user, "box", "sleep", "600", name="one")
    done = user.penroot("stop", "one", "nothing", status=125)
    assert "no running container nothing" in done.stderr
    assert user.penroot("wait", "one").stdout == "143\n"


def test_process_outside_of_containers_is_not_stopped(user: User) -> None:
    with user.running("sleep", "600") as outside:
        assert "not in a container" in user.penroot("stop", str(outside.pid), status=125).stderr
        assert outside.poll() is None
    assert "not in one of your containers" in user.penroot("stop", "1", status=125).stderr


@pytest.mark.parity("logs --follow")
def test_logs_follow_until_the_end(user: User) -> None:
    detach(user, "box", "sh", "-c", "echo one; sleep 1; echo two")
    assert user.penroot("logs", "-f", "job").stdout == "one\ntwo\n"


def test_exec_selects_the_oldest_of_two_containers(user: User) -> None:
    """exec NAME enters the oldest running container. After its end, exec NAME enters the other container."""
    detach(user, "-e", "NUMBER=1", "box", "sleep", "600", name="one")
    detach(user, "-e", "NUMBER=2", "box", "sleep", "600", name="two")
    show = ("sh", "-c", "echo $NUMBER")
    assert [user.penroot("exec", name, *show).stdout for name in ("box", "one", "two")] == ["1\n", "1\n", "2\n"]
    user.penroot("stop", "one")
    assert user.penroot("exec", "box", *show).stdout == "2\n"
    user.penroot("stop", "two")
    assert "no running container box" in user.penroot("exec", "box", "true", status=1).stderr


def test_container_of_another_user_is_out_of_reach(user: User) -> None:
    detach(user, "box", "sleep", "600")
    pid = program(user)
    with ordinary_user(user.uid + 1) as other:
        for directory in (user.home / "run", user.home / "run/detached"):
            directory.chmod(0o755)
        other.environ["ENROOT_RUNTIME_PATH"] = str(user.home / "run")
        for target in ("job", str(pid)):
            for verb in (("stop",), ("ps",), ("wait",), ("logs",), ("cp", "/etc/hosts")):
                words = (*verb, f"{target}:/tmp") if verb[0] == "cp" else (*verb, target)
                assert "[ERROR]" in other.penroot(*words, status=125).stderr
            assert "[ERROR]" in other.penroot("exec", target, "true", status=1).stderr
        assert "sleep" not in other.penroot("list", "-f", env={"ENROOT_RUNTIME_PATH": str(other.home / "run")}).stdout
    (user.home / "run").chmod(0o700)
    assert pathlib.Path(f"/proc/{pid}").exists()
    user.penroot("stop", "job")
