"""Findings on the limits of a kernel, read from a copy of its files in /proc/sys."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from enroot_py.base import mountinfo
from enroot_py.cli import limits
from enroot_py.cli.findings import Finding


def sysctls(root: Path, **values: int | str) -> str:
    """Write sysctl settings below ``root``, and return it. In their names, ``__`` stands for the dot."""
    for name, value in values.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")
    return str(root)


def verdicts(findings: list[Finding]) -> dict[str, str]:
    """Return first word of a finding -> its verdict."""
    return {finding.what.split()[0]: finding.verdict for finding in findings}


@pytest.mark.parity("doctor (new): reports problems with their fixes")
@pytest.mark.parametrize(("scope", "verdict"), [(0, "ok"), (1, "warn"), (2, "warn"), (3, "warn")])
def test_ptrace_scope_of_yama_is_warned_of(tmp_path: Path, scope: int, verdict: str) -> None:
    root = sysctls(tmp_path, kernel__yama__ptrace_scope=scope)
    assert verdicts(list(limits.ptrace(root))) == {"kernel.yama.ptrace_scope": verdict}


def test_kernel_without_yama_has_no_finding(tmp_path: Path) -> None:
    assert list(limits.ptrace(str(tmp_path))) == []


@pytest.mark.parametrize(("instances", "watches", "count"), [(128, 8192, 1), (64, 8192, 1), (127, 100, 2)])
def test_low_inotify_limits_are_warned_of(tmp_path: Path, instances: int, watches: int, count: int) -> None:
    values = {"fs__inotify__max_user_instances": instances, "fs__inotify__max_user_watches": watches}
    findings = list(limits.inotify(sysctls(tmp_path, **values)))
    assert len(findings) == count
    assert {finding.verdict for finding in findings} == ({"ok"} if instances == 128 else {"warn"})


@pytest.mark.parametrize(
    ("maxkeys", "used", "verdict"), [(200, "3/200", "ok"), (50, "3/50", "warn"), (200, "190/200", "warn")]
)
def test_exhausted_keys_are_warned_of(tmp_path: Path, maxkeys: int, used: str, verdict: str) -> None:
    sysctls(tmp_path, sys__kernel__keys__maxkeys=maxkeys)
    others = "  999:   200 200/200 200/200 40/20000\n"  # the keys of another user, which do not count
    (tmp_path / "key-users").write_text(f"{others}{os.geteuid():5}:     9 8/8 {used} 40/20000\n")
    [finding] = limits.keys(str(tmp_path))
    assert finding.verdict == verdict


def test_low_namespace_limit_names_what_fails(tmp_path: Path) -> None:
    values = {f"user__max_{name}_namespaces": 9999 for name in ("user", "mnt", "cgroup", "pid", "net", "ipc", "uts")}
    root = sysctls(tmp_path, **{**values, "user__max_cgroup_namespaces": 0, "user__max_net_namespaces": 3})
    findings = [finding for finding in limits.namespaces(root) if finding.verdict != "ok"]
    assert [(finding.verdict, finding.what.rpartition("start ")[2]) for finding in findings] == [
        ("bad", "few or no containers"),
        ("warn", "few or no containers with --net"),
    ]
    assert all(">> /etc/sysctl.d/80-penroot.conf" in finding.fix for finding in findings)


def test_initramfs_is_the_first_mount() -> None:
    """The first machine runs from its initial RAM file system, and the second machine does not."""
    initramfs = b"1 1 0:2 / / rw - rootfs rootfs rw,size=1509796k\n22 1 0:20 / /proc rw,relatime - proc proc rw\n"
    assert [mount.is_first for mount in mountinfo.parse(initramfs)] == [True, False]
    assert not next(mountinfo.parse(b"29 1 259:0 / / rw,relatime - ext4 /dev/root rw\n")).is_first
