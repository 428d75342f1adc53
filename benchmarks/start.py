"""Measure starts of the program alone, of containers, images and bundles, and starts with the device hooks."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.tables import PREFIX, PYTHON, Row, command_if_installed, print_added, table, timing_program
from tests import fakehost
from tests.kernel.conftest import UID, User, busybox_rootfs

START = [f"{PREFIX}/bin/penroot", "start"]


@contextmanager
def ordinary_user() -> Iterator[User]:
    """Make a user with the container ``box`` and the image ``box.sqsh``."""
    home = pathlib.Path(tempfile.mkdtemp(prefix="penroot-bench-", dir="/var/tmp"))
    home.chmod(0o755)
    user = User(home)
    busybox_rootfs(user.data / "box")
    user.own(home)
    user.penroot("export", "-o", str(home / "box.sqsh"), "box")
    os.chmod("/dev/fuse", 0o666)
    try:
        yield user
    finally:
        shutil.rmtree(home)


def measure_as_user(user: User, rows: list[Row], rounds: int) -> dict[str, list[float]]:
    """Run the commands of the rows as the user, and return their times by row."""
    as_user = ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups", "/usr/bin/python3", "-"]
    environ = {**user.environ, "USER": "bench"}
    commands = {row.name: row.command for row in rows if row.command}
    program = timing_program(commands, rounds)
    done = subprocess.run(as_user, input=program, env=environ, cwd="/", stdout=subprocess.PIPE, text=True, check=True)
    times: dict[str, list[float]] = json.loads(done.stdout)
    return times


def bench_start(rounds: int) -> bool:
    """Measure starts from the command line."""
    with ordinary_user() as user:
        box, image, bundle = str(user.data / "box"), str(user.home / "box.sqsh"), str(user.home / "box.run")
        user.penroot("bundle", "-o", bundle, image)
        peers = {
            "ch-run": ["ch-run", "--no-passwd", box, "--", "/bin/true"],
            "bwrap": ["bwrap", "--ro-bind", box, "/", "--proc", "/proc", "--dev", "/dev", "/bin/true"],
            "enroot start NAME true": ["enroot", "start", "box", "true"],
            "enroot start x.sqsh true": ["enroot", "start", image, "true"],
        }
        rows = [
            Row("python3 -IS -c pass", PYTHON),
            Row("penroot start NAME true", [*START, "box", "true"], 2.3),
            Row("penroot start x.sqsh true", [*START, image, "true"], 3),
            Row("penroot --help", [START[0], "--help"], 1.6),
            Row("penroot list", [START[0], "list"], 6.5),
            Row("./x.run true, a bundle", [bundle, "true"]),
            *(Row(name, command_if_installed(*command)) for name, command in peers.items()),
        ]
        return table("A start, as an ordinary user", rows, measure_as_user(user, rows, rounds), rows[0].name)


def bench_devices(rounds: int) -> bool:
    """Measure the hooks for GPUs and InfiniBand on a fake DGX: 8 GPUs, two of them with MIG instances, and 10 HCAs."""
    with ordinary_user() as user:
        host = fakehost.dgx_a100(user.home / "dgx")
        host.cdi()
        user.environ.update(fakehost.as_host(host, user.home / "etc"))

        def start(nvidia: str, mellanox: str, *variables: str) -> list[str]:
            devices = [f"NVIDIA_VISIBLE_DEVICES={nvidia}", f"MELLANOX_VISIBLE_DEVICES={mellanox}"]
            return [*devices, *variables, *START, "box", "true"]

        native, private_dev = "PENROOT_NVIDIA_MODE=native", "ENROOT_RESTRICT_DEV=yes"
        rows = [
            Row("python3 -IS -c pass", PYTHON),
            Row("no device", start("void", "void")),
            Row("no device, private /dev", start("void", "void", private_dev)),
            Row("all", start("all", "all", native)),
            Row("all by CDI", start("all", "all", "PENROOT_NVIDIA_MODE=cdi")),
            Row("2 GPUs, 2 HCAs", start("0,3", "0,3", native)),
            Row("all, private /dev", start("all", "all", native, private_dev)),
            Row("2 GPUs, 2 HCAs, private /dev", start("0,3", "0,3", native, private_dev)),
        ]
        times = measure_as_user(user, rows, rounds)
        table("A start on a fake DGX, as an ordinary user", rows, times, rows[0].name)
        compared = [
            (row.name, "no device, private /dev" if "private" in row.name else "no device", 0.6) for row in rows[3:]
        ]
        return print_added("what devices add", times, times[rows[0].name], compared)
