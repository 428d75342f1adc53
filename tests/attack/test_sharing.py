"""Only a trusted process may serve an image: no program in a container, no other user, no server of another file.

A start reads entries to find running servers. The attacker writes entries, as a program in a container could if the
container has the runtime directory mounted.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest

from tests.kernel.conftest import PREFIX, UID, User, ordinary_user, require, servers
from tests.kernel.test_sharing import server, up
from tests.waiting import until

KINDS = [(), ("--pid",), ("--root",), ("--rw",)]


def word(pid: int) -> str:
    """Return the word that identifies a server to a start."""
    words = pathlib.Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return next(word for word in words if word.startswith("fsname="))


@pytest.fixture
def entry(user: User, image: pathlib.Path) -> tuple[pathlib.Path, str]:
    """Return the entry of an image without a server, and the word of its last server."""
    with up(user, str(image)):
        named = word(server(user))
    until(lambda: not servers(user.home), "the server ends")
    (path,) = (user.home / "run/servers").iterdir()
    return path, named


@contextlib.contextmanager
def locked(path: pathlib.Path, pid: int | str) -> Iterator[None]:
    """Write an entry that names ``pid`` as the server, and let another process lock the entry while the block runs."""
    path.write_text(f"{pid}")
    held = subprocess.Popen(["flock", "-x", path, "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert held.stdin is not None and held.stdout is not None
    held.stdin.write(b"\n")
    held.stdin.flush()
    held.stdout.readline()
    try:
        yield
    finally:
        held.stdin.close()
        held.wait()


def starts_alone(user: User, image: pathlib.Path) -> bool:
    """Return whether a container starts a new server for the image."""
    before = servers(user.home)
    with up(user, str(image)) as run:
        found = servers(user.home).keys() - before.keys()
        out, err = run.communicate("go\n", timeout=60)
        assert out.startswith("FROM_IMAGE=yes") and err == ""
        return len(found) == 1


@pytest.mark.security("C13")
def test_process_in_a_container_is_no_server(
    user: User, rootfs: pathlib.Path, image: pathlib.Path, entry: tuple[pathlib.Path, str]
) -> None:
    """The impostor has the server's name in its arguments, the image open, and its own /dev/fuse."""
    path, named = entry
    script = f"exec 3< /image 4<> /dev/fuse; exec /bin/busybox setsid /bin/sh -c 'echo up; read line' {named}"
    for kind in ((), ("--root",), ("--pid",)):
        with up(user, *kind, "-m", f"{image}:/image:none:x-create=file,bind", "box", script=script):
            listed = subprocess.run(["pgrep", "-u", str(user.uid), "-f", named], capture_output=True, text=True)
            for pid in listed.stdout.split():
                with locked(path, pid):
                    assert starts_alone(user, image)


@pytest.mark.security("C13")
def test_process_of_another_user_is_no_server(user: User, image: pathlib.Path, entry: tuple[pathlib.Path, str]) -> None:
    """Two users of one file have two servers, whatever an entry contains."""
    path, named = entry
    with ordinary_user(UID + 1) as other, up(other, str(image)):
        (pid,) = servers(image)
        assert word(pid) == named
        with locked(path, pid):
            assert starts_alone(user, image)
        assert user.start(str(image), "echo", "in") == "in\n"


@pytest.mark.security("C13")
def test_server_of_another_file_is_not_joined(
    user: User, rootfs: pathlib.Path, image: pathlib.Path, entry: tuple[pathlib.Path, str]
) -> None:
    """The entry of one file names the server of another file."""
    path, _ = entry
    copy = user.home / "copy.sqsh"
    shutil.copy(image, copy)
    user.own(copy)
    with up(user, str(copy)), locked(path, server(user)):
        assert starts_alone(user, image)


@pytest.mark.security("C13")
@pytest.mark.parametrize("text", ["", "1", "0", "-5", "9999999", "nobody", "\0" * 9, "1" * 99])
def test_entry_that_says_nonsense_is_passed_over(
    user: User, image: pathlib.Path, entry: tuple[pathlib.Path, str], text: str
) -> None:
    """A start ignores the entry, and does not wait long for the lock that another process holds on it."""
    with locked(entry[0], text):
        assert starts_alone(user, image)
    assert user.start(str(image), "echo", "in") == "in\n"


@pytest.mark.security("C13")
@pytest.mark.parametrize("kind", ["fifo", "link", "directory", "file"])
def test_entry_that_is_no_file_is_passed_over(
    user: User, image: pathlib.Path, entry: tuple[pathlib.Path, str], kind: str
) -> None:
    path, precious = entry[0], user.write("precious", "mine")
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(precious)
    elif kind == "directory":
        path.mkdir()
    else:
        path.parent.rmdir()
        path.parent.write_text("")
    user.own(user.home / "run")
    assert starts_alone(user, image)
    assert precious.read_text() == "mine"


@pytest.mark.security("C13")
def test_container_with_own_processes_cannot_stop_the_server(user: User, image: pathlib.Path) -> None:
    """Only a container without a PID namespace can stop the server, because it sees the processes of its user."""
    with up(user, str(image)) as first:
        pid = server(user)
        script = f"kill -STOP {pid} || kill -KILL {pid} || echo no"
        for kind in (("--pid",), ("--pid", "--root")):
            assert user.start(*kind, str(image), "sh", "-c", script) == "no\n"
        assert server(user) == pid
        assert first.communicate("go\n", timeout=60)[0].startswith("FROM_IMAGE=yes")


@pytest.mark.security("C13")
def test_root_cannot_remount_a_shared_file_system(user: User, image: pathlib.Path) -> None:
    """Neither the file system nor its mount becomes writable for a second container."""
    script = "mount -o remount,rw /; mount -o remount,rw / / ; touch /bin/mine; umount /; ls /bin/mine"
    with up(user, str(image)), up(user, "--root", str(image)):
        server(user)
        done = user.penroot("start", "--root", str(image), "sh", "-c", script, status=None)
        assert done.returncode and "mine" not in done.stdout


@pytest.mark.soak
@pytest.mark.security("C13")
def test_last_one_leaves_as_the_first_one_comes(
    user: User, image: pathlib.Path, rng: random.Random, soak: bool
) -> None:
    """Containers, starts and servers are killed at any moment: each start works or names the cause; nothing is left."""
    require(os.geteuid() == 0, "only root sees all processes of the user")
    pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    runs: list[subprocess.Popen[str]] = []
    killed: set[int] = set()
    for _ in range(200 if soak else 30):
        script = f"sleep {rng.uniform(0, 0.3):.2f}; cat /etc/environment"
        command = (f"{PREFIX}/bin/penroot", "start", *rng.choice(KINDS), str(image), "sh", "-c", script)
        runs.append(user.begin(*command, **pipes))
        time.sleep(rng.uniform(0, 0.1))
        victim = rng.choice(("one", "all", "server", "nobody"))
        for run in [rng.choice(runs)] if victim == "one" else runs if victim == "all" else []:
            killed.add(run.pid)
            run.kill()
        for pid in servers(user.home) if victim == "server" else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    for run in runs:
        out, err = run.communicate(timeout=60)
        worked = run.returncode == 0 and out.startswith("FROM_IMAGE=yes")
        # In the first fifth of a second, no process of ours exists yet that could explain the death of the server: the
        # program then prints the kernel's error.
        names_cause = "squashfuse" in err or "Transport endpoint is not connected" in err or "Bus error" in err
        assert worked or run.pid in killed or names_cause, (run.returncode, out, err)
        assert "Traceback" not in err
    until(lambda: not servers(user.home), "the servers end")
    assert user.start(str(image), "echo", "in") == "in\n"
