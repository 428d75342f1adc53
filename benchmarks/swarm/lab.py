"""Measure one pull for all nodes of a step, on slow links, compared with one node and with nodes without a swarm.

The seconds end when the last node has begun its task. CPU is the time of all processes in three columns: per node on
average, of srun's host, and of the rest of the machine (the lab's registry, links and daemons). The column
``predicted`` has the seconds of a simulation with such links, without the time to start a container.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import pathlib
import statistics
import tempfile
import time
from collections import Counter
from dataclasses import dataclass

from benchmarks.swarm import simulation
from benchmarks.tables import PREFIX, judge
from tests.images import Image, Layer, busybox, entry, tar
from tests.kernel.registry import Server, serve
from tests.slurm.lab import Lab
from tests.slurm.steps import plugin_argument
from tests.slurm.test_pull import front

NODES = 8
RATE = 30_000_000  # bits a second, on the link of each node and on the link of the registry
LAYERS = (80, 70, 60, 40)  # MB, incompressible
MAX_RATIOS = {2: 1.05, 4: 1.08, NODES: 1.15}  # duration, relative to one node
MAX_CPU_S = 8.0  # per node
MAX_STORED_RATIO = 1.1  # if all nodes have the image, relative to swarm=no
_PAYLOAD = 1448 / 1514  # fraction of an Ethernet frame that TCP over IPv4 leaves for data
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Run:
    seconds: float
    node: float  # CPU seconds per node
    host: float  # CPU seconds of srun's host
    other: float  # CPU seconds of the rest of the machine
    sent: int  # bytes of blobs that the registry has sent
    requests: Counter[tuple[str, str]]


def bench_swarm(rounds: int) -> bool:
    """Pull an image that no node has, that all nodes but one have, and that all nodes have."""
    lab = Lab()
    lab = Lab(f"{lab.root}-eight")
    lab.up(NODES, prefix=PREFIX)
    good = True
    try:
        with tempfile.TemporaryDirectory() as storage, serve(pathlib.Path(storage)) as registry:
            size = sum(LAYERS)
            print(
                f"\n{len(LAYERS)} layers of {size} MB, {RATE / 1e6:.0f} Mbit/s: {size * 8e6 / RATE:.0f} s for one copy"
            )
            cpu = f"{'node':>8} {'srun':>6} {'lab':>8}"
            print(f"{'':44} {'seconds':>8} {cpu} {'MB net':>9} {'requests':>9} {'predicted':>9}")
            for number in range(rounds):
                good &= _rows(lab, registry, number)
    finally:
        lab.down()
    return good


def _rows(lab: Lab, registry: Server, number: int) -> bool:
    alone = step(lab, registry, f"alone{number}", 1)
    show("1 node", alone, nodes=1)
    good = True
    for nodes, ratio in MAX_RATIOS.items():
        together = step(lab, registry, f"together{nodes}.{number}", nodes)
        good &= show(f"{nodes} nodes", together, alone, ratio, nodes=nodes)
        good &= max(together.requests.values()) == 1 and together.node <= MAX_CPU_S
    step(lab, registry, f"most{number}", NODES - 1)
    one = step(lab, registry, f"most{number}", NODES, again=True)
    show(f"{NODES} nodes, {NODES - 1} of which have it", one, alone)
    good &= one.sent <= 1.01e6 * sum(LAYERS)
    good &= _stored(lab, registry, f"together{NODES}.{number}")
    with plugin_argument(lab, "swarm=no"):
        show(f"{NODES} nodes, each for itself", step(lab, registry, f"each{number}", NODES), alone)
    return good


def _stored(lab: Lab, registry: Server, name: str) -> bool:
    """Run steps whose nodes all have the image, by turns with the swarm and without."""
    runs: dict[str, list[Run]] = {"swarm=yes": [], "swarm=no": []}
    for number in range(20):
        for argument in sorted(runs, reverse=number % 2 == 0):
            with plugin_argument(lab, argument):
                runs[argument].append(step(lab, registry, name, NODES, again=True))
    middle = {argument: statistics.median(run.seconds for run in every) for argument, every in runs.items()}
    ratio = middle["swarm=yes"] / middle["swarm=no"]
    good, verdict = judge(ratio, MAX_STORED_RATIO)
    show(f"{NODES} nodes, all of which have it", runs["swarm=yes"][-1])
    print(f"{'':44} {middle['swarm=yes']:8.2f} next to {middle['swarm=no']:.2f} with swarm=no  {ratio:6.2f}x {verdict}")
    return good


def step(lab: Lab, registry: Server, name: str, nodes: int, *, again: bool = False) -> Run:
    """Run a step. Push its image first, unless the step runs ``again``."""
    path = f"bench/{name}"
    if not again:
        registry.pusher.image(path, "a", _image())
    with contextlib.ExitStack() as shaped:
        for node in ("registry", *(f"n{n}" for n in range(1, NODES + 1))):
            shaped.enter_context(lab.slowed(node, RATE))
        shown = shaped.enter_context(front(lab, registry))
        names = ("ctl", *(f"n{n}" for n in range(1, nodes + 1)))
        used = [_used(lab, name) for name in names]
        busy, begun = _busy(), time.clock_gettime(time.CLOCK_BOOTTIME)
        srun = ["srun", f"-N{nodes}", f"--container-image={shown.host}#{path}:a", "cat", "/proc/uptime"]
        done = lab.run(srun, timeout=3000)
        busy = _busy() - busy
        host, *others = (_used(lab, name) - before for name, before in zip(names, used, strict=True))
        requests = Counter((request.method, request.path) for request in shown.seen)
        return Run(
            max(float(line.split()[0]) for line in done.stdout.splitlines()) - begun,
            statistics.mean(others),
            host,
            busy - host - sum(others),
            shown.sent("/blobs/"),
            requests,
        )


def show(name: str, run: Run, against: Run | None = None, budget: float | None = None, nodes: int = 0) -> bool:
    comparison, good = "", True
    if against:
        ratio = run.seconds / against.seconds
        good, verdict = judge(ratio, budget)
        comparison = f"  {ratio:6.2f}x {verdict}"
    repeats = max(run.requests.values(), default=0)  # of the most frequent request
    expected = f"{_predicted(nodes):9.1f}" if nodes else f"{'':9}"
    cpu = f"{run.node:8.2f} {run.host:6.2f} {run.other:8.2f}"
    print(f"{name:44} {run.seconds:8.2f} {cpu} {run.sent / 1e6:9.1f} {repeats:8}x {expected}{comparison}", flush=True)
    return good


def _predicted(nodes: int) -> float:
    """Return the simulated seconds until the last node is ready."""
    rate = RATE / 8 * _PAYLOAD
    world = simulation.World(nodes, [size * 1_000_000 for size in LAYERS], rate, rate, unpack=1e9)
    return simulation.last_of(simulation.Run(world).go())


def _image() -> Image:
    image = busybox()
    for number, size in enumerate(LAYERS):
        data = tar([entry(f"fill{number}", os.urandom(size * 1_000_000))])
        # Level 0 stores the data; isal's lowest level would add bytes.
        image.layers.append(Layer(data, blob=gzip.compress(data, 0)))
    return image


def _used(lab: Lab, node: str) -> float:
    """Return the CPU seconds of all processes of a lab machine."""
    space = os.readlink(f"/proc/{lab.node(node).pid}/ns/pid")
    used = 0
    for process in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # the process has just ended
            if os.readlink(f"/proc/{process}/ns/pid") == space:
                with open(f"/proc/{process}/stat") as stat:
                    own_and_ended = stat.read().rpartition(")")[2].split()[11:15]
                used += sum(map(int, own_and_ended))
    return used / _TICKS


def _busy() -> float:
    """Return the CPU seconds of the whole machine."""
    with open("/proc/stat") as stat:
        user, nice, system, _, _, irq, softirq, *_ = map(int, stat.readline().split()[1:])
    return (user + nice + system + irq + softirq) / _TICKS
