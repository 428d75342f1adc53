"""Measure the CPU time of a tracker. One process acts as all nodes, with real connections on loopback.

Each node joins, sends a report in each period, and reports its end. The nodes join in groups, since all nodes share one
processor.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Mapping, Sequence

from enroot_py.features.swarm import wire
from enroot_py.features.swarm.invitation import Swarm
from enroot_py.features.swarm.loop import TO_TRACKER, Connection, Loop
from enroot_py.features.swarm.messages import Documents, Joined, Progress, Report, report_interval
from enroot_py.features.swarm.ports import listener
from enroot_py.features.swarm.tracker_process import TrackerProcess

NODES = (100, 1000, 10_000)
LAYERS = (2_500_000_000, 1_200_000_000, 700_000_000, 400_000_000, 200_000_000)
PERIODS = 3  # in each period, each node sends a report
MAX_CPU_SHARE = 0.5  # of one processor, while nodes report
_DOCUMENT = b" " * 8192  # bytes of a manifest, and of a config
_GROUP = 200  # nodes that join at a time
_TICKS = os.sysconf("SC_CLK_TCK")


class _Host:
    seed_descriptors = ()

    def documents(self) -> tuple[Documents, Sequence[int]]:
        return Documents("sha256:" + "0" * 64, "amd64", _DOCUMENT, _DOCUMENT, b"", ""), LAYERS

    def show(self, size: int, progress: Callable[[], Progress], *, ended: bool) -> None:
        progress()

    def seed(self) -> None:
        """The benchmark needs no seed."""


class _Nodes:
    """All nodes of a swarm, in one loop."""

    def __init__(self, swarm: Swarm, port: int) -> None:
        self.swarm, self.port = swarm, port
        self.loop = Loop(swarm, 0)
        self.trees = 0
        self.planned: set[int] = set()
        self.released: set[int] = set()
        self.received = 0  # messages
        self.informed: set[int] = set()  # nodes that have the documents
        self.fetched: dict[int, int] = {}  # bytes from the registry, by node
        self.errors: list[str] = []  # reasons of connections that have ended
        self.connections: dict[int, Connection] = {}

    def join(self) -> bool:
        """Connect more nodes. Return True if all nodes have their routes."""
        waiting = len(self.connections) - len(self.informed)
        for node in range(len(self.connections), min(self.swarm.nodes, len(self.connections) + _GROUP - waiting)):
            self.loop.node = node
            connection = self.connections[node] = self.loop.connect(TO_TRACKER, ("127.0.0.1", self.port))
            connection.max_bytes = wire.MAX_TRACKER_BYTES
            connection.on_ready = lambda connection=connection: connection.send({"is": "Come", "lacks": True})  # type: ignore[misc]
            connection.on_message = lambda message, node=node: self._hear(node, message)  # type: ignore[misc]
            connection.on_close = self.errors.append
        return len(self.planned) == self.swarm.nodes

    def _hear(self, node: int, message: Mapping[str, object]) -> None:
        self.received += 1
        kind = message["is"]
        if kind == "Documents":
            self.informed.add(node)
            joined = Joined(("", 1024 + node), tuple(range(len(LAYERS))), name=f"n{node}")
            self.connections[node].send(wire.encode(joined))
        elif kind == "Routes":
            self.trees = int(str(message["trees"]))
            self.planned.add(node)
        elif kind == "FetchBlobs":
            self.fetched[node] = sum(LAYERS[blob] for blob in message["blobs"])  # type: ignore[attr-defined, misc]
        elif kind == "Released":
            self.released.add(node)
            self.connections[node].close()

    def report(self, part: float, *, done: bool) -> None:
        got = tuple(int(sum(LAYERS) * part / self.trees) for _ in range(self.trees))
        for node, connection in self.connections.items():
            work = self.fetched.get(node, 0)
            report = Report(got, int(work * part), done, work - int(work * part))
            connection.send(wire.encode(report))

    def serve(self, until: Callable[[], bool]) -> None:
        def tick(now: float) -> None:
            self.loop.running = not (self.errors or until())

        self.loop.tick, self.loop.running = tick, True
        self.loop.run()


def bench_tracker(rounds: int) -> bool:
    """Print the CPU seconds until all nodes have their routes, in a period of reports, and at the end."""
    hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    columns = "".join(f"{name:>12}" for name in ("plan, CPU s", "a period", "the end", "messages", "MB"))
    print(f"\n{'srun as tracker: nodes':28}{columns}")
    good = True
    for nodes in NODES:
        if nodes + 100 > hard_limit:
            print(f"{nodes:28} MISSING: the limit is {hard_limit} descriptors: raise ulimit -n")
            good = False
            continue
        for _ in range(rounds):
            good &= measure_tracker(nodes)
    return good


def measure_tracker(nodes: int) -> bool:
    """Print a row. Return whether the CPU time of reports is within the budget."""
    swarm = Swarm(os.urandom(32), "1.0", nodes)
    sock = listener()
    lifeline, life = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(life)
        try:
            TrackerProcess(swarm, _Host(), sock).serve(lifeline)
        finally:
            os._exit(0)
    os.close(lifeline)
    all_nodes = _Nodes(swarm, sock.getsockname()[1])
    sock.close()
    all_nodes.serve(all_nodes.join)
    planned = _cpu(process)
    period = report_interval(nodes)
    for number in range(PERIODS):
        all_nodes.report((number + 1) / (PERIODS + 1), done=False)
        until = time.monotonic() + period
        all_nodes.serve(lambda until=until: time.monotonic() > until)  # type: ignore[misc]
    reported = _cpu(process)
    all_nodes.report(1.0, done=True)
    all_nodes.serve(lambda: len(all_nodes.released) == nodes)
    os.close(life)
    usage = os.wait4(process, 0)[2]
    if all_nodes.errors:
        print(f"{nodes:28} FAILED: {len(all_nodes.errors)} connections have ended: {all_nodes.errors[0]}")
        return False
    ended = usage.ru_utime + usage.ru_stime
    share = (reported - planned) / PERIODS
    costs = f"{planned:12.2f}{share:12.2f}{ended - reported:12.2f}{all_nodes.received:12}{usage.ru_maxrss / 1e3:12.0f}"
    print(
        f"{nodes:28}{costs}  {'ok' if share <= MAX_CPU_SHARE * period else 'OVER'}: a period is {period:.0f} s",
        flush=True,
    )
    return share <= MAX_CPU_SHARE * period


def _cpu(process: int) -> float:
    """Return the CPU seconds of a process."""
    with open(f"/proc/{process}/stat") as stat:
        fields = stat.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS
