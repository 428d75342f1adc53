"""``make bench``: measure the cost of starts, steps and imports, and compare it with other tools.

Each benchmark prints a table. The exit status is 1 if a row exceeds its budget.
"""

from __future__ import annotations

import argparse
import sys

from benchmarks.against import bench_against
from benchmarks.cold import bench_pytorch
from benchmarks.first import bench_first
from benchmarks.images import bench_images
from benchmarks.many import bench_many
from benchmarks.mpi.lab import bench_mpi
from benchmarks.originals import bench_originals
from benchmarks.reading import bench_reading
from benchmarks.start import bench_devices, bench_start
from benchmarks.step import bench_step
from benchmarks.swarm.lab import bench_swarm
from benchmarks.swarm.tracker import bench_tracker

BENCHMARKS = {
    "start": (bench_start, 60),
    "many": (bench_many, 240),
    "devices": (bench_devices, 60),
    "step": (bench_step, 40),
    "images": (bench_images, 2),
    "first": (bench_first, 3),
    "reading": (bench_reading, 20),
    "pytorch": (bench_pytorch, 2),
    "swarm": (bench_swarm, 1),
    "tracker": (bench_tracker, 1),
    "mpi": (bench_mpi, 20),
    "originals": (bench_originals, 3),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python3 -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", default=list(BENCHMARKS), help=", ".join(BENCHMARKS))
    parser.add_argument("--rounds", type=int, help="runs of each command")
    parser.add_argument("--against", metavar="PREFIX", help="only compare with the penroot in PREFIX")
    arguments = parser.parse_args()
    if arguments.against:
        return 0 if bench_against(arguments.rounds or 200, arguments.against) else 1
    good = True
    for name in arguments.names:
        run, rounds = BENCHMARKS[name]
        good &= run(arguments.rounds or rounds)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
