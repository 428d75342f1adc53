"""The command line of the matrix; the package's docstring describes it."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import ParseError

from . import __doc__ as manual
from . import foreign, report, source, vm
from .roots import MatrixError, Root, prepared, tail

RELEASES = ("bookworm", "trixie", "forky")
# Tests of features that differ between releases of Slurm. They take ten minutes.
QUICK = ("steps", "mpi", "lifecycle", "gpus", "plugstack", "extern")
# Lanes run side by side, as in tests/all: the lab spends half of its time waiting for Slurm.
LANES = (("unit", "kernel"), ("slurm",))
# Tiers that run in a virtual machine, with systemd.
IN_MACHINE = ("slurm", "systemd")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python3 -m tests.matrix", description=manual, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    tiers = ["demo", *(tier for lane in LANES for tier in lane), "systemd"]
    parser.add_argument("--arch", default="", choices=foreign.MACHINES, help="test on this architecture, emulated")
    parser.add_argument(
        "--release", action="append", metavar="NAME", help=f"Debian release to test: {', '.join(RELEASES)}"
    )
    parser.add_argument("--tier", action="append", choices=tiers, help="run only this tier")
    parser.add_argument("--test", action="append", metavar="PATH", help="run only this test")
    parser.add_argument("--quick", action="store_true", help=f"run only these tests of Slurm: {', '.join(QUICK)}")
    parser.add_argument("--vm", action="store_true", help=f"run {' and '.join(IN_MACHINE)} in a virtual machine")
    parser.add_argument("--slurm-source", metavar="DIR", help="build Slurm from this source, and test with it")
    arguments = parser.parse_args()
    releases = arguments.release or (RELEASES[1:2] if arguments.arch else RELEASES[1:] if arguments.quick else RELEASES)
    if arguments.quick:
        arguments.tier, arguments.test = ["slurm"], [f"tests/slurm/test_{name}.py" for name in QUICK]
    if arguments.arch and not arguments.test:
        arguments.test = SMOKE if arguments.vm else WITHOUT_NAMESPACES
    in_machine = (*LANES[0], *IN_MACHINE) if arguments.arch else IN_MACHINE
    arguments.tier = arguments.tier or (in_machine if arguments.vm else tiers[bool(arguments.test) : -1])

    # Exit through finally blocks, which end processes and remove labs.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit("matrix: ended by SIGTERM"))
    logs = Path(tempfile.mkdtemp(prefix="penroot-matrix-"))
    say(f"output of all commands: {logs}")
    outcomes: list[report.Outcome] = []
    unprepared = []
    for release in releases:
        try:
            outcomes += (test_in_machine if arguments.vm else test)(release, arguments, logs)
        except MatrixError as e:
            unprepared.append(str(e))
    print(report.table(outcomes), *unprepared, sep="\n")
    return 1 if unprepared or any(outcome.ours for outcome in outcomes) else 0


# qemu-user(1) has two threads, and unshare(2) lets no threaded process create a user namespace.
WITHOUT_NAMESPACES = ("tests/unit", *(f"tests/kernel/test_{name}.py" for name in ("images", "logins", "plugin_build")))
# A quarter of an hour of tests for another architecture: an image of each form, and MPI ranks.
SMOKE = (
    "tests/kernel/test_start.py::test_environment_is_the_images",
    "tests/kernel/test_start.py::test_squashfs_image",
    "tests/kernel/test_bundle.py::test_a_bundle_runs_and_leaves_nothing",
    "tests/systemd/test_units.py::test_ranks_of_mpi_find_each_other",
)
INSTALL = "make install .venv/done PREFIX=/opt/penroot EXTRAS=ssh,signatures"


def test(release: str, arguments: argparse.Namespace, logs: Path) -> list[report.Outcome]:
    """Run each tier on one release, and return the results. Raises MatrixError."""
    log = logs / f"{release}.log"
    with prepared(release, log, say, **root_options(arguments)) as root:
        if arguments.slurm_source:
            root = source.built(root, arguments.slurm_source, log, say)
        slurm = slurm_version(root, logs) + (f" of {arguments.slurm_source}" if arguments.slurm_source else "")
        say(f"{release}: Slurm {slurm}")
        outcomes = []
        if arguments.arch:
            root = foreign.installed(root, arguments.arch, log, say)
        elif "demo" in arguments.tier:
            outcomes.append(demo(root, slurm, logs / f"{release}-demo.log"))  # the demo also installs penroot
        else:
            root.must(INSTALL, logs / f"{release}.log")
        return outcomes + lanes(root, slurm, arguments, logs)


def root_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options of `prepared`.

    An emulated root takes half an hour to make. So it also has the packages of a virtual machine, and serves both uses.
    """
    if arguments.arch:
        foreign.emulate(arguments.arch)
        return {"arch": arguments.arch, "packages": vm.packages(arguments.arch)}
    return {"kind": "vm", "packages": vm.packages("")} if arguments.vm else {}


def test_in_machine(release: str, arguments: argparse.Namespace, logs: Path) -> list[report.Outcome]:
    """Run each tier in a virtual machine of one release, and return the results. Raises MatrixError."""
    log = logs / f"{release}.log"
    with prepared(release, log, say, **root_options(arguments)) as root:
        if arguments.arch:
            root = foreign.installed(root, arguments.arch, log, say)
        else:
            root.must(INSTALL, log)
        # Make the lab's images here: this takes long with an emulated processor, and needs a network.
        root.must(".venv/bin/python -c 'from tests.slurm.lab import images; images.build()'", log)
        slurm = slurm_version(root, logs)
        runs = scripts(arguments.tier, arguments.test, "-o", "timeout=3600")
        console = logs / f"{release}-vm.log"
        disk = vm.run(root, arguments.arch, "; ".join(runs.values()), console, say)
    outcomes = []
    for tier in runs:
        file = logs / Path(junit(tier)).name
        vm.fetch(disk, junit(tier), file)
        outcomes.append(outcome(f"{root.release} vm", slurm, tier, file, console))
    disk.unlink()
    return outcomes


def slurm_version(root: Root, logs: Path) -> str:
    log = logs / f"{root.release}.version"
    root.must("slurmd -V", log)
    return log.read_text().split()[-1]


def demo(root: Root, slurm: str, log: Path) -> report.Outcome:
    began = time.monotonic()
    status = root.run("make demo PREFIX=/opt/penroot EXTRAS=ssh,signatures", log)
    seconds = time.monotonic() - began
    if status == 0:
        return report.Outcome(root.release, slurm, "demo", seconds, passed=1)
    return report.Outcome(root.release, slurm, "demo", seconds, failures=[report.Failure("make demo", tail(log))])


def lanes(root: Root, slurm: str, arguments: argparse.Namespace, logs: Path) -> list[report.Outcome]:
    """Run the requested tiers, and return the results. Tiers of a lane run one after the other."""
    started = []
    for lane in LANES:
        runs = scripts([tier for tier in lane if tier in arguments.tier], arguments.test)
        if runs:
            log = logs / f"{root.release}-{'-'.join(runs)}.log"
            started.append((root.popen("; ".join(runs.values()), log), log, runs))
    outcomes = []
    try:
        for process, log, runs in started:
            process.wait()
            outcomes += [outcome(root.release, slurm, tier, Path(f"{root.path}{junit(tier)}"), log) for tier in runs]
        if arguments.test:  # a known failure may be in a test that did not run
            outcomes = [replace(outcome, repaired=()) for outcome in outcomes]
    finally:
        for process, _, _ in started:
            process.kill()
    return outcomes


def scripts(tiers: Iterable[str], tests: Sequence[str] | None, *options: str) -> dict[str, str]:
    """Return a shell command for each tier that runs all its tests, or those in ``tests``, and writes a JUnit file."""
    made = {}
    for tier in tiers:
        if paths := [path for path in tests or [f"tests/{tier}"] if path.startswith(f"tests/{tier}")]:
            words = ["-o", "junit_family=xunit1", f"--junit-xml={junit(tier)}", *paths, *options]
            made[tier] = f"rm -f {junit(tier)}; .venv/bin/python -m pytest {' '.join(words)}"
    return made


def junit(tier: str) -> str:
    return f"/var/tmp/matrix-{tier}.xml"


def outcome(release: str, slurm: str, tier: str, file: Path, log: Path) -> report.Outcome:
    try:
        return report.of_junit(release, slurm, tier, file)
    except (OSError, ParseError):
        cut = report.Failure(f"pytest tests/{tier}", f"did not finish, see {log}\n{tail(log)}")
        return report.Outcome(release, slurm, tier, 0, failures=[cut])


def say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MatrixError as e:
        sys.exit(f"matrix: {e}")
