"""Simulate a swarm in virtual time: the tracker and the peers of a job, on random links.

``python3 -m benchmarks.swarm.simulation [NODES...]`` prints the table of docs/explanation/performance.md; ten thousand
nodes take ten minutes. In each STEP_S of virtual time, a link moves rate * STEP_S bytes, also fractions of a byte. All
transfers over an uplink or downlink share its rate evenly. A node uploads only whole pieces. A message takes LATENCY_S.
"""

from __future__ import annotations

import heapq
import itertools
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy

from enroot_py.features.swarm import peer, tracker
from enroot_py.features.swarm.messages import Joined, Link, Routes

PIECE = 256 << 10
STEP_S = 0.02
LATENCY_S = 0.0005  # of a message
HANDSHAKE_S = 3 * 2 * LATENCY_S
DETECTION_S = 1.0  # until the other end notices a dead connection


@dataclass
class World:
    """The parameters. Rates are in bytes a second."""

    nodes: int
    blobs: list[int]
    link: float
    registry: float
    unpack: float  # rate, in compressed bytes
    late: float = 0.3  # seconds within which the nodes join
    dying: float = 0.0  # fraction of nodes that die
    slow: float = 0.0  # fraction of nodes with slow links
    slowness: float = 0.1  # rate of a slow link, relative to the other links
    dies_within: float = 5.0  # seconds after the node has joined
    seed: int = 1


@dataclass
class Outcome:
    ready: dict[int, float] = field(default_factory=dict)  # by living node: the time when it was ready
    slow: set[int] = field(default_factory=set)
    dead: set[int] = field(default_factory=set)
    from_registry: float = 0.0
    messages: int = 0
    uploads: list[float] = field(default_factory=list)
    fetchers: list[int] = field(default_factory=list)


class Run:
    def __init__(self, world: World) -> None:
        self.world = world
        self.random = random.Random(world.seed)
        self.now = 0.0
        self.outcome = Outcome()
        self.tracker = tracker.Tracker(world.blobs, world.nodes)
        lacks = tuple(range(len(world.blobs)))
        self.peers = [peer.Peer(Joined(("", node), lacks), world.nodes) for node in range(world.nodes)]
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.number = itertools.count()
        self.alive = numpy.ones(world.nodes, bool)
        self.joined = numpy.zeros(world.nodes, bool)
        self.up = numpy.full(world.nodes, world.link)
        self.down = numpy.full(world.nodes, world.link)
        self.wanted: dict[tuple[int, Link], frozenset[int]] = {}  # by child and link: the blobs to download
        self.edges: dict[tuple[int, Link], frozenset[int]] = {}  # the same for connected links
        self.changed = False
        self.fetches: dict[int, dict[int, float]] = {}  # by node and blob: remaining bytes
        self.trees = 0
        self.sizes = numpy.array(world.blobs, float)
        self.uploaded = numpy.zeros(world.nodes)
        for node in range(world.nodes):
            if self.random.random() < world.slow:
                self.outcome.slow.add(node)
                self.up[node] *= world.slowness
                self.down[node] *= world.slowness
            joins_at = self.random.random() * world.late
            self.at(joins_at, partial(self.join, node))
            if self.random.random() < world.dying:
                self.at(joins_at + self.random.random() * world.dies_within, partial(self.die, node))

    def at(self, time: float, event: Callable[[], None]) -> None:
        heapq.heappush(self.events, (time, next(self.number), event))

    # -- peers and tracker

    def join(self, node: int) -> None:
        self.joined[node] = True
        self.act(node, self.peers[node].begin(self.now))

    def die(self, node: int) -> None:
        if node in self.outcome.ready:
            return
        self.alive[node] = False
        self.outcome.dead.add(node)
        self.fetches.pop(node, None)
        for (child, link), _ in list(self.edges.items()):
            if link.parent == node:
                self.at(self.now + DETECTION_S, partial(self.lose, child, link))
            if child == node or link.parent == node:
                del self.edges[child, link]
        self.changed = True
        self.at(self.now + DETECTION_S, lambda: self.send(self.tracker.left(self.now, node)))

    def lose(self, child: int, link: Link) -> None:
        if self.alive[child]:
            self.act(child, self.peers[child].lost(self.now, link))

    def send(self, messages: Sequence[tuple[int, Any]]) -> None:
        self.outcome.messages += len(messages)
        for node, message in messages:
            self.at(self.now + LATENCY_S, partial(self.deliver, node, message))

    def deliver(self, node: int, message: Any) -> None:
        if not self.alive[node]:
            return
        if isinstance(message, Routes) and message.trees != self.trees:
            self.set_trees(message.trees)
        self.act(node, self.peers[node].handle(self.now, message))

    def act(self, node: int, actions: Iterable[peer.Action]) -> None:
        for action in actions:
            if isinstance(action, peer.SendToTracker):
                self.outcome.messages += 1
                self.at(self.now + LATENCY_S, partial(self.tell_tracker, node, action.message))
            elif isinstance(action, peer.Download):
                self.wanted[node, action.link] = action.blobs
                self.at(self.now + HANDSHAKE_S, partial(self.connect, node, action.link))
            elif isinstance(action, peer.StopDownload):
                self.wanted.pop((node, action.link), None)
                if self.edges.pop((node, action.link), None) is not None:
                    self.changed = True
            elif isinstance(action, peer.FetchFromRegistry):
                self.set_fetches(node, action.blobs)

    def tell_tracker(self, node: int, message: Any) -> None:
        self.send(self.tracker.handle(self.now, node, message))

    def connect(self, node: int, link: Link) -> None:
        if not self.alive[node] or (node, link) not in self.wanted:
            return
        if not self.alive[link.parent]:
            self.at(self.now + DETECTION_S, lambda: self.lose(node, link))
            return
        self.edges[node, link] = self.wanted[node, link]
        self.changed = True
        self.peers[node].reached(self.now, link)

    # -- bytes

    def set_trees(self, trees: int) -> None:
        """Set the number of trees: from the tracker's plan, or 1 if a node fetches before there is a plan."""
        self.trees = trees
        self.whole = self.sizes / trees  # bytes of each blob in one tree
        self.got = numpy.zeros((self.world.nodes, trees, len(self.sizes)))

    def index(self) -> None:
        """Make arrays of the connected links, for flow()."""
        self.links = list(self.edges)
        self.child = numpy.array([child for child, _ in self.links])
        self.parent = numpy.array([link.parent for _, link in self.links])
        self.tree = numpy.array([link.tree for _, link in self.links])
        self.wants = numpy.zeros((len(self.links), len(self.sizes)), bool)
        for row, blobs in enumerate(self.edges.values()):
            self.wants[row, list(blobs)] = True
        self.changed = False

    def flow(self) -> None:
        self.fetch()
        if self.changed:
            self.index()
        if not self.edges:
            return
        pieces = numpy.where(self.got >= self.whole * 0.9999999, self.whole, numpy.floor(self.got / PIECE) * PIECE)
        ahead = pieces[self.parent, self.tree] - self.got[self.child, self.tree]
        ahead = numpy.where(self.wants, numpy.maximum(ahead, 0.0), 0.0)
        wanted = ahead.sum(1) / STEP_S
        rate = numpy.zeros(len(self.links))
        up, down = self.up.copy(), self.down - self.fetching
        active = wanted > 0
        for _ in range(3):  # share the unused rate among the other links
            uses = numpy.bincount(self.parent[active], minlength=self.world.nodes)
            takes = numpy.bincount(self.child[active], minlength=self.world.nodes)
            even = numpy.minimum(
                up[self.parent] / numpy.maximum(uses[self.parent], 1),
                down[self.child] / numpy.maximum(takes[self.child], 1),
            )
            more = numpy.where(active, numpy.maximum(numpy.minimum(even, wanted - rate), 0.0), 0.0)
            rate += more
            up -= numpy.bincount(self.parent, more, self.world.nodes)
            down = down - numpy.bincount(self.child, more, self.world.nodes)
            active = active & (wanted - rate > 1.0)
        moved = ahead * (rate / numpy.maximum(wanted, 1e-9))[:, None]
        numpy.add.at(self.got, (self.child, self.tree), moved)
        self.uploaded += numpy.bincount(self.parent, moved.sum(1), self.world.nodes)
        for row in numpy.nonzero(rate)[0]:
            child, link = self.links[row]
            self.peers[child].downloaded(self.now, link, float(moved[row].sum()))  # type: ignore[arg-type]

    def fetch(self) -> None:
        """Move bytes from the registry to the fetchers, which share its rate.

        A fetcher can upload these bytes in all trees.
        """
        world = self.world
        self.fetching = numpy.zeros(world.nodes)
        busy = [node for node, blobs in self.fetches.items() if any(left > 0 for left in blobs.values())]
        even = world.registry / max(len(busy), 1)
        shares = {node: min(even, self.down[node]) for node in busy}
        spare = world.registry - sum(shares.values())
        for node in busy:
            rate = min(shares[node] + (spare if self.down[node] > shares[node] else 0.0), self.down[node])
            self.fetching[node] = rate
            movable = rate * STEP_S
            for blob, left in self.fetches[node].items():
                part = min(movable, left)
                self.fetches[node][blob] -= part
                movable -= part
                self.outcome.from_registry += part
                self.peers[node].fetched(part, sum(self.fetches[node].values()))  # type: ignore[arg-type]
                done = 1.0 - self.fetches[node][blob] / self.sizes[blob]
                mine = self.got[node, :, blob]
                numpy.maximum(mine, done * self.whole[blob], out=mine)

    def set_fetches(self, node: int, blobs: tuple[int, ...]) -> None:
        """Let a node fetch only these blobs from the registry. Each fetch begins at the first missing byte."""
        if not self.trees:
            self.set_trees(1)
        self.outcome.fetchers.append(node)
        before = self.fetches.get(node, {})
        lacking = {blob: self.sizes[blob] - self.got[node, :, blob].min() * self.trees for blob in blobs}
        self.fetches[node] = {blob: before.get(blob, left) for blob, left in lacking.items()}
        self.peers[node].fetched(0, sum(self.fetches[node].values()))  # type: ignore[arg-type]

    def go(self, limit: float = 600.0) -> Outcome:
        ticked = 0.0
        while self.now < limit and len(self.outcome.ready) + len(self.outcome.dead) < self.world.nodes:
            while self.events and self.events[0][0] <= self.now:
                heapq.heappop(self.events)[2]()
            self.flow()
            if self.now >= ticked + 0.2:
                ticked = self.now
                self.send(self.tracker.tick(self.now))
                for node in numpy.nonzero(self.alive & self.joined)[0]:
                    self.act(int(node), self.peers[node].tick(self.now))
            self.finish()
            self.now += STEP_S
        self.outcome.uploads = list(self.uploaded)
        return self.outcome

    def finish(self) -> None:
        have = self.got.sum((1, 2)) if self.trees else numpy.zeros(self.world.nodes)
        for node in map(int, numpy.nonzero((have >= self.sizes.sum() * 0.99999) & self.alive)[0]):
            if node not in self.outcome.ready:
                self.outcome.ready[node] = max(self.now, float(self.sizes.sum()) / self.world.unpack) + 0.05
                self.act(node, self.peers[node].finished(self.now))


GIB = 1 << 30
IMAGE = [int(GIB * part) for part in (2.5, 1.2, 0.7, 0.4, 0.2)]  # bytes of its layers
MAX_RATIO = 1.3  # duration, relative to one node
TROUBLE = {"dying": 0.01, "slow": 0.05}
UNPACK_RATE = 2e9  # bytes a second


def large(nodes: int, seed: int = 3, /, *, dying: float = 0.0, slow: float = 0.0) -> Outcome:
    """Simulate an image of 5 GiB on links of 25 Gbit/s, with a registry of 10 Gbit/s. Nodes unpack 2 GB/s."""
    rates = {"link": 25e9 / 8, "registry": 10e9 / 8, "unpack": UNPACK_RATE}
    return Run(World(nodes, IMAGE, **rates, seed=seed, dying=dying, slow=slow)).go()


def bench_simulation(sizes: Sequence[int]) -> bool:
    """Print when the last node is ready, without trouble and with trouble. Dead and slow nodes do not count."""
    trips = HANDSHAKE_S / LATENCY_S / 2
    print(f"a message takes {LATENCY_S * 1e3:.1f} ms, a handshake {trips:.0f} round trips, {HANDSHAKE_S * 1e3:.0f} ms")
    print(f"unpacking takes {sum(IMAGE) / UNPACK_RATE:.2f} s meanwhile; a death is noticed after {DETECTION_S:.0f} s")
    columns = "".join(f"{name:>12}" for name in ("all well, s", "x 1 node", "registry", "most upload", "messages"))
    print(f"{'nodes':>8}{columns}{'1 % die, 5 % slow':>20}{'x 1 node':>12}")
    alone, good = 0.0, True
    for nodes in sizes:
        well, trouble = large(nodes), large(nodes, **TROUBLE)
        last, later = last_of(well), last_of(trouble)
        alone = alone or last
        size = float(sum(IMAGE))
        cost = f"{well.from_registry / size:11.2f}x{max(well.uploads) / size:11.2f}x{well.messages:12}"
        print(f"{nodes:8}{last:12.2f}{last / alone:11.2f}x{cost}{later:20.2f}{later / alone:11.2f}x", flush=True)
        good &= last <= MAX_RATIO * alone and later <= MAX_RATIO * alone + 2 * DETECTION_S
    return good


def last_of(outcome: Outcome) -> float:
    return max((seconds for node, seconds in outcome.ready.items() if node not in outcome.slow), default=0.0)


if __name__ == "__main__":
    sys.exit(not bench_simulation([int(word) for word in sys.argv[1:]] or (1, 10, 100, 1000)))
