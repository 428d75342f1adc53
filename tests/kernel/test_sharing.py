"""Containers of one squashfs file share its FUSE server."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
from collections.abc import Iterator

import pytest

from tests.kernel.conftest import PREFIX, User, pack, require, servers
from tests.waiting import until

UP = "echo up; read line; cat /etc/environment"
KINDS = [(), ("--root",), ("--rw",), ("--root", "--rw"), ("--pid",), ("--root", "--pid", "--net", "--ipc", "--uts")]


@contextlib.contextmanager
def up(user: User, *words: str, script: str = UP, prefix: tuple[str, ...] = ()) -> Iterator[subprocess.Popen[str]]:
    """Run a container until its stdin gets a line or closes."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    command = (*prefix, f"{PREFIX}/bin/penroot", "start", *words, "sh", "-c", script)
    with user.running(*command, **pipes) as run:
        assert run.stdout is not None and run.stdout.readline() == "up\n"
        yield run


def server(user: User) -> int:
    """Return the PID of the user's only FUSE server."""
    (pid,) = servers(user.home)
    return pid


def test_containers_of_one_file_share_a_server(user: User, image: pathlib.Path) -> None:
    """With each kind of options, a container with a shared server behaves as one with its own server."""
    show = "cat /proc/self/uid_map; touch /mine && ls /; ls /proc/self/ns; cat /etc/environment"
    alone = {kind: user.penroot("start", *kind, str(image), "sh", "-c", show, status=None).stdout for kind in KINDS}
    with contextlib.ExitStack() as stack:
        runs = [stack.enter_context(up(user, *kind, str(image))) for kind in KINDS]
        first = server(user)
        for kind in KINDS:
            assert user.penroot("start", *kind, str(image), "sh", "-c", show, status=None).stdout == alone[kind]
        assert server(user) == first
        for run in runs:  # the first one has started the server
            out, err = run.communicate("go\n", timeout=60)
            assert out.startswith("FROM_IMAGE=yes") and err == "" and run.returncode == 0
    until(lambda: not servers(user.home), "the end of the server with the last container")


def test_containers_that_start_together_share_a_server(user: User, image: pathlib.Path) -> None:
    """At the same time, the starts create the directory in which servers have their entries."""
    pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    command = (f"{PREFIX}/bin/penroot", "start", str(image), "sh", "-c", UP)
    for _ in range(10):
        shutil.rmtree(user.home / "run/servers", ignore_errors=True)
        with contextlib.ExitStack() as stack:
            runs = [stack.enter_context(user.running(*command, **pipes)) for _ in range(4)]
            for run in runs:
                assert run.stdout is not None and run.stdout.readline() == "up\n"
            server(user)
        until(lambda: not servers(user.home), "the end of the server with the last container")


def test_exec_enters_a_container_of_a_shared_server(user: User, image: pathlib.Path) -> None:
    with up(user, "--root", str(image)), up(user, "--root", "--rw", str(image)) as second:
        server(user)
        user.penroot("exec", str(second.pid), "touch", "/mine")
        assert user.penroot("exec", str(second.pid), "ls", "/mine").stdout == "/mine\n"


def test_replaced_file_gets_another_server(user: User, rootfs: pathlib.Path, image: pathlib.Path) -> None:
    """A new file of the same name gets a new server, and so does the same file after touch(1)."""
    (rootfs / "etc/environment").write_text("NEW=yes\n")
    new = pack(rootfs, user.home / "new.sqsh")
    user.own(new)
    with up(user, str(image)) as old:
        os.rename(new, image)
        assert user.start(str(image), "cat", "/etc/environment") == "NEW=yes\n"
        with up(user, str(image)):
            assert len(servers(user.home)) == 2
            os.utime(image)
            with up(user, str(image)):
                assert len(servers(user.home)) == 3
        assert old.communicate("go\n", timeout=60)[0].startswith("FROM_IMAGE=yes")


@pytest.mark.parametrize("kind", KINDS, ids=" ".join)
def test_data_of_the_same_file_has_another_server(user: User, image: pathlib.Path, kind: tuple[str, ...]) -> None:
    """If a container mounts the image file as data, the data has its own server, which ends with the container."""
    with up(user, str(image)):
        first = server(user)
        words = (*kind, "-m", f"{image}:/mnt:sqsh", str(image), "sh", "-c", "sleep 0.3; ls /mnt/bin/sh")
        done = user.penroot("start", *words)
        assert done.stdout == "/mnt/bin/sh\n" and done.stderr == ""
        until(lambda: [*servers(user.home)] == [first], "the server of the data ends")


@pytest.mark.parametrize("limit", ["ulimit -t 100", "ulimit -n 100", "renice -n 19 $$"])
def test_server_with_other_limits_is_not_shared(user: User, image: pathlib.Path, limit: str) -> None:
    """A server has the limits of the start that made it. These limits could end or slow the server."""
    prefix = ("sh", "-c", f'{limit} > /dev/null; exec "$@"', "sh")
    with up(user, str(image), prefix=prefix), up(user, str(image)):
        assert len(servers(user.home)) == 2


@pytest.mark.parametrize("kind", [(), ("--pid",), ("--root", "--pid")], ids=" ".join)
def test_each_container_names_a_killed_shared_server(user: User, image: pathlib.Path, kind: tuple[str, ...]) -> None:
    """Each container reports once that its server was killed. The next start starts a new server."""
    with up(user, *kind, str(image)) as first, up(user, *kind, str(image)) as second:
        os.kill(server(user), signal.SIGKILL)
        for run in (first, second):
            assert run.stderr is not None
            line = "" if run is first and kind else run.stderr.readline()
            _, err = run.communicate("go\n", timeout=60)
            assert (line + err).count(f" of {image} was killed") == 1 and run.returncode > 0
    with up(user, *kind, str(image)), up(user, *kind, str(image)):
        server(user)


def test_end_of_a_shared_server_is_not_named(user: User, image: pathlib.Path) -> None:
    """The server ends with the last container, even if another one has started it. No container prints a warning."""
    for kind in KINDS:
        with up(user, str(image)) as first, up(user, *kind, str(image)) as second:
            first.communicate("go\n", timeout=60)
            assert second.communicate("go\n", timeout=60)[1] == "" and second.returncode == 0
        until(lambda: not servers(user.home), "the server ends")


def test_stopped_server_is_not_joined(user: User, image: pathlib.Path) -> None:
    with up(user, str(image)) as first:
        stopped = server(user)
        os.kill(stopped, signal.SIGSTOP)
        assert user.start(str(image), "echo", "in") == "in\n"
        os.kill(stopped, signal.SIGCONT)
        assert first.communicate("go\n", timeout=60)[0].startswith("FROM_IMAGE=yes")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_containers_share_within_a_control_group(user: User, image: pathlib.Path) -> None:
    """Tasks of one step share a server, and steps do not: if Slurm kills a step's cgroup, the server in it ends."""
    roots = [pathlib.Path("/sys/fs/cgroup", name) for name in ("", "pids")]  # cgroup versions 2 and 1
    root = next((root for root in roots if os.access(root / "cgroup.procs", os.W_OK)), None)
    require(root, "no control group can be made")
    assert root is not None
    base = root / f"penroot-test-{os.getpid()}"
    groups = [base / name for name in ("step_0", "step_0/task_0", "step_0/task_1", "step_1")]
    try:
        for group in (base, *groups):
            group.mkdir()
        with contextlib.ExitStack() as stack:
            for group, count in zip(groups[1:], (1, 1, 2), strict=True):
                enter = ("sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh")
                stack.enter_context(up_in(user, image, enter))
                assert len(servers(user.home)) == count
        until(lambda: not servers(user.home), "the servers end")
    finally:
        for group in (*reversed(groups), base):
            until(lambda group=group: not (group / "cgroup.procs").read_text(), "the group is empty")  # type: ignore[misc]
            group.rmdir()


@contextlib.contextmanager
def up_in(user: User, image: pathlib.Path, prefix: tuple[str, ...]) -> Iterator[None]:
    """Run a container in the cgroup that ``prefix`` enters as root."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    command = (f"{PREFIX}/bin/penroot", "start", str(image), "sh", "-c", UP)
    with user.begin(*command, prefix=prefix, **pipes) as run:
        assert run.stdout is not None and run.stdout.readline() == "up\n"
        yield
        run.communicate("go\n", timeout=60)


def test_bundles_share_a_server(user: User, image: pathlib.Path) -> None:
    """A bundle's image begins at an offset in its file, so bundles do not share a server with the image's own file."""
    user.penroot("bundle", "-o", "own.run", str(image))
    pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    with user.running("./own.run", "sh", "-c", UP, **pipes) as run:
        assert run.stdout is not None and run.stdout.readline() == "up\n"
        assert user.run("./own.run", "cat", "/etc/environment").stdout.startswith("FROM_IMAGE=yes")
        assert user.start(str(image), "cat", "/etc/environment").startswith("FROM_IMAGE=yes")


def test_few_open_files_are_no_failure(user: User, image: pathlib.Path) -> None:
    """With few descriptors, a start beside another container of the image has the same result as a start alone."""
    assert shutil.which("bash")
    for limit in (7, 8, 9, 10, 12, 16):
        prefix = ("bash", "-c", f'ulimit -n {limit}; exec "$@"', "bash")
        alone = user.run(*prefix, f"{PREFIX}/bin/penroot", "start", str(image), "echo", "in", status=None)
        with up(user, str(image)) if alone.returncode else up(user, str(image), prefix=prefix):
            beside = user.run(*prefix, f"{PREFIX}/bin/penroot", "start", str(image), "echo", "in", status=None)
            assert (beside.returncode, beside.stdout) == (alone.returncode, alone.stdout)
            assert "Traceback" not in beside.stderr
