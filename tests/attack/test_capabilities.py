"""Check what an image can do, for each caller and each way to start it. ``pytest -s`` prints a table of the results.

The program of the image is ``probe.c``, which tries each action and harms nothing. The caller who starts the container
has a terminal, a key in the session keyring, and descriptors of a directory, of namespaces and of a file. The caller
also mounts a directory read-only, and covers another directory by a mount.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence

import pytest

from tests.kernel.conftest import UID, User, busybox_rootfs, ordinary_user, require
from tests.slurm.lab import Lab
from tests.slurm.steps import IMAGE, ON_N1, next_line, sh, srun
from tests.slurm.test_ssh import Laptop, job, laptop
from tests.terminal import Terminal
from tests.waiting import until

__all__ = ["laptop"]  # a fixture

PROBE = pathlib.Path(__file__).parent / "probe.c"
CLOSED = dict.fromkeys(("terminal", "directories", "namespaces", "mounts", "sysctl", "devices"), "no")
# start, exec and bundles pass on the caller's files and keys. Slurm gives a step other descriptors and another keyring.
BY_CALLER = {**CLOSED, "files": "yes", "keyring": "yes", "capabilities": "no"}
BY_SLURM = {**BY_CALLER, "files": "no", "keyring": "no"}
UP = "echo $SLURM_JOB_ID; exec sleep 1000"
ROOT = {"capabilities": "yes"}  # root has capabilities within the container
OWN = ("--pid", "--net", "--ipc", "--uts")
STARTS = [*((), ("--root",), ("--rw",), ("--rw", "--root")), *((o,) for o in OWN), *((o, "--root") for o in OWN)]


@pytest.fixture(scope="module")
def table() -> Iterator[dict[str, dict[str, str]]]:
    """Collect the rows that the tests of this file find, and print them at the end."""
    rows: dict[str, dict[str, str]] = {}
    yield rows
    lines = [["", *BY_CALLER], *([name, *(row.get(cell, "?") for cell in BY_CALLER)] for name, row in rows.items())]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print("", *("  ".join(map(str.ljust, line, widths)) for line in lines), sep="\n")


@pytest.fixture(scope="module")
def probe() -> Iterator[pathlib.Path]:
    with tempfile.TemporaryDirectory(prefix="penroot-probe-", dir="/var/tmp") as directory:
        path = pathlib.Path(directory) / "probe"
        subprocess.run(["cc", "-static", "-O2", "-Wall", "-Wextra", "-Werror", "-o", path, PROBE], check=True)
        os.chmod(directory, 0o755)
        yield path


def cells(shown: str) -> dict[str, str]:
    """Return the probe's findings. Its first line may begin with characters that were typed or pushed (TIOCSTI)."""
    return dict(re.findall(rf"({'|'.join(BY_CALLER)}) (\S+)\r?$", shown, re.M)) or {"output": shown}


def expected(row: dict[str, str], options: Sequence[str]) -> dict[str, str]:
    return {**row, **(ROOT if {"--root", "--container-remap-root"} & set(options) else {})}


class Caller:
    """A user, or root, with a container ``box`` that has the probe."""

    def __init__(self, user: User, probe: pathlib.Path, *, root: bool) -> None:
        self.user, self.probe = user, str(probe)
        busybox_rootfs(user.data / "box")
        shutil.copy(probe, user.data / "box/bin/probe")
        (user.data / "box/cover").mkdir()
        (user.data / "box/cover/hidden").touch()
        for name in ("ro", "empty", "tmp"):
            (user.home / name).mkdir()
        (user.home / "ro/file").touch()
        self.mounts = (
            "--mount",
            f"{user.home}/ro:/ro:bind,ro,x-create=dir",
            "--mount",
            f"{user.home}/empty:/cover:bind",
        )
        if root:
            user.uid = 0
        user.environ["TMPDIR"] = str(user.home / "tmp")
        user.own(user.home)

    def run(self, *command: str) -> dict[str, str]:
        """Run a command with everything that the probe looks for, and return the findings."""
        words = self.user.command(self.probe, "call", str(self.user.home), *command)
        with Terminal(words, env=self.user.environ, cwd=self.user.home) as terminal:
            return cells(terminal.read_all())


@pytest.fixture(params=["user", "root"])
def caller(request: pytest.FixtureRequest, probe: pathlib.Path) -> Iterator[Caller]:
    require(os.geteuid() == 0, "only root can act as a user and as root")
    with ordinary_user(UID) as user:
        yield Caller(user, probe, root=request.param == "root")


@contextlib.contextmanager
def in_background(caller: Caller, *options: str) -> Iterator[None]:
    """Run the container ``box`` while the block runs."""
    user = caller.user
    start = user.command("penroot", "start", *options, *caller.mounts, "box", "sleep", "60")
    with subprocess.Popen(start, env=user.environ, stdin=subprocess.DEVNULL) as process:
        try:
            until(lambda: "sleep" in user.penroot("list", "--fancy").stdout, "the container runs")
            yield
        finally:
            process.kill()


def make_bundle(user: User) -> None:
    user.penroot("export", "--output", f"{user.home}/box.sqsh", "box")
    user.penroot("bundle", f"{user.home}/box.sqsh")


def named(caller: Caller, how: str, options: Sequence[str]) -> str:
    return " ".join(("root" if caller.user.uid == 0 else "user", how, *options))


@pytest.mark.security("C3", "C6", "C7")
@pytest.mark.parametrize("options", STARTS, ids="".join)
def test_start(caller: Caller, table: dict[str, dict[str, str]], options: tuple[str, ...]) -> None:
    found = caller.run("penroot", "start", *options, *caller.mounts, "box", "probe")
    table[named(caller, "start", options)] = found
    assert found == expected(BY_CALLER, options)


@pytest.mark.security("C6")
@pytest.mark.parametrize("options", [(), ("--root",), ("--pid", "--root")], ids="".join)
def test_exec(caller: Caller, table: dict[str, dict[str, str]], options: tuple[str, ...]) -> None:
    with in_background(caller, *options):
        found = caller.run("penroot", "exec", "box", "probe")
    table[named(caller, "exec", options)] = found
    assert found == expected(BY_CALLER, options)


@pytest.mark.security("I10", "C2", "C3", "C4", "C6")
@pytest.mark.parametrize("options", [(), ("--root",), ("--rw", "--root"), ("--pid", "--root")], ids="".join)
def test_bundle(caller: Caller, table: dict[str, dict[str, str]], options: tuple[str, ...]) -> None:
    make_bundle(caller.user)
    found = caller.run("./box.run", *options, *caller.mounts, "probe")
    table[named(caller, "bundle", options)] = found
    assert found == expected(BY_CALLER, options)


HOWS: dict[str, tuple[str, ...]] = {
    "start": ("penroot", "start", "box"),
    "start --pid": ("penroot", "start", "--pid", "box"),
    "exec": ("penroot", "exec", "box"),
    "bundle": ("./box.run",),
}


@pytest.mark.parity("ENROOT_UNSHARE_KEYRING")
@pytest.mark.security("O6", "O7")
@pytest.mark.parametrize("how", HOWS)
def test_settings_keep_keys_and_descriptors_from_containers(caller: Caller, how: str) -> None:
    user = caller.user
    if how == "bundle":
        make_bundle(user)
    user.environ |= {"ENROOT_UNSHARE_KEYRING": "yes", "ENROOT_CLOSE_DESCRIPTORS": "yes"}
    with in_background(caller) if how == "exec" else contextlib.nullcontext():
        found = caller.run(*HOWS[how], "probe")
    assert {found[name] for name in ("keyring", "files", "directories", "namespaces")} == {"no"}


@pytest.fixture(scope="module")
def in_lab(lab: Lab, probe: pathlib.Path) -> Iterator[tuple[str, ...]]:
    """Yield srun's options for the probe's image and mounts."""
    home = pathlib.Path(lab.root, "home/alice")
    shutil.copy(probe, home / "probe")
    made = "cp /probe.of /bin/probe; mkdir /cover; touch /cover/hidden"
    save = ("--container-save=probe.sqsh", "--container-writable", "--container-mounts=./probe:/probe.of")
    srun(lab, IMAGE, *save, *sh(made))
    lab.run("mkdir ro empty; touch ro/file")
    mounts = "/home/alice/ro:/ro:ro,/home/alice/empty:/cover"
    yield "--container-image=/home/alice/probe.sqsh", f"--container-mounts={mounts}"
    lab.run("rm -r probe probe.sqsh ro empty")


@pytest.mark.security("C2", "C6")
@pytest.mark.parametrize("remap", ["", "--container-remap-root"])
@pytest.mark.parametrize("who", ["user", "root"])
def test_step(lab: Lab, in_lab: tuple[str, ...], table: dict[str, dict[str, str]], who: str, remap: str) -> None:
    words = ["srun", *ON_N1, "--pty", *in_lab, *filter(None, [remap]), "probe"]
    user = "alice" if who == "user" else "root"
    try:
        found = cells(lab.run(["script", "-qec", shlex.join(words), "/dev/null"], user=user).stdout)
    finally:
        lab.run("rm -rf /var/tmp/enroot-*-0 /tmp/enroot-run-0 /run/pyxis/0", node="n1", user="root")
    table[f"{who} step {remap}"] = found
    assert found == expected(BY_SLURM, (remap,))


@pytest.mark.security("C6")
@pytest.mark.parametrize("remap", ["", "--container-remap-root"])
def test_ssh(lab: Lab, laptop: Laptop, in_lab: tuple[str, ...], table: dict[str, dict[str, str]], remap: str) -> None:
    with job(lab, *in_lab, *filter(None, [remap])) as number:
        typed = f"ssh -tt {number}.cluster probe"
        found = cells(laptop.run("script", "-qec", typed, "/dev/null").stdout)
    table[f"user ssh {remap}"] = found
    assert found == expected(BY_SLURM, (remap,))


@pytest.fixture
def root_home(lab: Lab) -> Iterator[str]:
    """Yield a home of root that all nodes see, for the keys with which ssh enters a job."""
    home = "/home/root"
    lab.run(f"mkdir -m 700 {home}", user="root")
    yield home
    lab.run(f"rm -r {home}", user="root")
    lab.run("rm -rf /var/tmp/enroot-*-0 /tmp/enroot-run-0 /run/pyxis/0", node="n1", user="root")


@pytest.mark.parametrize("remap", ["", "--container-remap-root"])
def test_ssh_of_root(
    lab: Lab, root_home: str, in_lab: tuple[str, ...], table: dict[str, dict[str, str]], remap: str
) -> None:
    """Root's ssh runs ``penroot ssh-proxy`` itself, without a login node in between."""
    keys = f"{root_home}/keys"
    with job(lab, *in_lab, *filter(None, [remap]), user="root") as number:
        known = f"-i {keys} -o UserKnownHostsFile={keys} -o HostKeyAlias=penroot"
        typed = f"ssh -tt -F none -o 'ProxyCommand=penroot ssh-proxy %n' {known} {number}.cluster probe"
        script = f"umask 077; penroot ssh-key {number} > {keys} && exec script -qec {shlex.quote(typed)} /dev/null"
        found = cells(lab.run(script, user="root", env={"HOME": root_home}).stdout)
    table[f"root ssh {remap}"] = found
    assert found == expected(BY_SLURM, (remap,))


def sessions(shown: str) -> list[list[str]]:
    """Return ID and description of each session keyring in the output."""
    return [line.split()[-2:] for line in shown.splitlines() if "session " in line]


@pytest.mark.parity("ENROOT_UNSHARE_KEYRING")
@pytest.mark.security("O7")
def test_keyring_of_each_task_is_new_by_setting(lab: Lab, in_lab: tuple[str, ...]) -> None:
    words = (in_lab[0], "-n2", "/bin/probe", "session")
    (shared, _), (same, _) = sessions(srun(lab, *words))
    assert shared == same
    (first, one), (second, other) = sessions(srun(lab, *words, env={"ENROOT_UNSHARE_KEYRING": "yes"}))
    assert first != second and one.endswith(";_ses") and other.endswith(";_ses")


@pytest.mark.security("O7")
def test_keyring_of_ssh_is_new_by_setting(lab: Lab, laptop: Laptop, in_lab: tuple[str, ...]) -> None:
    script = "export ENROOT_UNSHARE_KEYRING=yes; exec srun -w n1 --mem=500 " + shlex.join((*in_lab, *sh(UP)))
    step = lab.popen(sh(script))
    try:
        number = next_line(step).strip()
        shown = [laptop.ssh(f"{number}.cluster", "probe session") for _ in range(2)]
    finally:
        lab.run(["scancel", "--user=alice"])
        step.communicate(timeout=60)
    ((first, one),), ((second, other),) = map(sessions, shown)
    assert first != second and one.endswith(";_ses") and other.endswith(";_ses")
