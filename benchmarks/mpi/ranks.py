"""Measure messages between two ranks with mpi4py. Rank 0 prints one JSON object, in microseconds."""

from __future__ import annotations

import json
import time

import numpy
from mpi4py import MPI

WARM, LOOPS, LARGE_LOOPS = 20, 1000, 100
world = MPI.COMM_WORLD
rank, last = world.rank, world.size - 1


def pingpong(data: numpy.ndarray, loops: int) -> float:
    """Return the microseconds of a message in one direction."""
    for i in range(-WARM, loops):
        if i == 0:
            begin = time.perf_counter()
        if rank == 0:
            world.Send(data, last)
            world.Recv(data, last)
        elif rank == last:
            world.Recv(data, 0)
            world.Send(data, 0)
    return (time.perf_counter() - begin) / loops / 2 * 1e6


def allreduce(data: numpy.ndarray, loops: int) -> float:
    """Return the microseconds of an allreduce."""
    total = numpy.empty_like(data)
    for i in range(-WARM, loops):
        if i == 0:
            begin = time.perf_counter()
        world.Allreduce(data, total)
    return (time.perf_counter() - begin) / loops * 1e6


times = {
    "latency, 8 B": pingpong(numpy.ones(1), LOOPS),
    "4 MiB message": pingpong(numpy.ones(1 << 19), LARGE_LOOPS),
    "allreduce, 1 MiB": allreduce(numpy.ones(1 << 17), LARGE_LOOPS),
}
if rank == 0:
    print(json.dumps(times))
