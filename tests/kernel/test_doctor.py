"""penroot doctor reports no problem on a working machine. Elsewhere, it names each problem and its fix."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import signal
import sys
import time
from collections.abc import Iterator

import pytest

from enroot_py.base import linux
from enroot_py.base.errors import UsageError
from enroot_py.cli import asuser, fuse
from enroot_py.cli.findings import Finding
from tests.kernel.conftest import PREFIX, User, require, require_squashfuse


def hiding(*programs: str) -> tuple[str, ...]:
    """Return a command prefix with which root hides ``programs`` from a command."""
    hide = "".join(f"mount --bind /dev/null {program}; " for program in programs if os.path.exists(program))
    return ("unshare", "--mount", "sh", "-ec", hide + 'exec "$@"', "sh")


@pytest.mark.parity("doctor (new): reports problems with their fixes")
def test_this_machine_runs_containers(user: User, image: pathlib.Path) -> None:
    assert user.start(str(image), "echo", "it runs") == "it runs\n"
    out = user.penroot("doctor").stdout
    assert "bad " not in out
    assert f"containers are in {user.data}" in out
    assert f"images are stored in {user.home}/cache" in out


@pytest.mark.parity("doctor (new): reports problems with their fixes")
def test_doctor_has_a_fix_for_each_missing_program(user: User, image: pathlib.Path) -> None:
    require(os.geteuid() == 0, "only root can hide programs from a user")
    hide = hiding("/usr/bin/squashfuse", "/usr/bin/squashfuse_ll", "/usr/bin/mksquashfs")
    out = user.penroot("doctor", prefix=hide, status=1).stdout
    assert "bad  squashfuse is not installed: squashfs images cannot be mounted\n     fix: install squashfuse" in out
    assert "warn mksquashfs is not installed" in out
    user.penroot("start", str(image), prefix=hide, status=1)  # doctor predicted this failure


def test_old_kernel_is_reported(user: User) -> None:
    prefix = ("strace", "-f", "-qq", "-o", "/dev/null", "-e", "inject=mount_setattr:error=ENOSYS")
    out = user.penroot("doctor", prefix=prefix, status=1).stdout
    assert f"bad  the kernel is Linux {os.uname().release}, but containers need {linux.FLOOR} or later\n" in out


def mounted(*mounts: str) -> tuple[str, ...]:
    """Return a command prefix with which root runs a command with these mounts."""
    return ("unshare", "--mount", "sh", "-ec", "".join(f"mount {mount}; " for mount in mounts) + 'exec "$@"', "sh")


@pytest.mark.parity("doctor (new): reports problems with their fixes")
def test_limits_of_this_kernel_are_read(user: User) -> None:
    require(os.geteuid() == 0, "only root can cover settings of the kernel")
    low = user.write("low", "5\n")
    names = ("fs/inotify/max_user_instances", "kernel/keys/maxkeys", "user/max_net_namespaces")
    require(all(os.path.exists(f"/proc/sys/{name}") for name in names), "this kernel has no such limits")
    prefix = mounted(*(f"--bind {low} /proc/sys/{name}" for name in names))
    out = user.penroot("doctor", prefix=prefix).stdout
    for name in names:
        assert f"warn {name.replace('/', '.')} is 5: " in out
        assert f"fix: echo {name.replace('/', '.')}=" in out


def test_directories_in_memory_are_warned_of(user: User) -> None:
    require(os.geteuid() == 0, "only root can mount")
    paths = {"ENROOT_TEMP_PATH": "", "TMPDIR": "", "ENROOT_CACHE_PATH": "/tmp/cache", "ENROOT_DATA_PATH": "/tmp/data"}
    out = user.penroot("doctor", prefix=mounted("-t tmpfs -o mode=1777 none /tmp"), env=paths).stdout
    assert "warn import and export unpack images in /tmp, in memory (tmpfs, " in out
    assert "warn images are stored in /tmp/cache, in memory (tmpfs, " in out
    assert "warn containers are in /tmp/data, in memory (tmpfs, " in out


def test_closed_directories_are_reported(user: User) -> None:
    out = user.penroot("doctor", env={"ENROOT_DATA_PATH": "/sys/data", "ENROOT_TEMP_PATH": "/sys/tmp"}, status=1).stdout
    assert "bad  containers are in /sys/data, but you cannot create this directory in /sys\n" in out
    assert "warn import and export unpack images in /sys/tmp, but you cannot create this directory in /sys\n" in out


def test_runtime_directory_of_another_user(user: User, rootfs: pathlib.Path) -> None:
    """After su(1), for example, XDG_RUNTIME_DIR still names the first user's directory."""
    require(os.geteuid() == 0, "only root can give a directory to another user")
    theirs = user.home / "theirs"
    theirs.mkdir(mode=0o755)
    os.chown(theirs, user.uid + 1, -1)
    env = {"XDG_RUNTIME_DIR": str(theirs)}
    warning = f"XDG_RUNTIME_DIR={theirs} belongs to user {user.uid + 1}, not to you: starts use another directory, "
    assert f"warn {warning}{user.home}/run\n" in user.penroot("doctor", env=env).stdout
    theirs.chmod(0o777)
    env["ENROOT_RUNTIME_PATH"] = ""
    assert f"warn {warning}one in /tmp\n" in user.penroot("doctor", env=env).stdout
    assert user.start("box", "echo", "it runs", env=env) == "it runs\n"
    assert not os.listdir(theirs)


def test_json_has_one_object_per_line(user: User) -> None:
    out = user.penroot("doctor", "--json").stdout
    findings = [json.loads(line) for line in out.splitlines()]
    assert {frozenset(finding) for finding in findings} == {frozenset(("verdict", "what", "fix"))}
    assert {"verdict": "ok", "what": f"the kernel is Linux {os.uname().release}", "fix": ""} in findings


# ---- squashfuse


@pytest.fixture
def squashfuse_ll(tmp_path: pathlib.Path) -> pathlib.Path:
    require_squashfuse()
    program = shutil.which("squashfuse_ll")
    require(program, "squashfuse_ll is not installed")
    return pathlib.Path(shutil.copy(str(program), tmp_path / "squashfuse_ll"))


def test_threads_of_squashfuse_are_found(squashfuse_ll: pathlib.Path) -> None:
    text = squashfuse_ll.read_bytes()
    squashfuse_ll.write_bytes(text.replace(b"fuse_session_loop_mt", b"fuse_session_loop_st"))
    finding = fuse.squashfuse_version(str(squashfuse_ll))
    assert finding.verdict == "warn" and "has one thread" in finding.what
    squashfuse_ll.write_bytes(text + b"\0fuse_session_loop_mt\0")
    assert fuse.squashfuse_version(str(squashfuse_ll)).verdict == "ok"


def test_squashfuse_of_libfuse_2_cannot_mount(squashfuse_ll: pathlib.Path) -> None:
    text = squashfuse_ll.read_bytes()
    require(b"libfuse3.so.3\0" in text, "squashfuse_ll does not contain the name libfuse3.so.3 here")
    squashfuse_ll.write_bytes(text.replace(b"libfuse3.so.3\0", b"libfuse.so.2\0\0"))
    finding = fuse.squashfuse_version(str(squashfuse_ll))
    assert finding.verdict == "bad" and "libfuse 2" in finding.what and "penroot create" in finding.fix


# ---- --user


@pytest.fixture
def account(user: User, tmp_path: pathlib.Path) -> Iterator[str]:
    """Return a name for the user. Only this process sees an /etc/passwd that contains the name."""
    require(os.geteuid() == 0, "only root may check other users")
    namespace = os.open("/proc/self/ns/mnt", os.O_RDONLY)
    linux.unshare(linux.CLONE_NEWNS)
    linux.mount(None, "/", None, linux.MS_REC | linux.MS_PRIVATE)
    lines = pathlib.Path("/etc/passwd").read_text() + f"tester:x:{user.uid}:{user.uid}::{user.home}:/bin/sh\n"
    (tmp_path / "passwd").write_text(lines)
    (tmp_path / "passwd").chmod(0o644)
    linux.mount(str(tmp_path / "passwd"), "/etc/passwd", None, linux.MS_BIND)
    yield "tester"
    linux.setns(namespace, linux.CLONE_NEWNS)
    os.close(namespace)


@pytest.fixture
def program(user: User, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    """Return the path of a program that doctor runs as the user, in place of penroot.

    The user can trace the process and make it print anything.
    """
    monkeypatch.setattr(sys, "argv", [str(user.home / "program")])
    yield user.home / "program"


@pytest.mark.parity("doctor --json, --user NAME")
def test_paths_of_a_user_are_checked_as_that_user(user: User, account: str, monkeypatch: pytest.MonkeyPatch) -> None:
    user.write(".config/enroot/enroot.conf", "ENROOT_DATA_PATH /proc/data\n")
    monkeypatch.setattr(sys, "argv", [f"{PREFIX}/bin/penroot"])
    monkeypatch.setenv("ENROOT_CACHE_PATH", "/of/root")
    texts = [finding.text() for finding in asuser.findings(account)]
    assert any(text.startswith("bad  containers are in /proc/data, ") for text in texts)
    assert any(f"images are stored in {user.home}/.cache/enroot" in text for text in texts)
    user.write(".config/enroot/enroot.conf", "ENROOT_REMAP_ROOT nonsense\n")
    *_, mistake = asuser.findings(account)
    assert mistake.verdict == "bad" and "ENROOT_REMAP_ROOT='nonsense'" in mistake.what
    user.write("program", "#!/bin/sh\n", 0o755)
    monkeypatch.setattr(sys, "argv", [str(user.home / "program")])
    [only] = asuser.findings(account)
    assert only == Finding("bad", "penroot does not run as tester", "runuser -u tester -- penroot doctor")
    good = '{"verdict": "ok", "what": "a", "fix": ""}'
    user.write("program", f"#!/bin/sh\necho '{good}'\nexit 1\n", 0o755)
    assert [finding.what for finding in asuser.findings(account)] == ["a", "the checks as tester ended early"]


@pytest.mark.security("R9")
def test_nothing_of_root_reaches_the_user(
    user: User, account: str, program: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "of root")
    secret = os.open("/etc/shadow", os.O_RDONLY)
    os.set_inheritable(secret, True)
    script = """#!/bin/sh
    say() { printf '{"verdict": "ok", "what": "%s", "fix": ""}\\n' "$*"; }
    say "$(id -u) $(id -g) $(id -G) $PWD $(ps -o tty= -p $$)"
    say "$(grep ^Cap /proc/self/status | cut -f2 | sort -u | tr '\\n' ' ')"
    say "$(ls /proc/$$/fd | tr '\\n' ' ')"
    say "${SECRET-unset} $HOME"
    """
    user.write("program", script, 0o755)
    ids, capabilities, descriptors, environ = (finding.what for finding in asuser.findings(account))
    os.close(secret)
    assert ids == f"{user.uid} {user.uid} {user.uid} / ?"
    assert (
        capabilities.split()[0] == "0" * 16 and len(capabilities.split()) == 2
    )  # all sets are empty except the bounding set
    assert str(secret) not in descriptors.split()
    assert environ == f"unset {user.home}"


@pytest.mark.security("R9")
def test_hostile_output_is_bounded(user: User, account: str, program: pathlib.Path) -> None:
    lines = ['{"verdict": "ok", "what": "\\u001b[2J", "fix": "a\\nok   b"}', '{"verdict": "good"}', "[" * 9999]
    output = user.write("output", "\n".join([*lines, ("x" * 999 + "\n") * 2048]))
    user.write("program", f"#!/bin/sh\nexec cat {output}\n", 0o755)
    findings = list(asuser.findings(account))
    assert findings[0] == Finding("ok", "\\x1b[2J", "a ok   b")
    assert {finding.verdict for finding in findings[1:]} == {"bad"}
    assert sum(len(finding.what) for finding in findings) < 1 << 20


@pytest.mark.security("R9")
def test_hanging_check_is_killed(user: User, account: str, program: pathlib.Path) -> None:
    user.write("program", "#!/bin/sh\necho $$ > ~/pid\ntrap '' TERM\nsleep 600 & wait\n", 0o755)
    start = time.monotonic()
    [finding] = asuser.findings(account, deadline_s=1)
    assert time.monotonic() - start < 60
    assert finding.verdict == "bad" and "have not ended within 1 s" in finding.what
    with pytest.raises(ProcessLookupError):
        os.kill(int((user.home / "pid").read_text()), signal.SIGCONT)


def test_only_root_checks_another_user(user: User) -> None:
    assert "only root can check another user" in user.penroot("doctor", "--user", "root", status=1).stderr
    if os.geteuid() == 0:
        with pytest.raises(UsageError, match="there is no such user"):
            list(asuser.findings("nobody-of-this-name"))
