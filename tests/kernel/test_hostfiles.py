"""Containers have the host's /etc/hosts, /etc/hostname and /etc/resolv.conf, also after these files change."""

from __future__ import annotations

import os
import pathlib
import shlex
import subprocess
import time

import pytest

from tests.kernel.conftest import User, require
from tests.waiting import until

# Run in a container: print "up", wait until the files have both changes, and print how many lines have each.
FOLLOW = """
echo up; n=0
until grep -q fresh /etc/resolv.conf && grep -q n77 /etc/hosts || [ $n = 300 ]; do sleep 0.1; n=$((n+1)); done
echo $(grep -c fresh /etc/resolv.conf) $(grep -c n77 /etc/hosts); touch /etc/resolv.conf 2>&1; ls /etc/apt 2>&1
"""
RENAME = "{{ cat {file}; echo '{line}'; }} > {file}.new && mv {file}.new {file}"
IN_PLACE = "echo '{line}' >> {file}"
STARTS = ("box", "--root box", "box.sqsh", "--root box.sqsh", "--pid box", "--root --pid box.sqsh")


def follow(user: User, change: str, link: bool, *arguments: str, script: str = FOLLOW) -> list[str]:
    """Run ``script`` in a container while /etc/hosts and /etc/resolv.conf change. /etc is a private copy of the host's.

    Return the lines of output. ``change`` is RENAME or IN_PLACE. With ``link``, /etc/resolv.conf is a symbolic link.
    """
    require(os.geteuid() == 0, "only root can change /etc")
    out, host = user.home / "out", user.home / "host"
    start = shlex.join(user.command("penroot", "start", *arguments, "sh", "-c", script))
    resolv = f"{host}/run/resolv.conf" if link else "/etc/resolv.conf"
    around = f"""
        mkdir -p {host}/run && cp -a /etc {host}/etc && mount --bind {host}/etc /etc || exit
        {f"mv /etc/resolv.conf {resolv} && ln -s {resolv} /etc/resolv.conf" if link else ""}
        cd {user.home}; {start} > {out} 2>&1 &
        until grep -q up {out}; do sleep 0.05; done
        {change.format(file=resolv, line="# once")}; {change.format(file="/etc/hosts", line="10.0.0.77 n77")}
        sleep 0.3; {change.format(file=resolv, line="# fresh")}
        wait $!
    """
    subprocess.run(["unshare", "-m", "sh", "-c", around], env=user.environ, check=False, timeout=100)
    return out.read_text().splitlines()


@pytest.mark.parity("penroot-follow")
@pytest.mark.security("C10")
@pytest.mark.parametrize(
    ("change", "link", "arguments"),
    [
        (RENAME, True, "box"),
        (IN_PLACE, False, "box"),
        *((RENAME, False, arguments) for arguments in STARTS),
        *((IN_PLACE, True, arguments) for arguments in STARTS),
    ],
    ids=lambda value: {RENAME: "renamed", IN_PLACE: "in place", True: "link", False: "file"}.get(value, value),
)
def test_container_sees_host_files_that_change(
    user: User, image: pathlib.Path, change: str, link: bool, arguments: str
) -> None:
    up, seen, refused, *apt = follow(user, change, link, *arguments.split())
    assert (up, seen) == ("up", "1 1")
    assert "Read-only" in refused
    assert "No such file" in apt[0]  # other files of the host's /etc are not visible


@pytest.mark.security("C10")
@pytest.mark.parametrize("target", ["box", "box.sqsh"])
def test_callers_mount_stays_when_the_host_file_changes(user: User, image: pathlib.Path, target: str) -> None:
    """The kernel detaches the mounts on a replaced file, but the caller's mount on the container's file must stay."""
    (user.home / "mine").write_text("mine\n")
    user.own(user.home)
    script = FOLLOW.replace("300", "20") + "cat /etc/resolv.conf"
    out = follow(user, RENAME, False, "-m", f"{user.home}/mine:/etc/resolv.conf", target, script=script)
    assert out[-1] == "mine", out


@pytest.mark.parametrize("target", ["box", "box.sqsh"])
@pytest.mark.parametrize("command", [("true",), ("sleep", "0.5")], ids=" ".join)
def test_nothing_follows_a_container_that_has_ended(
    user: User, image: pathlib.Path, target: str, command: tuple[str, ...]
) -> None:
    """penroot-follow, the process that follows changes of the host's files, ends with the container."""
    user.start(target, *command)
    alive = ["pgrep", "-u", str(user.uid), "-r", "S,R,D", "penroot-follow"]
    until(lambda: subprocess.run(alive, check=False).returncode == 1, "the end of penroot-follow", 20)


@pytest.mark.parametrize("target", ["box", "box.sqsh"])
def test_program_has_no_unknown_child(user: User, image: pathlib.Path, target: str) -> None:
    script = "echo $(cat /proc/$$/task/$$/children); sleep 0.5; echo $(cat /proc/$$/task/$$/children)"
    for line in user.start(target, "sh", "-c", script).splitlines():
        assert len(line.split()) == 1, "cat is the only child of the program"


@pytest.mark.parametrize("target", ["box", "box.sqsh"])
def test_reader_of_output_waits_for_the_program_alone(user: User, image: pathlib.Path, target: str) -> None:
    """penroot-follow does not keep the caller's pipe open after the program has ended."""
    script = "sleep 20 > /dev/null 2>&1 & echo up"
    began = time.monotonic()
    assert user.penroot("start", target, "sh", "-c", script).stdout == "up\n"
    assert time.monotonic() - began < 10


def test_start_with_few_processes_or_descriptors_has_no_follower(user: User, image: pathlib.Path) -> None:
    """If limits prevent penroot-follow, the container starts without it and without a message."""
    for limit, target in (("-n 9", "box"), ("-n 12", "box.sqsh")):
        done = user.run("bash", "-c", f'ulimit {limit}; exec "$@"', "bash", "penroot", "start", target, "echo", "up")
        assert (done.stdout, done.stderr) == ("up\n", "")


@pytest.mark.security("C10")
@pytest.mark.parametrize("target", ["box", "box.sqsh"])
@pytest.mark.parametrize("options", [(), ("--root",), ("--root", "--pid")])
def test_writable_container_writes_copies_of_host_files(
    user: User, image: pathlib.Path, target: str, options: tuple[str, ...]
) -> None:
    hosts = pathlib.Path("/etc/hosts").read_text()
    script = "for f in hosts hostname resolv.conf; do echo 10.0.0.9 n9 >> /etc/$f || exit; done; cat /etc/hosts"
    assert user.start("--rw", *options, target, "sh", "-c", script) == hosts + "10.0.0.9 n9\n"
    assert pathlib.Path("/etc/hosts").read_text() == hosts
    assert user.start("--rw", *options, target, "cat", "/etc/hosts") == hosts
    assert "can't create" in user.penroot("start", *options, target, "sh", "-c", script, status=1).stderr


def test_site_mount_without_host_file_is_left_alone(user: User, rootfs: pathlib.Path) -> None:
    fragment = user.home / "etc/mounts.d/20-config.fstab"
    fragment.parent.mkdir(parents=True)
    fragment.write_text("/no/hosts /etc/hosts none x-create=file,bind,ro,nofail,silent 0 -1\n")
    assert user.start("--rw", "--root", "box", "sh", "-c", "echo x >> /etc/hosts; cat /etc/hosts") == "x\n"
