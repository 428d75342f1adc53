"""``make bench``: what a start costs, and a step, next to peers. See BENCHMARKS for the rows.

Ratios are of the 10th percentile: what the program costs, not what the
machine was doing. A peer that is not installed is MISSING.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.images import bench_images
from tests.kernel.conftest import UID, User, busybox_rootfs
from tests.slurm.lab import Lab

PREFIX = os.environ.get("PENROOT_PREFIX", "/opt/penroot")
TIMING = pathlib.Path(__file__).with_name("timing.py")
PYTHON = ["/usr/bin/python3", "-IS", "-c", "pass"]


class Row:
    """One line: a command, and the most that it may cost in units of the baseline."""

    def __init__(self, name: str, command: list[str] | None, budget: float | None = None) -> None:
        self.name = name
        self.command = command
        self.budget = budget


def p10(times: list[float]) -> float:
    return sorted(times)[len(times) // 10]


def table(title: str, rows: list[Row], times: dict[str, list[float]], baseline: str) -> bool:
    """Print one table; False where a row costs more than it may."""
    print(f"\n{title}\n{'':44} {'p10 ms':>8} {'median':>8} {'ratio':>6}  budget")
    unit = p10(times[baseline])
    good = True
    for row in rows:
        if row.command is None:
            print(f"{row.name:44} {'MISSING':>8}")
            continue
        low, middle = p10(times[row.name]), statistics.median(times[row.name])
        ratio = low / unit
        verdict = ""
        if row.budget is not None:
            within = ratio <= row.budget
            good &= within
            verdict = f"<= {row.budget:g}x {'ok' if within else 'TOO SLOW'}"
        print(f"{row.name:44} {low * 1000:8.1f} {middle * 1000:8.1f} {ratio:5.2f}x  {verdict}")
    return good


def installed(program: str, *arguments: str) -> list[str] | None:
    path = shutil.which(program)
    return [path, *arguments] if path else None


@contextmanager
def ordinary_user() -> Iterator[User]:
    """A user with the container ``box`` and the image ``box.sqsh``."""
    home = pathlib.Path(tempfile.mkdtemp(prefix="penroot-bench-", dir="/var/tmp"))
    home.chmod(0o755)
    user = User(home)
    busybox_rootfs(user.data / "box")
    squash = [
        "mksquashfs",
        str(user.data / "box"),
        str(home / "box.sqsh"),
        "-comp",
        "zstd",
        "-all-root",
        "-quiet",
        "-no-progress",
    ]
    subprocess.run(squash, check=True, stdout=subprocess.DEVNULL)
    user.own(home)
    os.chmod("/dev/fuse", 0o666)
    try:
        yield user
    finally:
        shutil.rmtree(home)


def bench_start(rounds: int) -> bool:
    """A container from the command line."""
    with ordinary_user() as user:
        box, image = user.data / "box", user.home / "box.sqsh"
        penroot = [f"{PREFIX}/bin/penroot", "start"]
        rows = [
            Row("python3 -IS -c pass", PYTHON),
            Row("penroot start NAME true", [*penroot, "box", "true"], 2.5),
            Row("penroot start x.sqsh true", [*penroot, str(image), "true"], 3),
            Row("ch-run", installed("ch-run", "--no-passwd", str(box), "--", "/bin/true")),
            Row(
                "bwrap", installed("bwrap", "--ro-bind", str(box), "/", "--proc", "/proc", "--dev", "/dev", "/bin/true")
            ),
            Row("enroot start NAME true", installed("enroot", "start", "box", "true")),
        ]
        asked = {"rounds": rounds, "commands": {row.name: row.command for row in rows if row.command}}
        command = ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups", "/usr/bin/python3", "-"]
        with open(TIMING) as script:
            source = script.read().replace("json.load(sys.stdin)", f"json.loads({json.dumps(json.dumps(asked))})")
        done = subprocess.run(
            command,
            input=source,
            env={**user.environ, "USER": "bench"},
            cwd="/",
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        return table("A start, as an ordinary user", rows, json.loads(done.stdout), rows[0].name)


def bench_step(rounds: int) -> bool:
    """A container step on a cluster of one node, over what a plain srun costs."""
    lab = Lab()
    found = lab.is_up()
    lab.up(2, prefix=PREFIX)
    try:
        reference = "registry:5000#mpi:1"
        fill = "dd if=/dev/urandom of=/fill bs=1M count=60 2>/dev/null"
        for node in lab.nodes:
            lab.run(["srun", "-w", node, f"--container-image={reference}", "--container-name=bench", "true"])
        lab.run(f"penroot create -f -n big docker://{reference} && penroot start --rw big sh -c '{fill}'", node="n1")
        lab.run("penroot export -f -o big.sqsh big && penroot remove -f big", node="n1")
        size = int(lab.run("stat -c %s big.sqsh").stdout) / 1e6
        srun = ["srun", "-w", "n1"]
        rows = [
            Row("srun true", [*srun, "true"]),
            Row("named and stored", [*srun, "--container-name=bench", "true"]),
            Row("REF, stored", [*srun, f"--container-image={reference}", "true"]),
            Row("REF, stored, 4 tasks", [*srun, "-n4", "--overcommit", f"--container-image={reference}", "true"]),
            Row(f"./x.sqsh of {size:.0f} MB", [*srun, "--container-image=./big.sqsh", "true"]),
            Row("python3 -IS -c pass", PYTHON),
        ]
        asked = {"rounds": rounds, "commands": {row.name: row.command for row in rows}}
        with open(TIMING) as script:
            source = script.read().replace("json.load(sys.stdin)", f"json.loads({json.dumps(json.dumps(asked))})")
        done = lab.run(["/usr/bin/python3", "-"], input=source, timeout=600)
        times = json.loads(done.stdout)
        table("A step, as an ordinary user", rows, times, rows[0].name)
        return over(rows, times, {"named and stored": 5, "REF, stored": None, rows[4].name: 6})
    finally:
        for node in lab.nodes:
            lab.run(["penroot", "remove", "-f", "pyxis_bench"], node=node, check=False)
        lab.run(["rm", "-f", "big.sqsh"])
        if not found:
            lab.down()


MOST = 0.150  # seconds that any container may add to a step


def over(rows: list[Row], times: dict[str, list[float]], budgets: dict[str, float | None]) -> bool:
    """Print what a container adds to a plain step; False where that is more than MOST or its budget.

    A budget is in units of the last row, the bare interpreter.
    """
    plain, bare = p10(times[rows[0].name]), p10(times[rows[-1].name])
    good = True
    print(f"\n{'over plain srun':44} {'ms':>8} {'of bare python3':>17}  budget")
    for name, budget in budgets.items():
        added = p10(times[name]) - plain
        within = added <= MOST and (budget is None or added <= budget * bare)
        good &= within
        limit = f"<= {MOST * 1000:.0f} ms" + (f", {budget:g}x" if budget else "")
        print(f"{name:44} {added * 1000:8.1f} {added / bare:16.1f}x  {limit} {'ok' if within else 'TOO SLOW'}")
    return good


BENCHMARKS = {"start": (bench_start, 60), "step": (bench_step, 20), "images": (bench_images, 2)}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python3 -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", default=list(BENCHMARKS), help=", ".join(BENCHMARKS))
    parser.add_argument("--rounds", type=int, help="runs of each command")
    given = parser.parse_args()
    good = True
    for name in given.names:
        run, rounds = BENCHMARKS[name]
        good &= run(given.rounds or rounds)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
