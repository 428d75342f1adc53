"""Another user creates the directories of the victim's programs first, or swaps them during a run."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pathlib
import shutil
import subprocess
import time

import pytest

from tests import images
from tests.attack.conftest import BOB, UID
from tests.fakeregistry import Reply, fake
from tests.kernel.conftest import PREFIX, User, busybox_rootfs, require
from tests.waiting import until


@pytest.fixture
def tmp(user: User, scratch: pathlib.Path) -> pathlib.Path:
    """Return a directory like /tmp, in which the victim has temporary files."""
    del user.environ["ENROOT_RUNTIME_PATH"]
    user.environ["TMPDIR"] = str(scratch)
    return scratch


def evil(directory: pathlib.Path) -> None:
    """Create the squatter's scratch directory, with a root file system for the victim to mount and run."""
    root = directory / "root"
    busybox_rootfs(root)
    (root / "bin/sh").unlink()
    for name in ("sh", "echo"):
        (root / "bin" / name).unlink(missing_ok=True)
        (root / "bin" / name).write_text("#!/bin/busybox sh\nbusybox echo SQUATTED\n")
        (root / "bin" / name).chmod(0o755)
    subprocess.run(["chown", "-hR", f"{BOB}:{BOB}", str(directory)], check=True)
    subprocess.run(["chmod", "-R", "a+rwX", str(directory)], check=True)


def swap(squatted: str, name: str, prepared: str, stop: object) -> None:
    """As bob, until ``stop``: swap the victim's file with bob's prepared file, and back."""
    os.setgid(BOB)
    os.setuid(BOB)
    os.umask(0)
    aside, path = f"{squatted}/aside", f"{squatted}/{name}"
    while not stop.is_set():  # type: ignore[attr-defined]
        try:
            os.rename(path, aside)
            os.rename(prepared, path)
            time.sleep(0.001)
            os.rename(path, prepared)
            os.rename(aside, path)
        except OSError:
            time.sleep(0.0005)


class Squatter:
    """Bob has created ``path`` for the victim to use, and keeps swapping what the victim creates in it."""

    def __init__(self, path: pathlib.Path, name: str) -> None:
        path.mkdir()
        evil(path / "prepared")
        os.chown(path, BOB, BOB)
        path.chmod(0o777)
        fork = multiprocessing.get_context("fork")  # Python 3.14's default is a fork server, which would remain
        self._stop = fork.Event()
        arguments = (str(path), name, str(path / "prepared"), self._stop)
        self._process = fork.Process(target=swap, args=arguments)

    def __enter__(self) -> None:
        self._process.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._process.join()


RUNTIME_PATHS = {"default": ("", "penroot-{}", "enroot"), "configured": ("{}/enroot-run-{}", "enroot-run-{}", "root")}


@pytest.mark.parity("ENROOT_RUNTIME_PATH")
@pytest.mark.security("U3")
@pytest.mark.soak
@pytest.mark.parametrize("which", RUNTIME_PATHS)
def test_a_squatted_runtime_path_costs_nothing_and_gives_nothing(
    user: User, rootfs: pathlib.Path, tmp: pathlib.Path, which: str, soak: bool
) -> None:
    """Bob creates /tmp/penroot-UID first and swaps its content while the victim starts."""
    setting, name, beneath = RUNTIME_PATHS[which]
    env = {"ENROOT_RUNTIME_PATH": setting.format(tmp, UID)} if setting else {}
    with Squatter(tmp / name.format(UID), beneath):
        for _ in range(500 if soak else 5):
            done = user.penroot("start", "box", "sh", "-c", "echo fine", env=env)
            assert done.stdout == "fine\n"
            assert f"belongs to uid {BOB}" in done.stderr
    private = [path for path in tmp.iterdir() if path.stat().st_uid == UID]
    assert len(private) == 1  # one directory for all starts
    assert private[0].stat().st_mode & 0o777 == 0o700


@pytest.mark.security("U3")
@pytest.mark.soak
@pytest.mark.parametrize("which", RUNTIME_PATHS)
def test_nothing_is_swapped_at_any_system_call(
    user: User, rootfs: pathlib.Path, tmp: pathlib.Path, which: str, soak: bool
) -> None:
    """The victim is delayed at each system call that takes a path, while bob swaps the files that he can."""
    require(shutil.which("strace"), "strace is not installed")
    setting, name, beneath = RUNTIME_PATHS[which]
    env = {"ENROOT_RUNTIME_PATH": setting.format(tmp, UID)} if setting else {}
    calls = "%file,mount_setattr,fsmount,pivot_root"
    delay = 20000 if soak else 2000  # microseconds: long enough for bob to swap and swap back
    with Squatter(tmp / name.format(UID), beneath):
        done = user.run(
            *("strace", "-f", "-qqq", "-o", "/dev/null", f"--trace={calls}", f"--inject={calls}:delay_enter={delay}"),
            *(f"{PREFIX}/bin/penroot", "start", "box", "sh", "-c", "echo fine"),
            env=env,
        )
    assert done.stdout == "fine\n"


@pytest.mark.security("U3")
@pytest.mark.parametrize("what", ["a file", "a link", "a FIFO", "a closed directory"])
def test_squatters_special_files_are_skipped(user: User, rootfs: pathlib.Path, tmp: pathlib.Path, what: str) -> None:
    """A path of bob's that the victim cannot use as a directory costs the victim nothing."""
    path = tmp / f"penroot-{UID}"
    if what == "a file":
        path.touch()
    elif what == "a link":
        path.symlink_to(user.home)
    elif what == "a FIFO":
        os.mkfifo(path)
    else:
        path.mkdir(0o700)
    os.chown(path, BOB, BOB, follow_symlinks=False)
    assert user.start("box", "sh", "-c", "echo fine") == "fine\n"
    assert not (user.home / "enroot").exists()


@pytest.mark.security("U3")
def test_trees_of_an_import_are_not_those_of_a_squatter(user: User, tmp: pathlib.Path) -> None:
    """Before the fix, an import followed another user's link /tmp/penroot-UID.trees, and deleted the link's target."""
    victim = user.home / "precious"
    (victim / "tmp").mkdir(parents=True)
    (victim / "tmp/file").mkdir()
    user.own(victim)
    (tmp / f"penroot-{UID}.trees").symlink_to(victim)
    os.chown(tmp / f"penroot-{UID}.trees", BOB, BOB, follow_symlinks=False)
    box = images.busybox()
    blobs = [layer.blob for layer in box.layers] + [box.config(), box.manifest()]
    platform = {"architecture": "amd64", "os": "linux"}
    images.write_layout(user.home / "layout", blobs, images.index([(box, platform)]))
    user.own(user.home / "layout")
    user.penroot("import", "-o", "x.sqsh", f"oci:{user.home}/layout", env={"ENROOT_STORE_FORM": "squashfs"})
    assert (victim / "tmp/file").is_dir() and not (victim / "layers").exists()


@pytest.mark.security("U5")
def test_bundle_refuses_a_directory_that_others_rearrange(user: User, image: pathlib.Path, tmp: pathlib.Path) -> None:
    """In a TMPDIR that is not sticky (0777, or a group's), another user could swap a bundle's programs."""
    user.penroot("bundle", "-o", "box.run", str(image))
    assert user.run("./box.run", "sh", "-c", "echo fine").stdout == "fine\n"
    tmp.chmod(0o777)
    stderr = user.run("./box.run", "sh", "-c", "echo fine", status=1).stderr
    assert "not sticky" in stderr and "ENROOT_TEMP_PATH" in stderr
    assert list(tmp.iterdir()) == []


@pytest.mark.parity("neither an image nor another user can make or redirect a record")
@pytest.mark.security("U4")
@pytest.mark.parametrize("squat", ["file", "link", "pipe", "directory"])
def test_file_of_another_user_gets_no_events(
    user: User, bob: User, scratch: pathlib.Path, rootfs: pathlib.Path, squat: str
) -> None:
    """Bob creates the victim's event file in a shared directory first. The start continues with a warning."""
    path, precious = scratch / f"{user.uid}.jsonl", user.home / "precious"
    precious.write_text("precious\n")
    user.own(precious)
    make = {
        "file": f"touch {path}; chmod 666 {path}",
        "link": f"ln -s {precious} {path}",
        "pipe": f"mkfifo -m 666 {path}",
        "directory": f"mkdir -m 777 {path}",
    }
    bob.run("sh", "-c", make[squat])
    done = user.penroot("start", "box", "echo", "started", env={"ENROOT_EVENTS": str(scratch)})
    assert done.stdout == "started\n"
    assert f"events are not recorded: {path}: " in done.stderr
    assert precious.read_text() == "precious\n" and not (path.is_file() and path.stat().st_size > 9)


def swap_file(directory: str, stop: object) -> None:
    """As bob, until ``stop``: put bob's file in the place of the victim's, and back."""
    os.setgid(BOB)
    os.setuid(BOB)
    while not stop.is_set():  # type: ignore[attr-defined]
        for name in ("theirs", "mine"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{directory}/new")
            try:
                os.link(f"{directory}/{name}", f"{directory}/new")
                os.rename(f"{directory}/new", f"{directory}/it.toml")
            except OSError:  # the kernel may forbid hard links to another user's file
                os.symlink(name, f"{directory}/new")
                os.rename(f"{directory}/new", f"{directory}/it.toml")


@pytest.mark.parity("a file or directory that others can write to is not trusted")
@pytest.mark.security("H5")
@pytest.mark.parametrize("way", ["path", "name", "base"])
def test_environment_file_of_another_user_is_refused(user: User, scratch: pathlib.Path, way: str) -> None:
    """The file would choose the image and the mounts of a container that runs as the victim."""
    (scratch / "it.toml").write_text('image = "/squatted.sqsh"\n')
    os.chown(scratch / "it.toml", BOB, BOB)
    own = user.home / "own.toml"
    own.write_text(f'base_environment = "{scratch}/it.toml"\n')
    user.own(own)
    asked = {"path": "./it.toml", "name": "it.toml", "base": str(own)}[way]
    for verb in (("start", f"--environment={asked}", "true"), ("env", "render", asked)):
        done = user.penroot(*verb, cwd=scratch, status=1)
        assert f"it.toml: belongs to uid {BOB}, not to uid {UID} or root: the file is not trusted" in done.stderr
        assert "squatted" not in done.stdout


@pytest.mark.security("H5")
def test_an_environment_file_that_another_user_swaps(user: User, scratch: pathlib.Path) -> None:
    """penroot reads the victim's file or fails, and never reads bob's."""
    directory = scratch / "open"
    directory.mkdir()
    directory.chmod(0o777)
    for name, owner in (("mine", user.uid), ("theirs", BOB)):
        (directory / name).write_text(f'image = "/{name}.sqsh"\n')
        os.chown(directory / name, owner, owner)
    shutil.copy2(directory / "mine", directory / "it.toml")
    os.chown(directory / "it.toml", user.uid, user.uid)
    context = multiprocessing.get_context("fork")
    stop = context.Event()
    process = context.Process(target=swap_file, args=(str(directory), stop))
    process.start()
    try:
        for _ in range(20):
            done = user.run("sh", "-c", f"{PREFIX}/bin/penroot env render {directory}/it.toml || true")
            assert "theirs" not in done.stdout, done.stdout
            assert "mine.sqsh" in done.stdout or "is not trusted" in done.stderr, done.stderr
    finally:
        stop.set()
        process.join()


@pytest.mark.security("U12")
def test_lock_on_a_directory_of_logins_holds_no_login(user: User) -> None:
    """Another user may open and so lock ~/.docker, but penroot login and logout do not wait for that lock."""
    require(os.geteuid() == 0, "only root can act as two users")
    directory = user.home / ".docker"
    directory.mkdir(mode=0o755)
    directory.chmod(0o755)
    user.home.chmod(0o755)
    user.own(directory)
    holder = subprocess.Popen(
        ["setpriv", f"--reuid={BOB}", f"--regid={BOB}", "--clear-groups", "flock", str(directory), "cat"],
        stdin=subprocess.PIPE,
    )
    try:
        taken = ["flock", "--nonblock", str(directory), "true"]
        until(lambda: subprocess.run(taken, check=False).returncode != 0, "the lock is taken")
        with fake(lambda request: Reply(200, {}, b"{}")) as registry:
            for words in (("login", "-u", "me", registry.host), ("logout", registry.host)):
                user.run("sh", "-c", f"echo secret | timeout 60 {PREFIX}/bin/penroot {' '.join(words)}")
    finally:
        holder.communicate()
    assert [path.name for path in directory.iterdir()] == ["config.json"]
