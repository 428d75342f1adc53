"""Run MPI and PyTorch on the host and in a container by turns, to check that a container costs nothing at run time.

PENROOT_BENCH_TORCH names the package that pip installs for the training, such as torch==2.13.0+cpu. With torch from
PyPI, pip downloads 5 GB of CUDA. The ratio is the median of the rounds' ratios, because the load of the machine is
similar in both runs of a round. The error of the median is 1.25 standard deviations over the square root of the number
of rounds.
"""

from __future__ import annotations

import json
import os
import pathlib
import statistics
import subprocess
import sys
from dataclasses import dataclass, field

from benchmarks.tables import PREFIX
from tests.slurm.lab import CommandFailed, Lab
from tests.slurm.lab.images import OVER_NODES

HERE = pathlib.Path(__file__).parent
PYTHON = "/usr/bin/python3"
MAX_DEVIATION = 0.03
COMPARED = {  # by program: its command line, and the options of srun by placement
    "C": (("./ranks",), {"one node": ("-N1", "-n2"), "two nodes": ("-N2", "-n2")}),
    "C, init": (("./ranks", "init"), {f"{ranks} ranks": ("-N2", f"-n{ranks}") for ranks in (2, 8, 16, 64)}),
    "mpi4py": ((PYTHON, "ranks.py"), {"one node": ("-N1", "-n2"), "two nodes": ("-N2", "-n2")}),
    "PyTorch": ((PYTHON, "training.py"), {"two nodes": ("-N2", "-n2")}),
}


@dataclass
class Turns:
    """The microseconds of one figure, on the host and in the container, in the order of the rounds."""

    host: list[float] = field(default_factory=list)
    container: list[float] = field(default_factory=list)

    def row(self, name: str) -> tuple[bool, str]:
        """Return whether host and container are equal within the allowed deviation, and the line of the table."""
        ratios = [inside / outside for inside, outside in zip(self.container, self.host, strict=True)]
        ratio = statistics.median(ratios)
        error = 1.25 * statistics.pstdev(ratios) / len(ratios) ** 0.5
        good = abs(ratio - 1) - error <= MAX_DEVIATION
        figures = f"{statistics.median(self.host):12.1f} {statistics.median(self.container):12.1f}"
        verdict = "ok" if good else "DIFFERS"
        return good, f"{name:44} {figures} {ratio:6.3f}x +- {error:.3f}  1.00 +- {MAX_DEVIATION} {verdict}"


def bench_mpi(rounds: int) -> bool:
    """Print the table. Return False if a container changes a figure."""
    lab = Lab(f"{Lab().root}-mpi")
    lab.up(2, prefix=PREFIX)
    good = True
    try:
        prepare(pathlib.Path(lab.root, "home/alice"))
        print(f"\n{'MPI and PyTorch':44} {'host us':>12} {'container us':>12} {'ratio':>7}")
        for name, (program, placements) in COMPARED.items():
            for placement, options in placements.items():
                try:
                    figures = by_turns(lab, [*options, *program], rounds)
                except CommandFailed as e:
                    good = False
                    print(f"{name}, {placement}: FAILED: {e.stderr.strip()[-300:]}")
                    continue
                for figure, turns in figures.items():
                    within, line = turns.row(f"{name}, {placement}: {figure}")
                    good &= within
                    print(line, flush=True)
    finally:
        lab.down()
    return good


def prepare(home: pathlib.Path) -> None:
    """Put the programs into the home directory: host and container run the same files."""
    subprocess.run(["mpicc.openmpi", "-O2", "-Wall", "-o", home / "ranks", HERE / "ranks.c"], check=True)
    for script in ("ranks.py", "training.py"):
        (home / script).write_text((HERE / script).read_text())
    torch = os.environ.get("PENROOT_BENCH_TORCH", "torch")
    for options in (["mpi4py", "numpy"], [torch]):
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-compile", "--upgrade", "--target", str(home / "lib")]
        subprocess.run([*pip, *options], check=True)


def by_turns(lab: Lab, step: list[str], rounds: int) -> dict[str, Turns]:
    """Run a step on the host and in a container by turns. The first round warms caches."""
    container = [
        "--container-image=registry:5000#mpi4py:1",
        "--container-mount-home",
        "--container-workdir=/home/alice",
    ]
    master = {
        "MASTER_ADDR": lab.node("n1").address,
        "MASTER_PORT": "29500",
        "GLOO_SOCKET_IFNAME": OVER_NODES["UCX_NET_DEVICES"],
    }
    variables = {**OVER_NODES, **master, "PYTHONPATH": "/home/alice/lib", "OMPI_MCA_mpi_yield_when_idle": "1"}
    figures: dict[str, Turns] = {}
    for round_ in range(rounds + 1):
        for options in ([], container) if round_ % 2 else (container, []):
            srun = ["srun", "--mpi=pmix", "--overcommit", "--mem=0", *options, *step]
            done = lab.run(srun, env=variables, timeout=600)
            for name, microseconds in json.loads(done.stdout).items() if round_ else ():
                turns = figures.setdefault(name, Turns())
                (turns.container if options else turns.host).append(microseconds)
    return figures
