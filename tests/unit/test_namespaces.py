"""If the kernel refuses namespaces, the hint names the reason that /proc shows."""

from __future__ import annotations

import errno
import os
import pathlib
import re
import subprocess

import pytest

from enroot_py.runtime import pods

ROOT = pathlib.Path(__file__).parent.parent.parent
EPERM = PermissionError(errno.EPERM, os.strerror(errno.EPERM))


def advice(proc: pathlib.Path, error: OSError = EPERM, **values: str) -> str:
    """Return the advice for a kernel that has ``values`` in /proc/sys. ``__`` in a name stands for "/"."""
    defaults = {"user/max_user_namespaces": "5000", "kernel/unprivileged_userns_clone": "1"}
    for name, value in {**defaults, **{key.replace("__", "/"): value for key, value in values.items()}}.items():
        path = proc / "sys" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(value + "\n")
    return pods.advice(error, str(proc))


@pytest.mark.clusters("A kernel that says no")
@pytest.mark.parity("AppArmor that restricts user namespaces")
def test_apparmor_restriction_is_named_with_its_fix(tmp_path: pathlib.Path) -> None:
    hint = advice(tmp_path, kernel__apparmor_restrict_unprivileged_userns="1")
    command = re.search(r"sed (\S+) (\S+) > /etc/apparmor.d/penroot", hint)
    assert command, hint
    profile = subprocess.run(["sed", *command.groups()], stdout=subprocess.PIPE, text=True, check=True).stdout
    assert profile.count("userns,") >= 3 and "@PREFIX@" not in profile
    assert "apparmor_parser --replace /etc/apparmor.d/penroot" in hint
    assert "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0" in hint
    assert os.uname().nodename in hint


def test_settings_of_the_kernel_are_named(tmp_path: pathlib.Path) -> None:
    hint = advice(tmp_path, user__max_user_namespaces="0")
    assert "sysctl -w user.max_user_namespaces=65536" in hint
    hint = advice(tmp_path, kernel__unprivileged_userns_clone="0")
    assert "sysctl -w kernel.unprivileged_userns_clone=1" in hint
    hint = advice(tmp_path, kernel__apparmor_restrict_unprivileged_userns="0")
    assert "apparmor" not in hint and "seccomp" in hint  # no setting of the kernel explains the error
    assert "too many namespaces" in advice(tmp_path, OSError(errno.ENOSPC, ""))
    assert advice(tmp_path, OSError(errno.EINVAL, "")) == ""


def confined(proc: pathlib.Path, seccomp: str = "0", profile: str = "unconfined") -> pathlib.Path:
    """Create a /proc that shows a process with this seccomp mode and AppArmor profile, and return it."""
    (proc / "self/attr").mkdir(parents=True)
    (proc / "self/status").write_text(f"Name:\tpython3\nNoNewPrivs:\t0\nSeccomp:\t{seccomp}\nSeccomp_filters:\t1\n")
    (proc / "self/attr/current").write_text(profile + "\n")
    return proc


@pytest.mark.parity("an error names seccomp or AppArmor if it confines the process")
@pytest.mark.parametrize(
    ("confinement", "number", "words"),
    [
        *(({"seccomp": "2"}, number, "a seccomp filter refuses it on NODE") for number in (errno.EPERM, errno.ENOSYS)),
        *(
            ({"profile": f"{name} (enforce)"}, errno.EACCES, f"AppArmor's profile {name} refuses it on NODE")
            for name in ("docker-default", "cri-containerd.apparmor.d")
        ),
        (
            {"profile": "docker-default (complain)"},
            errno.EACCES,
            "a security module, such as AppArmor or SELinux, refuses",
        ),
    ],
)
def test_confinement_of_a_process_is_named(
    tmp_path: pathlib.Path, confinement: dict[str, str], number: int, words: str
) -> None:
    hint = advice(confined(tmp_path, **confinement), OSError(number, os.strerror(number)))
    assert hint.startswith(words.replace("NODE", os.uname().nodename))
    kind = "seccomp" if "seccomp" in confinement else "appArmor"
    assert f"{kind}Profile: {{type: Unconfined}}" in hint


@pytest.mark.parametrize(
    ("options", "read_only"),
    [(("rw,nosuid", "rw,nosuid"), False), (("ro,nosuid", "rw,nosuid"), False), (("ro,nosuid", "ro,nosuid"), True)],
)
def test_control_groups_of_a_pod(tmp_path: pathlib.Path, options: tuple[str, str], read_only: bool) -> None:
    lines = [
        "30 29 0:20 / /sys ro,nosuid - sysfs sysfs ro",
        "31 30 0:27 / /sys/fs/cgroup ro,nosuid - tmpfs tmpfs ro",
        f"32 31 0:28 / /sys/fs/cgroup/freezer {options[0]} - cgroup cgroup rw,freezer",
        f"33 31 0:29 / /sys/fs/cgroup/unified {options[1]} shared:9 - cgroup2 cgroup2 rw",
    ]
    (tmp_path / "mountinfo").write_text("\n".join(lines) + "\n")
    assert pods.cgroups_are_read_only(str(tmp_path / "mountinfo")) == read_only


@pytest.mark.parity("AppArmor that restricts user namespaces")
def test_profile_covers_every_program_that_makes_namespaces() -> None:
    text = (ROOT / "configs/apparmor/penroot").read_text()
    for program in ("@PREFIX@/bin/penroot", "/libexec}/penroot-unshare", "slurmstepd", "/libraries/ld-*"):
        assert re.search(rf"^profile \S+ \S*{re.escape(program)} flags=\(unconfined\) {{$", text, re.M), program
    assert text.count("{\n") == text.count("\n}\n")


@pytest.mark.parametrize(
    ("directory", "covered"),
    [("/usr", 1), ("/usr/local", 1), ("/opt/slurm", 1), ("/opt/slurm/25.05", 1), ("/opt", 0), ("/home/x/opt/slurm", 0)],
)
def test_profile_covers_usual_directories_of_slurm(directory: str, covered: int) -> None:
    text = (ROOT / "configs/apparmor/penroot").read_text()
    [pattern] = re.findall(r"^profile slurmstepd (\S+)", text, re.M)
    for apparmor, python in (("**", ".+"), ("{", "("), (",", "|"), ("}", ")")):
        pattern = pattern.replace(apparmor, python)
    assert bool(re.fullmatch(pattern, f"{directory}/sbin/slurmstepd")) == bool(covered)
