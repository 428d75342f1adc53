"""penroot doctor: a working machine has no bad findings, and each missing program is named with a fix."""

from __future__ import annotations

import os
import pathlib

import pytest

from enroot_py.base import linux
from tests.kernel.conftest import User, require


def without(*programs: str) -> tuple[str, ...]:
    """Return a command prefix for root that hides ``programs``."""
    hide = "".join(f"mount --bind /dev/null {program}; " for program in programs if os.path.exists(program))
    return ("unshare", "--mount", "sh", "-ec", hide + 'exec "$@"', "sh")


@pytest.mark.parity("doctor: what is wrong")
def test_this_machine_runs_containers(user: User, image: pathlib.Path) -> None:
    assert user.start(str(image), "echo", "it runs") == "it runs\n"
    out = user.penroot("doctor").stdout
    assert "bad " not in out
    assert f"containers are in {user.data}" in out
    assert f"images are stored in {user.home}/cache" in out


@pytest.mark.parity("doctor: what is wrong")
def test_what_is_missing_has_a_fix(user: User, image: pathlib.Path) -> None:
    require(os.geteuid() == 0, "only root can hide programs from a user")
    hide = without("/usr/bin/squashfuse", "/usr/bin/squashfuse_ll", "/usr/bin/mksquashfs")
    out = user.penroot("doctor", prefix=hide, status=1).stdout
    assert "bad  squashfuse is not installed: squashfs images cannot be mounted\n     fix: install squashfuse" in out
    assert "warn mksquashfs is not installed" in out
    user.penroot("start", str(image), prefix=hide, status=1)  # as doctor warned


def test_an_old_kernel_is_told(user: User) -> None:
    prefix = ("strace", "-f", "-qq", "-o", "/dev/null", "-e", "inject=mount_setattr:error=ENOSYS")
    out = user.penroot("doctor", prefix=prefix, status=1).stdout
    assert f"bad  the kernel is Linux {os.uname().release}, and containers need {linux.FLOOR}\n" in out
