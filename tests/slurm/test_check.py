"""pyxis-py check and uninstall: a node that works has nothing bad, and what is broken is named with its fix."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.slurm.lab import Lab

PREFIX = os.environ.get("PENROOT_PREFIX", "/opt/penroot")
CHECK = f"{PREFIX}/bin/pyxis-py check"
PLUGIN = f"{PREFIX}/lib/penroot/spank_pyxis.so"


def check(lab: Lab, script: str = CHECK, user: str = "root") -> str:
    """What it says of n1, which must not be good."""
    done = lab.run(["sh", "-ec", script], node="n1", user=user, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.fixture
def directory(lab: Lab) -> Iterator[str]:
    lab.run("mkdir /tmp/check", node="n1", user="root")
    yield "/tmp/check"
    lab.run("rm -r /tmp/check", node="n1", user="root")


def with_stack(directory: str, *lines: str) -> str:
    text = "\\n".join(lines)
    return f"printf '{text}\\n' > {directory}/plugstack.conf; {CHECK} --plugstack {directory}/plugstack.conf"


@pytest.mark.parametrize("user", ["root", "alice"])
def test_a_node_of_the_lab_is_good(lab: Lab, user: str) -> None:
    out = lab.run(CHECK, node="n1", user=user).stdout
    lines = out.splitlines()
    assert all(line.startswith("ok ") for line in lines), out
    assert any(f"loads {PLUGIN}, for Slurm" in line for line in lines)
    assert any("can mount an overlay" in line for line in lines)
    assert any("ProctrackType=proctrack/cgroup" in line for line in lines)


def test_no_user_namespaces(lab: Lab, directory: str) -> None:
    # The limit is one for each user namespace: in this one, which has all users, there are none left.
    mapped = f"""
        mkfifo {directory}/mapped
        unshare -U sh -c 'read line < {directory}/mapped
            exec sh -c "echo 0 > /proc/sys/user/max_user_namespaces; exec {CHECK}"' &
        until [ "$(readlink /proc/$!/ns/user)" != "$(readlink /proc/self/ns/user)" ]; do sleep 0.05; done
        echo 0 0 65536 > /proc/$!/uid_map
        echo 0 0 65536 > /proc/$!/gid_map
        echo go > {directory}/mapped
        wait $!
    """
    out = check(lab, mapped)
    assert "bad  user.max_user_namespaces is 0" in out
    assert "fix: echo user.max_user_namespaces=15000" in out
    assert "bad  an ordinary user cannot mount an overlay in a user namespace: cannot create a user namespace" in out


def test_fuse_is_closed_to_users(lab: Lab, directory: str) -> None:
    closed = f"mknod -m 600 {directory}/fuse c 10 229; mount --bind {directory}/fuse /dev/fuse"
    out = check(lab, f"unshare -m sh -ec '{closed}; {CHECK}'")
    assert "bad  /dev/fuse has mode 0600" in out
    assert "chmod 666 /dev/fuse" in out


def test_squashfuse_is_not_installed(lab: Lab, directory: str) -> None:
    out = check(lab, f"PATH={directory} {CHECK}")
    assert "bad  squashfuse is not installed" in out


def test_the_plugin_is_not_loaded(lab: Lab, directory: str) -> None:
    out = check(lab, with_stack(directory, "optional /x/auto_tmpdir.so"))
    assert "does not load spank_pyxis.so" in out
    assert "fix: pyxis-py install" in out


def test_the_plugin_is_of_another_slurm(lab: Lab, directory: str) -> None:
    other = r"s/\(penroot plugin for Slurm 0x\)....../\1120304/"
    script = f"sed '{other}' {PLUGIN} > {directory}/spank_pyxis.so; "
    out = check(lab, script + with_stack(directory, f"required {directory}/spank_pyxis.so"))
    assert f"bad  {directory}/spank_pyxis.so is for Slurm 18.03, this is" in out


def test_a_file_that_is_not_there(lab: Lab, directory: str) -> None:
    out = check(lab, with_stack(directory, "required /no/such/spank_pyxis.so"))
    assert f"bad  {directory}/plugstack.conf:1: /no/such/spank_pyxis.so: No such file or directory" in out


def test_arguments_that_slurm_would_stumble_on(lab: Lab, directory: str) -> None:
    out = check(lab, with_stack(directory, f"required {PLUGIN} runtime=/x"))
    assert "unknown argument" in out
    assert "known are runtime_path" in out


def test_the_plugin_is_loaded_twice(lab: Lab, directory: str) -> None:
    out = check(lab, with_stack(directory, f"required {PLUGIN}", f"required {PLUGIN}"))
    assert "loaded more than once" in out


def test_a_private_tmp_that_comes_later(lab: Lab, directory: str) -> None:
    script = with_stack(directory, f"required {PLUGIN}", "optional /usr/lib/slurm/auto_tmpdir.so")
    out = lab.run(["sh", "-c", script], node="n1", user="root").stdout  # a warning
    assert "warn" in out
    assert "comes after spank_pyxis.so: containers have the node's /tmp" in out


def test_a_place_without_execution(lab: Lab, directory: str) -> None:
    mount = f"mount -t tmpfs -o noexec none {directory}"
    out = check(lab, f"unshare -m sh -ec '{mount}; ENROOT_DATA_PATH={directory}/data {CHECK}'")
    assert f"bad  containers are in {directory}/data, mounted noexec" in out
    assert "ENROOT_DATA_PATH" in out
