"""After any events in any order, the decisions of a swarm let every living node get every blob."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Mapping

import pytest

from enroot_py.features.swarm import trees, wire
from enroot_py.features.swarm.fetchers import SEED_AFTER_S
from enroot_py.features.swarm.messages import (
    SEED,
    Complaint,
    Failed,
    FetchBlobs,
    FromTracker,
    Hopeless,
    Joined,
    Released,
    Report,
    Routes,
)
from enroot_py.features.swarm.tracker import DRAIN_S, GATHER_S, LINGER_S, Tracker
from enroot_py.features.swarm.trees import SOURCES, Forest
from enroot_py.features.swarm.wire import WireError
from tests.unit.test_fuzz import retyped

SIZES = (500 << 20, 300 << 20, 10 << 20, 1 << 10)


class SwarmState:
    """The state of all nodes of a swarm, as it follows from the tracker's messages to them."""

    def __init__(self, nodes: int, *, seed_only: bool = False) -> None:
        self.tracker = Tracker(SIZES[:1] if seed_only else SIZES, nodes, seed_only=seed_only)
        self.lacks: dict[int, set[int]] = {}
        self.has: dict[int, set[int]] = {}
        self.plan: dict[int, Routes] = {}
        self.parents: dict[int, dict[int, list[tuple[int, tuple[int, ...]]]]] = {}
        self.fetches: dict[int, set[int]] = {}
        self.released: set[int] = set()
        self.hopeless: dict[int, Hopeless] = {}
        self.done: set[int] = set()
        self.draining: set[int] = set()  # complete nodes that have left

    def receive(self, messages: list[tuple[int, FromTracker]]) -> None:
        for node, message in messages:
            assert node in self.lacks, "dead nodes get no messages"
            if isinstance(message, Routes):
                self.plan[node] = message
                by_tree = self.parents.setdefault(node, {})
                for tree in {link.tree for link in message.links}:
                    by_tree[tree] = [(link.parent, link.blobs) for link in message.links if link.tree == tree]
            elif isinstance(message, FetchBlobs):
                self.fetches[node] = set(message.blobs)
            elif isinstance(message, Released):
                self.released.add(node)
            else:
                self.hopeless[node] = message

    def join(self, now: float, node: int, lacks: set[int], has: set[int] | None = None) -> None:
        self.lacks[node] = lacks
        self.has[node] = has or set()
        self.released.discard(node)
        self.draining.discard(node)
        self.parents.pop(node, None)
        joined = Joined(("10.0.0.1", node), tuple(sorted(lacks)), tuple(sorted(self.has[node])))
        self.receive(self.tracker.handle(now, node, joined))

    def leave(self, now: float, node: int) -> None:
        for state in (self.lacks, self.plan, self.parents, self.fetches):
            state.pop(node, None)  # type: ignore[attr-defined]
        self.released.discard(node)
        if node in self.done:
            self.draining.add(node)
            self.done.remove(node)
        self.receive(self.tracker.left(now, node))

    def finish(self, now: float, node: int) -> None:
        """Let a node report that it has every blob."""
        self.done.add(node)
        self.receive(self.tracker.handle(now, node, Report((0,) * self.plan[node].trees, done=True)))

    def drained(self, now: float) -> None:
        """Let the children of nodes that have left complain, because all bytes of these nodes have arrived."""
        for node, by_tree in list(self.parents.items()):
            for tree, links in list(by_tree.items()):
                for parent in self.draining.intersection(parent for parent, _ in links):
                    complaint = Complaint(tree, parent, False, (0,) * self.plan[node].trees)
                    self.receive(self.tracker.handle(now, node, complaint))

    def wants(self, node: int, blobs: tuple[int, ...]) -> set[int]:
        """Return the blobs that a node downloads: of ``blobs``, or of all if ``blobs`` is empty."""
        plan = self.plan[node]
        wanted = set(plan.blobs) if plan.relays else self.lacks[node]
        return (wanted & set(blobs) if blobs else wanted) - self.fetches.get(node, set())

    def check(self) -> None:
        """Check that each node downloads every blob that it lacks, through living relays, from the blob's fetcher."""
        for node, lacks in self.lacks.items():
            for blob in lacks:
                for tree in range(self.plan[node].trees):
                    self.follow(node, blob, tree)

    def follow(self, node: int, blob: int, tree: int) -> None:
        path = [node]
        while blob not in self.fetches.get(path[-1], ()):
            links = self.parents[path[-1]][tree]
            parents = [parent for parent, blobs in links if not blobs or blob in blobs]
            assert len(parents) == 1, f"blob {blob} in tree {tree}: {path} downloads it from {parents}"
            assert parents[0] in self.lacks, f"{path} downloads from dead node {parents[0]}"
            assert parents[0] not in path, f"{path} is a cycle"
            path.append(parents[0])
            downloads = self.plan[path[-1]].relays or blob in self.lacks[path[-1]]
            assert downloads or blob in self.fetches[path[-1]], f"{path}: the last node does not download it"


BAD, SILENT_NODE = 3, 4
STAGES = ("before it joins", "before the plan", "after the plan", "when others are done", "after it left")
BAD_MESSAGES = {
    "Joined": Joined(("10.0.0.9", 9), (0, 1, 2, 3), (), "bad"),
    "Report": Report((1,) * 4, 5, False, 7),
    "Complaint": Complaint(0, 1, True, (1,) * 4),
    "Failed": Failed((0,), False, "why", "hint"),
}


class Guarded(SwarmState):
    """Five nodes: three are honest, one is bad, and the last one sends nothing after it has the plan.

    Messages of the bad node are decoded and checked as in tracker_process.py. At most, they may end the bad node.
    """

    def send_bad(self, now: float, message: Mapping[str, object]) -> None:
        try:
            event = wire.decode_from_peer(json.loads(json.dumps(message)), "10.0.0.9")
            if isinstance(event, Failed) and event.refused and set(event.blobs) <= self.fetches.get(BAD, set()):
                return  # the tracker trusts a fetcher that reports a refusal of the registry
            if isinstance(event, Joined):
                self.lacks[BAD], self.has[BAD] = set(event.lacks), set(event.has)
            self.receive(self.tracker.handle(now, BAD, event))
        except (WireError, ValueError):
            self.leave(now, BAD)

    def pass_time(self, now: float) -> float:
        """Let time pass: honest nodes report more and more bytes, and the tracker finds the silent node stalled."""
        for step in (0.1, GATHER_S, 1.0, 1.0, 1.0, 1.5, 1.5, 1.5):
            now += step
            self.receive(self.tracker.tick(now))
            for node in set(self.plan) - {BAD, SILENT_NODE}:
                byte_counts = (int(now * (1 << 20)),) * self.plan[node].trees
                self.receive(self.tracker.handle(now, node, Report(byte_counts, 1, node in self.done)))
        return now

    def live_through(self, stage: str, messages: list[Mapping[str, object]]) -> None:
        """Let the bad node send messages at a stage, and leave. Check that the others get every blob."""
        every, now = set(range(len(SIZES))), 100.0
        for node in (0, 1, 2, SILENT_NODE):
            self.join(now, node, every)
        if stage != STAGES[0]:
            self.join(now, BAD, every)
        if stage in STAGES[2:]:
            now = self.pass_time(now)
        if stage == STAGES[3]:
            for node in range(3):
                self.finish(now, node)
        if stage == STAGES[4]:
            self.leave(now, BAD)
        for message in messages:
            now += 0.05
            self.send_bad(now, message)
            self.tracker.progress()
            self.receive(self.tracker.tick(now))
        now = self.pass_time(now)
        self.leave(now, BAD)
        self.leave(now, SILENT_NODE)
        now = self.pass_time(now)
        self.drained(now)
        if stage != STAGES[3]:
            self.check()
            for node in range(3):
                self.finish(now, node)
        for _ in range(20):
            self.receive(self.tracker.tick(now := now + LINGER_S / 10))
        assert self.released >= {0, 1, 2} and not self.hopeless.keys() & {0, 1, 2}


@pytest.mark.security("N2")
@pytest.mark.parametrize("kind", BAD_MESSAGES)
@pytest.mark.parametrize("stage", STAGES)
def test_message_of_one_member_ends_no_other(stage: str, kind: str) -> None:
    """Send each message with each odd value in each field."""
    for data in (json.dumps(wire.encode(BAD_MESSAGES[kind])).encode(), *retyped(wire.encode(BAD_MESSAGES[kind]))):
        try:
            message = json.loads(data)
        except ValueError:
            continue  # not JSON, so it is refused earlier
        if isinstance(message, dict):
            Guarded(5).live_through(stage, [message])


@pytest.mark.parametrize("length", [0, 1, 2, 3, 5, 32, 1000])
@pytest.mark.parametrize("stage", STAGES)
def test_bytes_of_another_plan_end_no_other(stage: str, length: int) -> None:
    for message in (Report((7,) * length, 1), Report((7,) * length, 1, True), Complaint(0, 0, True, (7,) * length)):
        Guarded(5).live_through(stage, [wire.encode(message)])
        Guarded(5).live_through(stage, [wire.encode(message), wire.encode(BAD_MESSAGES["Joined"])])


@pytest.mark.security("N2")
def test_random_messages_of_one_member_end_no_other(rng: random.Random, soak: bool) -> None:
    known = [data for message in BAD_MESSAGES.values() for data in retyped(wire.encode(message))]
    numbers = [0, 1, 2, 3, 4, 31, 32, SEED, (1 << 63) - 1]
    for _ in range(4_000 if soak else 500):
        messages: list[Mapping[str, object]] = []
        for _ in range(rng.randint(1, 8)):
            byte_counts = tuple(rng.choice(numbers) for _ in range(rng.choice((0, 2, 3, 4, 4, 4, 9))))
            blobs = tuple(rng.choice(numbers[:4]) for _ in range(rng.randint(0, 5)))
            event = rng.choice(
                [
                    Joined(("10.0.0.9", 9), blobs, tuple(rng.sample(range(4), rng.randint(0, 4)))),
                    Report(byte_counts, rng.choice(numbers), rng.random() < 0.3, rng.choice(numbers)),
                    Complaint(rng.choice(numbers), rng.choice(numbers), rng.random() < 0.5, byte_counts),
                    Failed(blobs, rng.random() < 0.2, "why", "hint"),
                ]
            )
            with contextlib.suppress(ValueError):
                messages.append(json.loads(rng.choice(known)) if rng.random() < 0.3 else wire.encode(event))
        Guarded(5).live_through(rng.choice(STAGES), [each for each in messages if isinstance(each, dict)])


@pytest.mark.parametrize("nodes", [2, 3, 4, 5, 8, 33, 100])
def test_every_node_has_a_parent_for_every_piece(nodes: int) -> None:
    """Every node gets every piece from a parent, and no node uploads much more than it downloads."""
    swarm = SwarmState(nodes)
    for node in range(nodes):
        swarm.join(0.0, node, set(range(len(SIZES))))
    swarm.receive(swarm.tracker.tick(0.0))
    swarm.check()
    uploaded = dict.fromkeys(range(nodes), 0.0)
    for node, by_tree in swarm.parents.items():
        own_fetches = swarm.fetches.get(node, set())
        for links in by_tree.values():
            for parent, blobs in links:
                wanted = set(blobs or swarm.plan[node].blobs) - own_fetches
                uploaded[parent] += sum(SIZES[blob] for blob in wanted) / swarm.plan[node].trees
    assert max(uploaded.values()) <= 1.35 * sum(SIZES)


@pytest.mark.parametrize("seed", range(40))
def test_living_nodes_get_all_after_random_events(seed: int) -> None:
    """Nodes join, die, complain about any parent and lack any blobs, in any order."""
    rng = random.Random(seed)
    nodes, kept = rng.choice([2, 3, 5, 8, 20, 60]), rng.choice([0.0, 0.0, 0.3, 1.0])
    swarm, now = SwarmState(nodes), 0.0
    waiting = list(range(nodes))
    rng.shuffle(waiting)
    for _ in range(nodes * 6):
        now += rng.choice([0.0, 0.01, 0.3])
        node = rng.choice(list(swarm.lacks)) if swarm.lacks else None
        happens = rng.random()
        if waiting and happens < 0.4:
            whole = rng.random() < 0.7
            lacks = {blob for blob in range(len(SIZES)) if whole or rng.random() < 0.5}
            swarm.join(now, waiting.pop(), lacks, {blob for blob in range(len(SIZES)) if rng.random() < kept})
        elif node is not None and happens < 0.5:
            swarm.leave(now, node)
            if rng.random() < 0.5:
                waiting.append(node)  # its helper may start again
        elif node is not None and node in swarm.plan and happens < 0.55 and node not in swarm.done:
            swarm.finish(now, node)
        elif node is not None and node in swarm.plan:
            byte_counts = tuple(rng.randrange(1 << 28) for _ in range(swarm.plan[node].trees))
            tree = rng.randrange(len(byte_counts))
            parents = [parent for parent, _ in swarm.parents.get(node, {}).get(tree, [])]
            if parents and happens < 0.8:
                complaint = Complaint(tree, rng.choice(parents), rng.random() < 0.5, byte_counts)
                swarm.receive(swarm.tracker.handle(now, node, complaint))
            else:
                swarm.receive(swarm.tracker.handle(now, node, Report(byte_counts, rng.randrange(1 << 28))))
        swarm.receive(swarm.tracker.tick(now))
        if all(node in swarm.plan for node in swarm.lacks) and (nodes < 10 or rng.random() < 0.1):
            swarm.drained(now)
            swarm.check()
    swarm.receive(swarm.tracker.tick(now + GATHER_S))
    swarm.drained(now + GATHER_S)
    swarm.check()
    for node in list(swarm.lacks):
        byte_counts = (0,) * swarm.plan[node].trees
        swarm.receive(swarm.tracker.handle(now, node, Report(byte_counts, done=True)))
    swarm.receive(swarm.tracker.tick(now + 1))
    swarm.receive(swarm.tracker.tick(now + 2 + LINGER_S))
    assert swarm.released >= set(swarm.lacks)


@pytest.mark.parametrize("seed", range(60))
def test_nodes_get_all_behind_random_firewalls(seed: int) -> None:
    rng = random.Random(seed)
    nodes = rng.choice([2, 3, 4, 4, 5, 8, 20, 60])
    many = rng.choice([0.05, 0.2, 0.5, 0.9, 1.0])
    walls = {(node, other) for node in range(nodes) for other in range(nodes) if rng.random() < many}
    if seed % 3 == 0:  # half of the nodes accept no connections, or make none
        closed = rng.sample(range(nodes), nodes // 2)
        walls = {
            (node, other) for node in range(nodes) for other in range(nodes) if (other if seed % 2 else node) in closed
        }
    swarm = together(nodes)
    for count in range(1, 20 * nodes):
        stuck = [
            (node, tree, parent)
            for node, by_tree in swarm.parents.items()
            for tree, links in by_tree.items()
            for parent, blobs in links
            if (node, parent) in walls and swarm.wants(node, blobs)
        ]
        if not stuck:
            break
        node, tree, parent = rng.choice(stuck)
        byte_counts = (0,) * swarm.plan[node].trees
        swarm.receive(swarm.tracker.handle(0.1 * count, node, Complaint(tree, parent, False, byte_counts)))
    assert not stuck
    swarm.check()


def test_relays_upload_evenly() -> None:
    for relays in (1, 2, 31, 32, 33, 37, 100, 997):
        number = trees.count(relays)
        forest = Forest(number, list(range(relays)), [])
        assert max(forest.loads.values()) <= 1.35 * max(number, 1) * max(relays - 1, 1) / relays + 1
        assert all(tree.parent[node] != node for tree in forest.trees for node in tree.parent)
        assert all([*tree.parent.values()].count(SOURCES) == 1 for tree in forest.trees)


def together(nodes: int) -> SwarmState:
    swarm = SwarmState(nodes)
    for node in range(nodes):
        swarm.join(0.0, node, set(range(len(SIZES))))
    swarm.receive(swarm.tracker.tick(0.0))
    return swarm


def test_failed_fetch_moves_to_another_node() -> None:
    swarm = together(5)
    first = next(node for node, blobs in swarm.fetches.items() if 0 in blobs)
    swarm.receive(swarm.tracker.handle(1.0, first, Failed((0,), False, "no route to the registry")))
    assert 0 not in swarm.fetches[first]
    swarm.check()
    assert not swarm.hopeless


def test_refusal_is_reported_by_one_node() -> None:
    swarm = together(5)
    source = next(iter(swarm.fetches))
    swarm.receive(swarm.tracker.handle(1.0, source, Failed((0,), True, "denied", "log in")))
    assert sorted(swarm.hopeless) == list(range(5))
    assert sorted((each.reason, each.hint) for each in swarm.hopeless.values()) == [("", "")] * 4 + [
        ("denied", "log in")
    ]


def all_report(swarm: SwarmState, now: float) -> None:
    for node, plan in swarm.plan.items():
        swarm.receive(swarm.tracker.handle(now, node, Report((0,) * plan.trees)))


def nobody_can_fetch(swarm: SwarmState, blob: int) -> None:
    for count in range(1, 4):
        source = next(node for node, blobs in swarm.fetches.items() if blob in blobs)
        swarm.receive(swarm.tracker.handle(1.0 * count, source, Failed((blob,), False, "unreachable")))
        assert swarm.tracker.wants_seed is False
    swarm.receive(swarm.tracker.tick(4.0))
    assert swarm.tracker.wants_seed


def test_unreachable_blob_fails_without_seed() -> None:
    swarm = together(8)
    nobody_can_fetch(swarm, 0)
    swarm.receive(swarm.tracker.tick(4.0 + SEED_AFTER_S))
    assert not swarm.hopeless
    all_report(swarm, 3.9 + 2 * SEED_AFTER_S)
    swarm.receive(swarm.tracker.tick(4.0 + 2 * SEED_AFTER_S))
    assert not any(each.final for each in swarm.hopeless.values())
    assert sorted(each.reason for each in swarm.hopeless.values()) == [""] * 7 + ["unreachable"]


def test_unreachable_blob_comes_from_the_seed() -> None:
    swarm = together(8)
    nobody_can_fetch(swarm, 0)
    all_report(swarm, 4.9)
    swarm.join(5.0, SEED, set())
    assert swarm.fetches[SEED] == {0}
    swarm.check()
    all_report(swarm, 5.9)
    swarm.leave(6.0, SEED)
    swarm.receive(swarm.tracker.tick(6.1))
    assert [each.final for each in swarm.hopeless.values()] == [False] * 8


def test_seed_takes_blobs_of_silent_fetchers() -> None:
    swarm = together(8)
    trees_ = swarm.plan[0].trees
    one, other = swarm.fetches
    swarm.receive(swarm.tracker.handle(1.0, one, Report((0,) * trees_, fetched=1)))
    swarm.receive(swarm.tracker.tick(SEED_AFTER_S + 0.1))
    assert swarm.tracker.wants_seed
    kept = set(swarm.fetches[one])
    swarm.join(SEED_AFTER_S + 0.2, SEED, set())
    assert (swarm.fetches[one], swarm.fetches[other]) == (kept, set())
    assert swarm.fetches[SEED] == set(range(len(SIZES))) - kept
    swarm.check()
    swarm.receive(swarm.tracker.handle(9.0, SEED, Failed(tuple(swarm.fetches[SEED]), False, "no route")))
    swarm.lacks.pop(SEED)
    swarm.check()
    assert not swarm.hopeless


def of_seed(nodes: int) -> SwarmState:
    """Return a swarm whose nodes lack a file that only the tracker's host has."""
    swarm = SwarmState(nodes, seed_only=True)
    for node in range(nodes):
        swarm.join(0.0, node, {0})
    swarm.receive(swarm.tracker.tick(0.0))
    swarm.receive(swarm.tracker.tick(0.1))
    assert swarm.tracker.wants_seed
    swarm.join(0.2, SEED, set())
    return swarm


@pytest.mark.parametrize("nodes", [1, 2, 5, 40])
def test_file_is_fetched_only_by_the_seed(nodes: int) -> None:
    swarm = of_seed(nodes)
    assert swarm.fetches == {SEED: {0}}
    swarm.check()
    all_report(swarm, 1.0)
    swarm.leave(2.0, SEED)
    swarm.receive(swarm.tracker.tick(2.1))
    assert [each.final for each in swarm.hopeless.values()] == [False] * nodes


def test_file_without_seed_is_given_up() -> None:
    swarm = SwarmState(2, seed_only=True)
    for node in range(2):
        swarm.join(0.0, node, {0})
    for now in (0.0, 0.1):
        swarm.receive(swarm.tracker.tick(now))
    all_report(swarm, 2 * SEED_AFTER_S)
    swarm.receive(swarm.tracker.tick(0.2 + 2 * SEED_AFTER_S))
    assert [each.final for each in swarm.hopeless.values()] == [False] * 2


def test_node_with_the_file_serves_before_the_seed() -> None:
    swarm = SwarmState(3, seed_only=True)
    swarm.join(0.0, 0, set(), {0})
    for node in (1, 2):
        swarm.join(0.0, node, {0})
    for now in (0.0, 0.1):
        swarm.receive(swarm.tracker.tick(now))
    assert {node: blobs for node, blobs in swarm.fetches.items() if blobs} == {0: {0}}
    assert not swarm.tracker.wants_seed
    swarm.check()
    swarm.leave(1.0, 0)
    swarm.receive(swarm.tracker.tick(1.1))
    assert swarm.tracker.wants_seed
    swarm.join(1.2, SEED, set())
    swarm.check()
    assert not swarm.hopeless


@pytest.mark.parametrize("seed", range(20))
def test_nodes_that_cannot_reach_the_seed_get_the_file(seed: int) -> None:
    rng = random.Random(seed)
    nodes = rng.choice([1, 2, 3, 8, 40])
    apart = rng.sample(range(nodes), rng.randrange(nodes + 1))
    swarm = of_seed(nodes)
    for count in range(1, 20 * nodes):
        stuck = [
            (node, tree)
            for node, by_tree in swarm.parents.items()
            for tree, links in by_tree.items()
            for parent, _ in links
            if parent == SEED and node in apart and node not in swarm.hopeless
        ]
        if not stuck:
            break
        node, tree = rng.choice(stuck)
        complaint = Complaint(tree, SEED, False, (0,) * swarm.plan[node].trees)
        swarm.receive(swarm.tracker.handle(0.2 + 0.01 * count, node, complaint))
    assert not stuck
    assert sorted(swarm.hopeless) == (list(range(nodes)) if len(apart) == nodes else [])
    for node in swarm.hopeless:
        del swarm.lacks[node]
    swarm.check()
    assert swarm.fetches == {SEED: {0}}


def test_slow_fetcher_hands_over_its_blobs() -> None:
    swarm = together(6)
    slow, fast = swarm.fetches
    trees_ = swarm.plan[slow].trees
    for now in (1.0, 3.0):
        for node, count in ((fast, 100), (slow, 10)):
            swarm.receive(swarm.tracker.handle(now, node, fetching(trees_, int(now) * count << 20)))
    assert swarm.fetches[slow] == set()
    assert swarm.fetches[fast] == set(range(len(SIZES)))
    swarm.check()


def test_fetcher_a_little_behind_keeps_its_blobs() -> None:
    """For a small image, a second request to the registry is not worth its cost."""
    swarm = together(6)
    before = dict(swarm.fetches)
    slow, fast = before
    trees_ = swarm.plan[slow].trees
    for now in (1.0, 3.0):
        for node, count in ((fast, 7 << 20), (slow, 0)):
            swarm.receive(swarm.tracker.handle(now, node, fetching(trees_, count)))
    assert swarm.fetches == before


def test_fetcher_with_a_late_start_keeps_its_blobs() -> None:
    """The first seconds of the late fetcher are slow, because other nodes have filled a queue."""
    swarm = together(2)
    before = dict(swarm.fetches)
    late, first = before
    for now in range(1, 16):
        for node, count in ((first, 12 * now), (late, 1)):
            swarm.receive(swarm.tracker.handle(float(now), node, fetching(1, count << 20)))
    assert swarm.fetches == before
    swarm.receive(swarm.tracker.handle(20.0, first, fetching(1, 240 << 20)))
    swarm.receive(swarm.tracker.handle(20.1, late, fetching(1, 1 << 20)))
    assert swarm.fetches == {late: set(), first: set(range(len(SIZES)))}


def test_fetcher_behind_a_full_link_keeps_its_blobs() -> None:
    """The link of the slow fetcher is full of bytes from the other fetcher, so both finish as early as possible."""
    swarm = together(2)
    before = dict(swarm.fetches)
    late, first = before
    for now in range(1, 60):
        swarm.receive(swarm.tracker.handle(now + 0.1, first, fetching(1, 12 * now << 20)))
        swarm.receive(swarm.tracker.handle(now + 0.2, late, Report((12 * now << 20,), now << 18, unfetched=1 << 29)))
    assert swarm.fetches == before


def test_fetcher_that_finished_is_not_slow() -> None:
    swarm = together(6)
    ended, slow = swarm.fetches
    trees_ = swarm.plan[slow].trees
    heir = next(node for node in range(6) if node not in (ended, slow))
    swarm.receive(swarm.tracker.handle(0.9, heir, Report((1,) * trees_)))
    swarm.leave(1.0, ended)
    assert swarm.fetches[heir]
    for now in (2.0, 3.5, 4.5):
        swarm.receive(swarm.tracker.handle(now, heir, Report((0,) * trees_, fetched=50 << 20)))
        swarm.receive(swarm.tracker.handle(now, slow, fetching(trees_, int(now * 10) << 20)))
    swarm.receive(swarm.tracker.handle(5.5, slow, fetching(trees_, 60 << 20)))
    assert swarm.fetches[heir] == set(range(len(SIZES))), "the heir was five times as fast while it had work"
    assert swarm.fetches[slow] == set()
    swarm.check()


def fetching(trees_: int, fetched: int) -> Report:
    """Return the report of a fetcher that has not finished."""
    return Report((0,) * trees_, fetched, unfetched=1 << 30)


def test_slow_fetcher_of_two_hands_over_its_blobs() -> None:
    swarm = together(2)
    slow, fast = swarm.fetches
    for now in (1.0, 3.0):
        for node, count in ((fast, 100), (slow, 10)):
            swarm.receive(swarm.tracker.handle(now, node, fetching(1, int(now) * count << 20)))
    assert swarm.fetches == {slow: set(), fast: set(range(len(SIZES)))}
    swarm.check()


@pytest.mark.parametrize("nodes", [2, 3, 8])
@pytest.mark.parametrize("ends", [True, False])
def test_blob_of_a_finished_node_is_drained(nodes: int, ends: bool) -> None:
    """The kernel of the finished node continues to send. Other nodes fetch the blobs that do not arrive in time."""
    swarm = together(nodes)
    before = {node: set(blobs) for node, blobs in swarm.fetches.items()}
    first = next(iter(before))
    swarm.finish(1.0, first)
    swarm.leave(1.1, first)
    swarm.receive(swarm.tracker.tick(1.1 + 0.9 * DRAIN_S))
    del before[first]
    assert swarm.fetches == before
    if ends:
        swarm.drained(1.1 + 0.9 * DRAIN_S)
    else:
        swarm.receive(swarm.tracker.tick(2.1 + DRAIN_S))
    assert set().union(*swarm.fetches.values()) == set(range(len(SIZES)))
    swarm.check()


def test_blobs_of_a_finished_node_move_to_a_complete_node() -> None:
    swarm = together(4)
    first, second = swarm.fetches
    trees_ = swarm.plan[first].trees
    for node in set(range(4)) - {first, second}:
        swarm.receive(swarm.tracker.handle(0.9, node, Report((1 << 30,) * trees_)))
    for node in (first, second):
        swarm.finish(1.0, node)
    swarm.leave(1.1, first)
    swarm.drained(1.2)
    assert swarm.fetches[second] == set(range(len(SIZES)))
    swarm.check()


def test_late_peer_gets_no_parent_that_has_left() -> None:
    swarm = SwarmState(9)
    for node in range(8):
        swarm.join(0.0, node, set(range(len(SIZES))))
    swarm.receive(swarm.tracker.tick(GATHER_S))
    ended = next(node for node, plan in swarm.plan.items() if plan.relays)
    swarm.finish(1.0, ended)
    swarm.leave(1.0, ended)
    swarm.join(1.1, 8, set(range(len(SIZES))))
    assert ended not in {parent for links in swarm.parents[8].values() for parent, _ in links}
    swarm.drained(1.2)
    swarm.check()


def test_peer_that_joins_after_all_left_gets_a_new_plan() -> None:
    swarm = together(2)
    for node in range(2):
        swarm.finish(1.0, node)
        swarm.leave(1.1, node)
    swarm.join(1.2, 1, {0, 1})
    swarm.receive(swarm.tracker.tick(1.2 + GATHER_S))
    assert swarm.fetches == {1: {0, 1}}


def test_peer_that_joins_again_lacks_its_blobs() -> None:
    """A helper was killed when it had every blob. Its successor lacks every blob."""
    swarm = together(3)
    swarm.finish(1.0, 0)
    swarm.leave(1.0, 0)
    swarm.join(1.1, 0, set(range(len(SIZES))))
    swarm.drained(1.1)
    swarm.check()


def test_last_peer_does_not_wait_for_one_that_left() -> None:
    swarm = together(2)
    swarm.finish(1.0, 0)
    swarm.leave(1.0, 0)
    swarm.finish(1.1, 1)
    swarm.receive(swarm.tracker.tick(1.2))
    assert swarm.released == {1}


@pytest.mark.parametrize("nodes", [6, 10_000])
def test_stalled_fetcher_hands_over_its_blobs(nodes: int) -> None:
    """A fetcher reports every second in a swarm of any size. In a swarm of 10000, others report every ten seconds."""
    swarm = SwarmState(nodes)
    for node in range(6):
        swarm.join(node * 0.01, node, set(range(len(SIZES))))
    swarm.receive(swarm.tracker.tick(1.0))
    silent, other = swarm.fetches
    trees_ = swarm.plan[silent].trees
    for second in range(1, 7):
        for node in range(6) if nodes == 6 or second == 1 else [other]:
            if node != silent:
                swarm.receive(swarm.tracker.handle(float(second), node, Report((0,) * trees_, fetched=1 << 20)))
        swarm.receive(swarm.tracker.tick(second + 0.5))
    assert swarm.fetches[silent] == set()
    assert swarm.fetches[other] == set(range(len(SIZES)))
    swarm.check()


def test_relay_with_many_complaints_is_retired() -> None:
    swarm = together(8)
    slow = next(node for node, plan in swarm.plan.items() if plan.relays and node not in swarm.fetches)
    for node, by_tree in list(swarm.parents.items()):
        for tree, links in list(by_tree.items()):
            if slow in [parent for parent, _ in links]:
                swarm.receive(
                    swarm.tracker.handle(1.0, node, Complaint(tree, slow, False, (0,) * swarm.plan[node].trees))
                )
    assert slow not in {
        parent for by_tree in swarm.parents.values() for links in by_tree.values() for parent, _ in links
    }
    swarm.check()


def test_peer_that_joins_after_release_gets_a_new_plan() -> None:
    swarm = together(3)
    for node in range(3):
        swarm.receive(swarm.tracker.handle(1.0, node, Report((0,) * swarm.plan[node].trees, done=True)))
    swarm.receive(swarm.tracker.tick(2.0))
    assert swarm.released == {0, 1, 2}
    for node in range(3):
        swarm.leave(3.0, node)
    swarm.join(60.0, 1, {0, 1})
    swarm.receive(swarm.tracker.tick(60.0 + GATHER_S))
    assert swarm.fetches[1] == {0, 1}


def test_progress_names_the_slowest_node() -> None:
    swarm = SwarmState(3)
    for node in range(2):
        swarm.lacks[node] = {0}
        swarm.receive(swarm.tracker.handle(0.0, node, Joined(("10.0.0.1", 1), (0,), name=f"n{node}")))
    swarm.receive(swarm.tracker.tick(GATHER_S))
    trees_ = swarm.plan[0].trees
    source = next(iter(swarm.fetches))
    swarm.receive(swarm.tracker.handle(1.0, source, Report((0,) * trees_, SIZES[0], done=True)))
    half = (SIZES[0] // 2 // trees_,) * trees_
    swarm.receive(swarm.tracker.handle(1.0, 1 - source, Report(half)))
    now = swarm.tracker.progress()
    assert (now.joined, now.ready, now.slowest, now.fetched) == (2, 1, f"n{1 - source}", SIZES[0])
    assert round(now.fraction, 2) == 0.5
    assert not swarm.tracker.all_have_it


def test_kept_blobs_are_uploaded_and_not_fetched() -> None:
    swarm = SwarmState(8)
    for node in range(7):
        swarm.join(0.0, node, set(), {0, 1} if node % 2 else {1, 2, 3})
    swarm.join(0.1, 7, set(range(len(SIZES))))
    swarm.receive(swarm.tracker.tick(0.2))
    swarm.check()
    assert 7 not in swarm.fetches
    assert sorted(blob for blobs in swarm.fetches.values() for blob in blobs) == [0, 1, 2, 3]
    assert max(sum(SIZES[blob] for blob in blobs) for blobs in swarm.fetches.values()) == SIZES[0]
    swarm.receive(swarm.tracker.tick(SEED_AFTER_S + 1))
    assert not swarm.tracker.wants_seed


def test_node_that_kept_a_blob_replaces_a_dead_one() -> None:
    swarm = SwarmState(3)
    swarm.join(0.0, 0, set(), {0})
    swarm.join(0.0, 1, set(), {0})
    swarm.join(0.0, 2, {0})
    swarm.receive(swarm.tracker.tick(0.1))
    first = next(node for node, blobs in swarm.fetches.items() if blobs)
    swarm.leave(1.0, first)
    assert swarm.fetches == {1 - first: {0}}
    swarm.check()
