"""Attacks through directories that penroot would trust, but that another user has created, owns or can write to."""

from __future__ import annotations

import os
import pathlib
import subprocess

import pytest

from tests import images
from tests.attack.conftest import BOB, UID
from tests.kernel.conftest import User, busybox_rootfs


def planted(data: pathlib.Path, owner: int = BOB) -> None:
    """Create a container of bob's, with a program that the victim must not run."""
    busybox_rootfs(data / "w")
    (data / "w/bin/echo").unlink()
    (data / "w/bin/echo").write_text("#!/bin/sh\nbusybox echo BOB RUNS AS $(id -u)\n")
    (data / "w/bin/echo").chmod(0o755)
    subprocess.run(["chown", "-hR", f"{owner}:{owner}", str(data)], check=True)


@pytest.mark.parity("ENROOT_DATA_PATH")
@pytest.mark.security("U1")
@pytest.mark.parametrize("how", ["bob's", "bob's container", "above", "link", "not sticky", "group"])
def test_the_data_path_of_another_user(user: User, scratch: pathlib.Path, how: str) -> None:
    """Bob has created the victim's data path or can change it, and has put a container ``w`` there."""
    data = scratch / f"enroot-data-{UID}"
    planted(data)
    data.chmod(0o777)
    if how == "bob's container":
        os.chown(data, UID, UID)
        data.chmod(0o755)
    elif how == "above":
        (scratch / "bobs").mkdir()
        os.chown(scratch / "bobs", BOB, BOB)
        data = data.rename(scratch / "bobs/data")
        os.chown(data, UID, UID)
        data.chmod(0o755)
    elif how == "link":
        data.rename(scratch / "real")
        data.symlink_to("real")
        os.chown(scratch / "real", UID, UID)
        (scratch / "real").chmod(0o755)
        os.chown(data, BOB, BOB, follow_symlinks=False)
    elif how == "not sticky":
        os.chown(data, UID, UID)
        data.chmod(0o755)
        scratch.chmod(0o777)
    elif how == "group":
        os.chown(data, UID, BOB)
        data.chmod(0o775)
    done = user.penroot("start", "w", "echo", status=1, env={"ENROOT_DATA_PATH": str(data)})
    assert "BOB" not in done.stdout + done.stderr
    assert f"uid {BOB}" in done.stderr or "others can replace" in done.stderr or "written by others" in done.stderr


@pytest.mark.security("U1")
def test_data_path_of_another_user_is_left_alone(user: User, scratch: pathlib.Path) -> None:
    data = scratch / "data"
    planted(data)
    data.chmod(0o777)
    env = {"ENROOT_DATA_PATH": str(data)}
    for command in (("list",), ("remove", "-f", "w"), ("export", "w"), ("start", "--rw", "w", "touch", "/x")):
        assert f"belongs to uid {BOB}" in user.penroot(*command, status=1, env=env).stderr, command
    assert sorted(path.name for path in data.iterdir()) == ["w"]


@pytest.mark.security("U1")
def test_container_never_uses_a_store_of_bobs(user: User, scratch: pathlib.Path) -> None:
    """Bob owns the image store of the victim's container: a cleaner of /var/tmp removed it, and bob made it anew."""
    cache = scratch / f"cache-{UID}"
    env = {"ENROOT_CACHE_PATH": str(cache)}
    box = images.busybox()
    blobs = [layer.blob for layer in box.layers] + [box.config(), box.manifest()]
    images.write_layout(user.home / "layout", blobs, images.index([(box, {"architecture": "amd64", "os": "linux"})]))
    user.own(user.home / "layout")
    user.penroot("create", "--name", "mine", f"oci:{user.home}/layout", env=env)
    assert user.start("mine", "echo", "fine", env=env) == "fine\n"
    subprocess.run(["chown", "-hR", f"{BOB}:{BOB}", str(cache)], check=True)
    subprocess.run(["chmod", "-R", "a+rX", str(cache)], check=True)
    stderr = user.penroot("start", "mine", "echo", "fine", status=1, env=env).stderr
    assert f"belongs to uid {BOB}" in stderr


@pytest.mark.security("U2")
@pytest.mark.parametrize("which", ["config", "sysconf"])
@pytest.mark.parametrize("how", ["bob's", "everybody's", "hooks.d"])
def test_settings_and_hooks_of_another_user(
    user: User, rootfs: pathlib.Path, scratch: pathlib.Path, which: str, how: str
) -> None:
    """Bob owns the directory of settings or can write to it, and its hooks would run as the victim."""
    conf = scratch / "conf"
    (conf / "hooks.d").mkdir(parents=True)
    hook = conf / "hooks.d/10-evil.sh"
    hook.write_text(f"#!/bin/sh\nid -u > {user.home}/ran\n")
    hook.chmod(0o755)
    for path in (conf, conf / "hooks.d", hook):
        os.chown(path, BOB if how == "bob's" else UID, -1)
    if how != "bob's":
        (conf if how == "everybody's" else hook.parent).chmod(0o777)
    variable = {"config": "ENROOT_CONFIG_PATH", "sysconf": "ENROOT_SYSCONF_PATH"}[which]
    stderr = user.penroot("start", "box", "true", status=1, env={variable: str(conf)}).stderr
    assert "not trusted" in stderr and str(conf) in stderr
    assert not (user.home / "ran").exists()


@pytest.mark.security("U2")
@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("enroot.conf", "ENROOT_REMAP_ROOT yes\n", "start box true"),
        ("registries.conf", "localhost token=registry.of.bob\n", "digest docker://localhost:9#x:1"),
    ],
)
def test_a_file_of_settings_that_everybody_writes(
    user: User, rootfs: pathlib.Path, name: str, text: str, words: str
) -> None:
    """A FIFO in place of the file is refused too: a read from it would block."""
    etc = user.home / "etc"
    etc.mkdir()
    (etc / name).write_text(text)
    (etc / name).chmod(0o666)
    user.own(etc)
    assert "can be written by others" in user.penroot(*words.split(), status=1).stderr
    (etc / name).unlink()
    os.mkfifo(etc / name)
    assert "not a regular file" in user.penroot(*words.split(), status=1, prefix=("timeout", "100")).stderr


@pytest.mark.parity("ENROOT_CACHE_PATH")
@pytest.mark.security("U6")
@pytest.mark.parametrize("kind", ["everybody's", "a group's", "a colleague's"])
def test_shared_paths_give_each_user_a_place_of_his_own(
    user: User, bob: User, scratch: pathlib.Path, kind: str
) -> None:
    """A cache of mode 1777, or 2770 for a group, is no error, and nobody reads or changes another user's files."""
    (scratch / "raid").mkdir(0o755)
    places = {f"ENROOT_{name}_PATH": scratch / "raid" / name.lower() for name in ("CACHE", "RUNTIME", "DATA")}
    for path in places.values():
        path.mkdir()
        if kind == "everybody's":
            path.chmod(0o1777)
        else:
            os.chown(path, 0 if kind == "a group's" else BOB, 27009)
            path.chmod(0o2770 if kind == "a group's" else 0o770)
    env = {name: str(path) for name, path in places.items()}
    box = images.busybox()
    blobs = [layer.blob for layer in box.layers] + [box.config(), box.manifest()]
    layout = scratch / "layout"
    images.write_layout(layout, blobs, images.index([(box, {"architecture": "amd64", "os": "linux"})]))
    user.groups = bob.groups = (27009,)
    # Bob comes first and creates the victim's directories.
    for path in places.values():
        bob.run("mkdir", "-m", "777", f"{path}/user-{UID}")
    for who in (user, bob) if kind != "a colleague's" else (user,):
        who.penroot("create", "--name", "w", f"oci:{layout}", env=env)
        assert who.start("w", "echo", "fine", env=env) == "fine\n"
        who.start("--rw", "w", "sh", "-c", "echo more > /etc/more && mkdir /bin/new && rm /bin/echo", env=env)
    for path in places.values():
        mine = [entry for entry in path.iterdir() if entry.stat().st_uid == UID]
        assert len(mine) == 1 and mine[0].stat().st_mode & 0o777 == 0o700
