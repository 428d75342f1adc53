"""Squashfs images whose files belong to other users, and a squashfuse that is killed or stopped."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import time

import pytest

from tests.kernel.conftest import User, require, squashed
from tests.waiting import until

# Options of mksquashfs(1) that set the owners of the files
OWNERS = {
    "one": ("-force-uid", "4242", "-force-gid", "4242"),
    "two": ("-force-uid", "4242", "-force-gid", "4243"),
    "group": ("-force-uid", "0", "-force-gid", "4243"),
    "mixed": ("-p", "/bin m 755 7 8", "-p", "/etc m 700 9 0"),
}
OPTIONS = [(), ("--root",), ("--rw",), ("--root", "--rw"), ("--pid",)]
SHOW = "stat -c %u:%g /etc /bin/busybox; touch /etc/mine 2> /dev/null && stat -c %u:%g /etc/mine; cat /etc/private"


def owned(user: User, tree: pathlib.Path, owners: str) -> pathlib.Path:
    """Make a squashfs file of ``tree``. ``owners`` is a key of OWNERS."""
    squashed(user, tree)  # checks that the programs are installed, and opens /dev/fuse to users
    path = user.home / f"{owners}.sqsh"
    options = [*OWNERS[owners], "-noappend", "-quiet", "-no-progress"]
    subprocess.run(["mksquashfs", tree, path, *options], check=True)
    user.own(path)
    return path


@pytest.fixture
def tree(user: User, rootfs: pathlib.Path) -> pathlib.Path:
    (rootfs / "etc/private").write_text("private\n")
    (rootfs / "etc/private").chmod(0o600)
    return rootfs


@pytest.mark.parametrize("owners", OWNERS)
def test_image_of_other_owners_starts_like_an_unpacked_one(user: User, tree: pathlib.Path, owners: str) -> None:
    image = owned(user, tree, owners)
    user.penroot("create", "-n", "unpacked", str(image))
    for options in OPTIONS:
        shown = user.start(*options, str(image), "sh", "-c", SHOW)
        assert shown == user.start(*options, "unpacked", "sh", "-c", SHOW)
        me = "0:0" if "--root" in options else f"{user.uid}:{user.uid}"
        assert shown.split() == [me, me, *([me] if "--rw" in options else []), "private"]


def test_image_of_other_owners_under_fuse_overlayfs(user: User, tree: pathlib.Path) -> None:
    require(shutil.which("fuse-overlayfs"), "fuse-overlayfs is not installed")
    image, me = owned(user, tree, "two"), f"{user.uid}:{user.uid}"
    shown = user.start("--rw", str(image), "sh", "-c", SHOW, env={"ENROOT_NATIVE_OVERLAYFS": "no"})
    assert shown.split() == [me, me, me, "private"]


def test_container_over_image_of_other_owners_is_exported(user: User, tree: pathlib.Path) -> None:
    """The exported image also has the files that only their owner may read."""
    image = owned(user, tree, "mixed")
    user.penroot("create", "-n", "box2", str(image))
    user.penroot("export", "-o", "out.sqsh", "box2")
    assert user.start("out.sqsh", "cat", "/etc/private") == "private\n"


def test_data_of_other_owners_belong_to_the_caller(user: User, rootfs: pathlib.Path, tree: pathlib.Path) -> None:
    for owners in ("one", "mixed"):
        data = owned(user, tree, owners)
        for options, me in (((), f"{user.uid}:{user.uid}"), (("--root",), "0:0")):
            words = (*options, "--mount", f"{data}:/mnt:sqsh", "box", "stat", "-c", "%u:%g", "/mnt/etc", "/mnt/bin")
            assert user.start(*words).split() == [me, me]


def test_bundle_of_other_owners_runs(user: User, tree: pathlib.Path) -> None:
    image = owned(user, tree, "two")
    user.penroot("bundle", "-o", "own.run", str(image))
    me = f"{user.uid}:{user.uid}"
    for options in ((), ("--root",), ("--rw",)):
        shown = user.run("./own.run", *options, "sh", "-c", "stat -c %u:%g /etc; cat /etc/private").stdout.split()
        assert shown == ["0:0" if "--root" in options else me, "private"]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize("unpack", ["no", "yes"])
def test_root_starts_image_of_other_owners(user: User, tree: pathlib.Path, unpack: str) -> None:
    image = owned(user, tree, "two")
    subprocess.run(["chown", "-hR", "0:0", user.home], check=True)
    user.uid = 0

    def start(*options: str, **env: str) -> list[str]:
        words = (*options, str(image), "stat", "-c", "%u:%g", "/etc")
        return user.start(*words, env={"ENROOT_UNPACK": unpack, **env}).split()

    assert start() == start("--root") == ["0:0"]
    # Root sees the recorded owners if it keeps its privileges.
    assert start(ENROOT_ALLOW_SUPERUSER="yes", ENROOT_CACHE_PATH=f"{user.home}/other") == ["4242:4243"]


def started_under_strace(user: User, signal: str, *words: str, **env: str) -> str:
    """Start a container whose FUSE server gets a signal before its parent knows its PID. Return stderr."""
    require(shutil.which("strace"), "strace is not installed")
    strace = ("strace", "-f", "-qqq", "-o", "/dev/null", f"--inject=setsid:signal={signal}")
    began = time.monotonic()
    stderr = user.run(*strace, "penroot", "start", *words, env=env, status=1).stderr
    assert time.monotonic() - began < 10
    assert "Traceback" not in stderr
    until(lambda: not running(user), "no process of the user is left", 20)
    return stderr


@pytest.mark.security("L5")
@pytest.mark.parametrize("options", [(), ("--pid",), ("--root", "--rw")], ids=" ".join)
@pytest.mark.parametrize("signal", ["KILL", "STOP"])
def test_squashfuse_killed_as_it_starts(user: User, image: pathlib.Path, signal: str, options: tuple[str, ...]) -> None:
    lines = started_under_strace(user, signal, *options, str(image), "true").splitlines()
    reason = "its squashfuse was killed" if signal == "KILL" else "squashfuse is stopped"
    assert len(lines) == 2 and lines[0].startswith("[ERROR]") and reason in lines[0] and lines[1].startswith("[HINT]")
    assert user.start(*options, str(image), "echo", "up") == "up\n"


@pytest.mark.parametrize("signal", ["KILL", "STOP"])
def test_server_of_data_killed_as_it_starts(user: User, image: pathlib.Path, signal: str) -> None:
    assert "squashfuse" in started_under_strace(user, signal, "--mount", f"{image}:/mnt:sqsh", "box", "true")


@pytest.mark.parametrize(("signal", "reason"), [("KILL", "ended at once"), ("STOP", "is stopped")])
def test_fuse_overlayfs_killed_as_it_starts(user: User, rootfs: pathlib.Path, signal: str, reason: str) -> None:
    require(shutil.which("fuse-overlayfs"), "fuse-overlayfs is not installed")
    stderr = started_under_strace(user, signal, "box", "true", ENROOT_NATIVE_OVERLAYFS="no")
    assert f"fuse-overlayfs {reason}" in stderr


def killed_while_running(user: User, server: str, *words: str, **env: str) -> tuple[int, str]:
    """Kill the FUSE servers of a container, and let its program continue. Return the exit status and stderr."""
    command = ("penroot", "start", *words, "sh", "-c", "echo up; read line; ls /usr /mnt; exit 3")
    run = user.begin(*command, env=env, **dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE))
    assert run.stdout is not None and run.stderr is not None and run.stdout.readline() == "up\n"
    subprocess.run(["pkill", "-KILL", "-u", str(user.uid), server], check=True)
    line = "" if "--pid" in words else run.stderr.readline()  # wait for the line of penroot-follow
    _, err = run.communicate("go\n", timeout=60)
    assert (line + err).count(" was killed") == 1
    return run.returncode, line + err


@pytest.mark.parametrize("options", [("--pid",), ("--pid", "--root")], ids=" ".join)
def test_start_with_pid_names_killed_squashfuse(user: User, image: pathlib.Path, options: tuple[str, ...]) -> None:
    """The error comes from the process that waits for the container outside its PID namespace."""
    status, err = killed_while_running(user, "squashfuse", *options, str(image))
    assert status > 0
    assert f" of {image} was killed by signal 9 while the container ran" in err
    assert "squashfuse" not in user.penroot("start", *options, str(image), "true").stderr


@pytest.mark.parametrize("options", [(), ("--root",), ("--rw",)], ids=" ".join)
def test_start_names_killed_squashfuse(user: User, image: pathlib.Path, options: tuple[str, ...]) -> None:
    status, err = killed_while_running(user, "squashfuse", *options, str(image))
    assert status > 0
    assert f"[WARN] squashfuse of {image} was killed while the container ran" in err


def test_start_names_killed_server_of_data(user: User, image: pathlib.Path) -> None:
    status, err = killed_while_running(user, "squashfuse", "--mount", f"{image}:/mnt:sqsh", "box")
    assert status == 3
    assert f"squashfuse of {image} was killed while the container ran" in err


@pytest.mark.parametrize("target", ["box", "box.sqsh"])
def test_start_names_killed_fuse_overlayfs(user: User, image: pathlib.Path, target: str) -> None:
    require(shutil.which("fuse-overlayfs"), "fuse-overlayfs is not installed")
    status, err = killed_while_running(user, "fuse-overlayfs", target, ENROOT_NATIVE_OVERLAYFS="no")
    assert status > 0
    assert "[WARN] fuse-overlayfs of the root file system was killed while the container ran" in err


def test_normal_end_of_a_server_is_not_reported(user: User, image: pathlib.Path) -> None:
    (user.home / "bad.sqsh").write_bytes(b"hsqs" + bytes(4096))
    user.own(user.home / "bad.sqsh")
    fstab = f"{user.home}/bad.sqsh /mnt sqsh nofail 0 0"
    for words in ((), ("--rw",), ("--mount", fstab), ("--mount", f"{image}:/mnt:sqsh")):
        for command in (("true",), ("sh", "-c", "sleep 0.3; kill -KILL $$")):
            done = user.penroot("start", *words, str(image), *command, status=-9 * (len(command) > 1))
            assert "squashfuse of" not in done.stderr


def test_exec_names_killed_squashfuse(user: User, image: pathlib.Path) -> None:
    pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    with user.running("penroot", "start", str(image), "sh", "-c", "echo up; read line", **pipes) as run:
        assert run.stdout is not None and run.stdout.readline() == "up\n"
        subprocess.run(["pkill", "-KILL", "-u", str(user.uid), "squashfuse"], check=True)
        done = user.penroot("exec", str(run.pid), "/bin/ls", status=126)
        assert "cannot run /bin/ls: Transport endpoint is not connected" in done.stderr
        assert "its squashfuse was killed" in done.stderr


def test_image_starts_with_few_open_files(user: User, image: pathlib.Path) -> None:
    """A descriptor of the caller may have a number above the limit, which ulimit has lowered afterwards."""
    script = 'exec 250< /dev/null; ulimit -n 12; exec "$@"'
    assert user.run("bash", "-c", script, "bash", "penroot", "start", str(image), "echo", "up").stdout == "up\n"
    # The program inherits the descriptor, although its number is above the limit.
    shown = user.run("bash", "-c", script, "bash", "penroot", "start", str(image), "readlink", "/proc/self/fd/250")
    assert shown.stdout.strip().endswith("null")


def running(user: User) -> list[str]:
    command = ["ps", "-o", "stat=,args=", "-u", str(user.uid)]
    listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return [line for line in listed.splitlines() if not line.startswith("Z")]
