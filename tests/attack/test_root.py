"""By a container that root starts, on the node."""

from __future__ import annotations

import os
from collections.abc import Mapping

import pytest

from tests.kernel.conftest import User, busybox_rootfs, require
from tests.slurm.lab import Lab
from tests.slurm.steps import ON_N1, sh

KINDS: dict[str, tuple[list[str], Mapping[str, str]]] = {
    "user": ([], {}),
    "root": (["--root"], {}),
    "pid": (["--pid"], {}),
}


@pytest.fixture
def root(user: User) -> User:
    """Root of the node, with a container ``box``."""
    require(os.geteuid() == 0, "root starts these containers")
    user.uid = 0
    user.own(user.home)
    busybox_rootfs(user.data / "box")
    return user


@pytest.mark.parametrize("kind", KINDS)
def test_a_container_of_roots_changes_nothing_of_the_kernel(root: User, kind: str) -> None:
    """The files of /proc belong to root: sysctls, /proc/sysrq-trigger and /proc/kcore need no capability."""
    options, environ = KINDS[kind]
    # What it is already, and a letter that asks for help: harmless where it works.
    script = """
        for f in vm/swappiness kernel/core_pattern fs/suid_dumpable kernel/hotplug; do
            v=$(cat /proc/sys/$f 2>/dev/null) && (echo "$v" > /proc/sys/$f) 2>/dev/null && echo "wrote $f"
        done
        (echo h > /proc/sysrq-trigger) 2>/dev/null && echo "wrote sysrq-trigger"
        (head -c 1 /proc/kcore > /read) 2>/dev/null && echo "read kcore"
        (cat /proc/timer_list > /read) 2>/dev/null && echo "read timer_list"
        umount /proc/sys 2>/dev/null && echo "uncovered /proc/sys"
        mkdir -p /tmp/p && mount -t proc proc /tmp/p 2>/dev/null && echo "mounted another"
        cat /proc/sys/kernel/ostype
    """
    assert root.start(*options, "box", "sh", "-c", script, env=environ) == "Linux\n"


def test_a_superusers_container_changes_nothing_by_accident(root: User) -> None:
    """With ENROOT_ALLOW_SUPERUSER root keeps the privilege to uncover it, and must do that first."""
    path = "/proc/sys/vm/swappiness"
    script = f"v=$(cat {path}); echo $v > {path} || umount /proc/sys && echo uncovered"
    assert root.start("box", "sh", "-c", script, env={"ENROOT_ALLOW_SUPERUSER": "yes"}) == "uncovered\n"


def test_root_may_ask_for_it(root: User) -> None:
    """Who starts the container decides: a mount that is asked for stands."""
    script = "v=$(cat /proc/sys/vm/swappiness); echo $v > /proc/sys/vm/swappiness && echo wrote"
    environ = {"ENROOT_ALLOW_SUPERUSER": "yes"}
    assert root.start("-m", "/proc/sys:/proc/sys", "box", "sh", "-c", script, env=environ) == "wrote\n"


def test_only_root_of_the_node_is_a_superuser(user: User) -> None:
    """Who is root in his container alone has no_new_privs and the filter of system calls as everybody has."""
    busybox_rootfs(user.data / "box")
    user.own(user.data)
    script = ("grep", "-e", "NoNewPrivs", "-e", "Seccomp:", "/proc/self/status")
    said = user.start("--root", "box", *script, env={"ENROOT_ALLOW_SUPERUSER": "yes"})
    assert said.split() == ["NoNewPrivs:", "1", "Seccomp:", "2"]


@pytest.mark.parametrize("remap", ["--container-remap-root", "--no-container-remap-root"])
def test_a_step_of_roots_changes_nothing_of_the_kernel(lab: Lab, remap: str) -> None:
    """The same by srun, where each task enters the container that the step has."""
    script = """
        v=$(cat /proc/sys/vm/swappiness); (echo $v > /proc/sys/vm/swappiness) 2> /dev/null && echo wrote
        umount /proc/sys 2> /dev/null && echo uncovered
        cat /proc/sys/kernel/ostype
    """
    step = ["srun", *ON_N1, "-n2", "--container-image=registry:5000#minimal:1", remap, *sh(script)]
    try:
        assert lab.run(step, user="root").stdout == "Linux\n" * 2
    finally:
        lab.run("rm -rf /var/tmp/enroot-*-0 /tmp/enroot-run-0 /run/pyxis/0", node="n1", user="root")
