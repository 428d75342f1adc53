"""The decisions of a swarm: whatever happens in whatever order, everybody who lives can get everything."""

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


class Told:
    """What the tracker has told each node, as the node understands it."""

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
        self.draining: set[int] = set()  # who has left, when it had all

    def hear(self, said: list[tuple[int, FromTracker]]) -> None:
        for node, message in said:
            assert node in self.lacks, "the dead are told nothing"
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
        self.hear(self.tracker.handle(now, node, joined))

    def leave(self, now: float, node: int) -> None:
        for state in (self.lacks, self.plan, self.parents, self.fetches):
            state.pop(node, None)  # type: ignore[attr-defined]
        self.released.discard(node)
        if node in self.done:
            self.draining.add(node)
            self.done.remove(node)
        self.hear(self.tracker.left(now, node))

    def finish(self, now: float, node: int) -> None:
        """A node lacks nothing any more."""
        self.done.add(node)
        self.hear(self.tracker.handle(now, node, Report((0,) * self.plan[node].trees, done=True)))

    def drained(self, now: float) -> None:
        """What came from those who have left has come, and who took from them says so."""
        for node, by_tree in list(self.parents.items()):
            for tree, links in list(by_tree.items()):
                for parent in self.draining.intersection(parent for parent, _ in links):
                    complaint = Complaint(tree, parent, False, (0,) * self.plan[node].trees)
                    self.hear(self.tracker.handle(now, node, complaint))

    def wants(self, node: int, blobs: tuple[int, ...]) -> set[int]:
        """Of these blobs, or of all, those that a node takes from others."""
        plan = self.plan[node]
        wanted = set(plan.blobs) if plan.relays else self.lacks[node]
        return (wanted & set(blobs) if blobs else wanted) - self.fetches.get(node, set())

    def check(self) -> None:
        """Everybody gets each piece that he lacks, by way of living nodes that take it too, from who fetches it."""
        for node, lacks in self.lacks.items():
            for blob in lacks:
                for tree in range(self.plan[node].trees):
                    self.follow(node, blob, tree)

    def follow(self, node: int, blob: int, tree: int) -> None:
        way = [node]
        while blob not in self.fetches.get(way[-1], ()):
            links = self.parents[way[-1]][tree]
            givers = [parent for parent, blobs in links if not blobs or blob in blobs]
            assert len(givers) == 1, f"blob {blob} in tree {tree}: {way} takes it from {givers}"
            assert givers[0] in self.lacks, f"{way} takes from the dead {givers[0]}"
            assert givers[0] not in way, f"{way} goes round"
            way.append(givers[0])
            takes = self.plan[way[-1]].relays or blob in self.lacks[way[-1]]
            assert takes or blob in self.fetches[way[-1]], f"{way}: the last takes it for nobody"


BAD, SILENT_NODE = 3, 4
STAGES = ("before it joins", "before the plan", "after the plan", "when others are done", "after it left")
BAD_MESSAGES = {
    "Joined": Joined(("10.0.0.9", 9), (0, 1, 2, 3), (), "bad"),
    "Report": Report((1,) * 4, 5, False, 7),
    "Complaint": Complaint(0, 1, True, (1,) * 4),
    "Failed": Failed((0,), False, "why", "hint"),
}


class Guarded(Told):
    """Five nodes: three are honest, one is bad, and the last says nothing after the plan.

    What the bad node says is decoded and checked as by tracker_process.py, and may end that node alone.
    """

    def hear_bad(self, now: float, message: Mapping[str, object]) -> None:
        try:
            event = wire.decode_from_peer(json.loads(json.dumps(message)), "10.0.0.9")
            if isinstance(event, Failed) and event.refused and set(event.blobs) <= self.fetches.get(BAD, set()):
                return  # whoever fetches for all is believed
            if isinstance(event, Joined):
                self.lacks[BAD], self.has[BAD] = set(event.lacks), set(event.has)
            self.hear(self.tracker.handle(now, BAD, event))
        except (WireError, ValueError):
            self.leave(now, BAD)

    def pass_time(self, now: float) -> float:
        """Ticks, between which the honest report more and more; the silent one is found to be stalled."""
        for step in (0.1, GATHER_S, 1.0, 1.0, 1.0, 1.5, 1.5, 1.5):
            now += step
            self.hear(self.tracker.tick(now))
            for node in set(self.plan) - {BAD, SILENT_NODE}:
                got = (int(now * (1 << 20)),) * self.plan[node].trees
                self.hear(self.tracker.handle(now, node, Report(got, 1, node in self.done)))
        return now

    def live_through(self, stage: str, messages: list[Mapping[str, object]]) -> None:
        """The bad node says this at a stage; then it leaves, and the others are to get all they lack."""
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
            self.hear_bad(now, message)
            self.tracker.progress()
            self.hear(self.tracker.tick(now))
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
            self.hear(self.tracker.tick(now := now + LINGER_S / 10))
        assert self.released >= {0, 1, 2} and not self.hopeless.keys() & {0, 1, 2}


@pytest.mark.security("N2")
@pytest.mark.parametrize("kind", BAD_MESSAGES)
@pytest.mark.parametrize("stage", STAGES)
def test_message_of_one_member_ends_no_other(stage: str, kind: str) -> None:
    """Each field of each message with each odd value: the tracker goes on, and so do the others."""
    for data in (json.dumps(wire.encode(BAD_MESSAGES[kind])).encode(), *retyped(wire.encode(BAD_MESSAGES[kind]))):
        try:
            message = json.loads(data)
        except ValueError:
            continue  # the wire refuses it
        if isinstance(message, dict):
            Guarded(5).live_through(stage, [message])


@pytest.mark.parametrize("length", [0, 1, 2, 3, 5, 32, 1000])
@pytest.mark.parametrize("stage", STAGES)
def test_bytes_of_another_plan_end_no_other(stage: str, length: int) -> None:
    for message in (Report((7,) * length, 1), Report((7,) * length, 1, True), Complaint(0, 0, True, (7,) * length)):
        Guarded(5).live_through(stage, [wire.encode(message)])
        Guarded(5).live_through(stage, [wire.encode(message), wire.encode(BAD_MESSAGES["Joined"])])


@pytest.mark.security("N2")
def test_any_messages_of_one_member_end_no_other(rng: random.Random, soak: bool) -> None:
    known = [data for message in BAD_MESSAGES.values() for data in retyped(wire.encode(message))]
    numbers = [0, 1, 2, 3, 4, 31, 32, SEED, (1 << 63) - 1]
    for _ in range(4_000 if soak else 500):
        messages: list[Mapping[str, object]] = []
        for _ in range(rng.randint(1, 8)):
            got = tuple(rng.choice(numbers) for _ in range(rng.choice((0, 2, 3, 4, 4, 4, 9))))
            blobs = tuple(rng.choice(numbers[:4]) for _ in range(rng.randint(0, 5)))
            made = rng.choice(
                [
                    Joined(("10.0.0.9", 9), blobs, tuple(rng.sample(range(4), rng.randint(0, 4)))),
                    Report(got, rng.choice(numbers), rng.random() < 0.3, rng.choice(numbers)),
                    Complaint(rng.choice(numbers), rng.choice(numbers), rng.random() < 0.5, got),
                    Failed(blobs, rng.random() < 0.2, "why", "hint"),
                ]
            )
            with contextlib.suppress(ValueError):
                messages.append(json.loads(rng.choice(known)) if rng.random() < 0.3 else wire.encode(made))
        Guarded(5).live_through(rng.choice(STAGES), [each for each in messages if isinstance(each, dict)])


@pytest.mark.parametrize("nodes", [2, 3, 4, 5, 8, 33, 100])
def test_every_node_gets_every_piece(nodes: int) -> None:
    """No node sends much more than it receives."""
    told = Told(nodes)
    for node in range(nodes):
        told.join(0.0, node, set(range(len(SIZES))))
    told.hear(told.tracker.tick(0.0))
    told.check()
    given = dict.fromkeys(range(nodes), 0.0)
    for node, by_tree in told.parents.items():
        own = told.fetches.get(node, set())
        for links in by_tree.values():
            for parent, blobs in links:
                wanted = set(blobs or told.plan[node].blobs) - own
                given[parent] += sum(SIZES[blob] for blob in wanted) / told.plan[node].trees
    assert max(given.values()) <= 1.35 * sum(SIZES)


@pytest.mark.parametrize("seed", range(40))
def test_whatever_happens_all_that_live_can_get_all(seed: int) -> None:
    """Nodes come, die, complain of whom they like, and lack what they like, in any order."""
    rng = random.Random(seed)
    nodes, kept = rng.choice([2, 3, 5, 8, 20, 60]), rng.choice([0.0, 0.0, 0.3, 1.0])
    told, now = Told(nodes), 0.0
    waiting = list(range(nodes))
    rng.shuffle(waiting)
    for _ in range(nodes * 6):
        now += rng.choice([0.0, 0.01, 0.3])
        node = rng.choice(list(told.lacks)) if told.lacks else None
        happens = rng.random()
        if waiting and happens < 0.4:
            whole = rng.random() < 0.7
            lacks = {blob for blob in range(len(SIZES)) if whole or rng.random() < 0.5}
            told.join(now, waiting.pop(), lacks, {blob for blob in range(len(SIZES)) if rng.random() < kept})
        elif node is not None and happens < 0.5:
            told.leave(now, node)
            if rng.random() < 0.5:
                waiting.append(node)  # its helper may begin again
        elif node is not None and node in told.plan and happens < 0.55 and node not in told.done:
            told.finish(now, node)
        elif node is not None and node in told.plan:
            got = tuple(rng.randrange(1 << 28) for _ in range(told.plan[node].trees))
            tree = rng.randrange(len(got))
            parents = [parent for parent, _ in told.parents.get(node, {}).get(tree, [])]
            if parents and happens < 0.8:
                complaint = Complaint(tree, rng.choice(parents), rng.random() < 0.5, got)
                told.hear(told.tracker.handle(now, node, complaint))
            else:
                told.hear(told.tracker.handle(now, node, Report(got, rng.randrange(1 << 28))))
        told.hear(told.tracker.tick(now))
        if all(node in told.plan for node in told.lacks) and (nodes < 10 or rng.random() < 0.1):
            told.drained(now)
            told.check()
    told.hear(told.tracker.tick(now + GATHER_S))
    told.drained(now + GATHER_S)
    told.check()
    for node in list(told.lacks):
        got = (0,) * told.plan[node].trees
        told.hear(told.tracker.handle(now, node, Report(got, done=True)))
    told.hear(told.tracker.tick(now + 1))
    told.hear(told.tracker.tick(now + 2 + LINGER_S))
    assert told.released >= set(told.lacks)


@pytest.mark.parametrize("seed", range(60))
def test_whoever_cannot_connect_to_whom_all_can_get_all(seed: int) -> None:
    rng = random.Random(seed)
    nodes = rng.choice([2, 3, 4, 4, 5, 8, 20, 60])
    many = rng.choice([0.05, 0.2, 0.5, 0.9, 1.0])
    walls = {(node, other) for node in range(nodes) for other in range(nodes) if rng.random() < many}
    if seed % 3 == 0:  # nobody gets into some nodes, or out of them
        closed = rng.sample(range(nodes), nodes // 2)
        walls = {
            (node, other) for node in range(nodes) for other in range(nodes) if (other if seed % 2 else node) in closed
        }
    told = together(nodes)
    for count in range(1, 20 * nodes):
        stuck = [
            (node, tree, parent)
            for node, by_tree in told.parents.items()
            for tree, links in by_tree.items()
            for parent, blobs in links
            if (node, parent) in walls and told.wants(node, blobs)
        ]
        if not stuck:
            break
        node, tree, parent = rng.choice(stuck)
        got = (0,) * told.plan[node].trees
        told.hear(told.tracker.handle(0.1 * count, node, Complaint(tree, parent, False, got)))
    assert not stuck
    told.check()


def test_many_trees_are_even() -> None:
    for relays in (1, 2, 31, 32, 33, 37, 100, 997):
        number = trees.count(relays)
        forest = Forest(number, list(range(relays)), [])
        assert max(forest.loads.values()) <= 1.35 * max(number, 1) * max(relays - 1, 1) / relays + 1
        assert all(tree.parent[node] != node for tree in forest.trees for node in tree.parent)
        assert all([*tree.parent.values()].count(SOURCES) == 1 for tree in forest.trees)


def together(nodes: int) -> Told:
    told = Told(nodes)
    for node in range(nodes):
        told.join(0.0, node, set(range(len(SIZES))))
    told.hear(told.tracker.tick(0.0))
    return told


def test_a_blob_that_one_node_cannot_fetch_another_one_fetches() -> None:
    told = together(5)
    first = next(node for node, blobs in told.fetches.items() if 0 in blobs)
    told.hear(told.tracker.handle(1.0, first, Failed((0,), False, "no route to the registry")))
    assert 0 not in told.fetches[first]
    told.check()
    assert not told.hopeless


def test_refusal_is_requested_and_shown_once() -> None:
    told = together(5)
    source = next(iter(told.fetches))
    told.hear(told.tracker.handle(1.0, source, Failed((0,), True, "denied", "log in")))
    assert sorted(told.hopeless) == list(range(5))
    assert sorted((each.reason, each.hint) for each in told.hopeless.values()) == [("", "")] * 4 + [
        ("denied", "log in")
    ]


def all_report(told: Told, now: float) -> None:
    for node, plan in told.plan.items():
        told.hear(told.tracker.handle(now, node, Report((0,) * plan.trees)))


def nobody_can_fetch(told: Told, blob: int) -> None:
    for count in range(1, 4):
        source = next(node for node, blobs in told.fetches.items() if blob in blobs)
        told.hear(told.tracker.handle(1.0 * count, source, Failed((blob,), False, "unreachable")))
        assert told.tracker.wants_seed is False
    told.hear(told.tracker.tick(4.0))
    assert told.tracker.wants_seed


def test_blob_that_no_node_can_fetch_fails_without_seed() -> None:
    told = together(8)
    nobody_can_fetch(told, 0)
    told.hear(told.tracker.tick(4.0 + SEED_AFTER_S))
    assert not told.hopeless
    all_report(told, 3.9 + 2 * SEED_AFTER_S)
    told.hear(told.tracker.tick(4.0 + 2 * SEED_AFTER_S))
    assert not any(each.final for each in told.hopeless.values())
    assert sorted(each.reason for each in told.hopeless.values()) == [""] * 7 + ["unreachable"]


def test_what_no_node_can_fetch_comes_from_the_tracker_s_host() -> None:
    told = together(8)
    nobody_can_fetch(told, 0)
    all_report(told, 4.9)
    told.join(5.0, SEED, set())
    assert told.fetches[SEED] == {0}
    told.check()
    all_report(told, 5.9)
    told.leave(6.0, SEED)
    told.hear(told.tracker.tick(6.1))
    assert [each.final for each in told.hopeless.values()] == [False] * 8


def test_blob_without_source_comes_from_the_tracker() -> None:
    told = together(8)
    trees_ = told.plan[0].trees
    one, other = told.fetches
    told.hear(told.tracker.handle(1.0, one, Report((0,) * trees_, fetched=1)))
    told.hear(told.tracker.tick(SEED_AFTER_S + 0.1))
    assert told.tracker.wants_seed
    kept = set(told.fetches[one])
    told.join(SEED_AFTER_S + 0.2, SEED, set())
    assert (told.fetches[one], told.fetches[other]) == (kept, set())
    assert told.fetches[SEED] == set(range(len(SIZES))) - kept
    told.check()
    told.hear(told.tracker.handle(9.0, SEED, Failed(tuple(told.fetches[SEED]), False, "no route")))
    told.lacks.pop(SEED)
    told.check()
    assert not told.hopeless


def of_seed(nodes: int) -> Told:
    """A file that the tracker's host alone has."""
    told = Told(nodes, seed_only=True)
    for node in range(nodes):
        told.join(0.0, node, {0})
    told.hear(told.tracker.tick(0.0))
    told.hear(told.tracker.tick(0.1))
    assert told.tracker.wants_seed
    told.join(0.2, SEED, set())
    return told


@pytest.mark.parametrize("nodes", [1, 2, 5, 40])
def test_what_only_the_tracker_s_host_has_nobody_else_fetches(nodes: int) -> None:
    told = of_seed(nodes)
    assert told.fetches == {SEED: {0}}
    told.check()
    all_report(told, 1.0)
    told.leave(2.0, SEED)
    told.hear(told.tracker.tick(2.1))
    assert [each.final for each in told.hopeless.values()] == [False] * nodes


def test_blob_of_the_tracker_that_stalls_is_given_up() -> None:
    told = Told(2, seed_only=True)
    for node in range(2):
        told.join(0.0, node, {0})
    for now in (0.0, 0.1):
        told.hear(told.tracker.tick(now))
    all_report(told, 2 * SEED_AFTER_S)
    told.hear(told.tracker.tick(0.2 + 2 * SEED_AFTER_S))
    assert [each.final for each in told.hopeless.values()] == [False] * 2


def test_node_serves_before_the_host_of_the_tracker() -> None:
    told = Told(3, seed_only=True)
    told.join(0.0, 0, set(), {0})
    for node in (1, 2):
        told.join(0.0, node, {0})
    for now in (0.0, 0.1):
        told.hear(told.tracker.tick(now))
    assert {node: blobs for node, blobs in told.fetches.items() if blobs} == {0: {0}}
    assert not told.tracker.wants_seed
    told.check()
    told.leave(1.0, 0)
    told.hear(told.tracker.tick(1.1))
    assert told.tracker.wants_seed
    told.join(1.2, SEED, set())
    told.check()
    assert not told.hopeless


@pytest.mark.parametrize("seed", range(20))
def test_node_that_cannot_reach_the_tracker_gets_all(seed: int) -> None:
    rng = random.Random(seed)
    nodes = rng.choice([1, 2, 3, 8, 40])
    apart = rng.sample(range(nodes), rng.randrange(nodes + 1))
    told = of_seed(nodes)
    for count in range(1, 20 * nodes):
        stuck = [
            (node, tree)
            for node, by_tree in told.parents.items()
            for tree, links in by_tree.items()
            for parent, _ in links
            if parent == SEED and node in apart and node not in told.hopeless
        ]
        if not stuck:
            break
        node, tree = rng.choice(stuck)
        complaint = Complaint(tree, SEED, False, (0,) * told.plan[node].trees)
        told.hear(told.tracker.handle(0.2 + 0.01 * count, node, complaint))
    assert not stuck
    assert sorted(told.hopeless) == (list(range(nodes)) if len(apart) == nodes else [])
    for node in told.hopeless:
        del told.lacks[node]
    told.check()
    assert told.fetches == {SEED: {0}}


def test_a_source_that_is_slow_hands_over_its_work() -> None:
    told = together(6)
    slow, fast = told.fetches
    trees_ = told.plan[slow].trees
    for now in (1.0, 3.0):
        for node, count in ((fast, 100), (slow, 10)):
            told.hear(told.tracker.handle(now, node, fetching(trees_, int(now) * count << 20)))
    assert told.fetches[slow] == set()
    assert told.fetches[fast] == set(range(len(SIZES)))
    told.check()


def test_a_source_that_is_a_little_behind_keeps_its_work() -> None:
    """A small image is there before a second request of the registry would pay."""
    told = together(6)
    before = dict(told.fetches)
    slow, fast = before
    trees_ = told.plan[slow].trees
    for now in (1.0, 3.0):
        for node, count in ((fast, 7 << 20), (slow, 0)):
            told.hear(told.tracker.handle(now, node, fetching(trees_, count)))
    assert told.fetches == before


def test_a_source_that_cannot_begin_at_once_keeps_its_work() -> None:
    """What it gets in the first seconds says little, where others have filled a queue before."""
    told = together(2)
    before = dict(told.fetches)
    late, first = before
    for now in range(1, 16):
        for node, count in ((first, 12 * now), (late, 1)):
            told.hear(told.tracker.handle(float(now), node, fetching(1, count << 20)))
    assert told.fetches == before
    told.hear(told.tracker.handle(20.0, first, fetching(1, 240 << 20)))
    told.hear(told.tracker.handle(20.1, late, fetching(1, 1 << 20)))
    assert told.fetches == {late: set(), first: set(range(len(SIZES)))}


def test_source_behind_a_full_link_keeps_its_work() -> None:
    """It is that one's turn first: both have all as soon as they can."""
    told = together(2)
    before = dict(told.fetches)
    late, first = before
    for now in range(1, 60):
        told.hear(told.tracker.handle(now + 0.1, first, fetching(1, 12 * now << 20)))
        told.hear(told.tracker.handle(now + 0.2, late, Report((12 * now << 20,), now << 18, unfetched=1 << 29)))
    assert told.fetches == before


def test_source_that_finished_others_work_is_not_slow() -> None:
    told = together(6)
    gone, slow = told.fetches
    trees_ = told.plan[slow].trees
    heir = next(node for node in range(6) if node not in (gone, slow))
    told.hear(told.tracker.handle(0.9, heir, Report((1,) * trees_)))
    told.leave(1.0, gone)
    assert told.fetches[heir]
    for now in (2.0, 3.5, 4.5):
        told.hear(told.tracker.handle(now, heir, Report((0,) * trees_, fetched=50 << 20)))
        told.hear(told.tracker.handle(now, slow, fetching(trees_, int(now * 10) << 20)))
    told.hear(told.tracker.handle(5.5, slow, fetching(trees_, 60 << 20)))
    assert told.fetches[heir] == set(range(len(SIZES))), "it was five times as fast, as long as it had work"
    assert told.fetches[slow] == set()
    told.check()


def fetching(trees_: int, fetched: int) -> Report:
    """What a source says that has not finished."""
    return Report((0,) * trees_, fetched, unfetched=1 << 30)


def test_a_source_that_is_slow_is_not_the_only_one_of_two() -> None:
    told = together(2)
    slow, fast = told.fetches
    for now in (1.0, 3.0):
        for node, count in ((fast, 100), (slow, 10)):
            told.hear(told.tracker.handle(now, node, fetching(1, int(now) * count << 20)))
    assert told.fetches == {slow: set(), fast: set(range(len(SIZES)))}
    told.check()


@pytest.mark.parametrize("nodes", [2, 3, 8])
@pytest.mark.parametrize("ends", [True, False])
def test_blob_sent_before_a_task_ended_is_kept(nodes: int, ends: bool) -> None:
    """Its kernel goes on to send. What has not come when that ends, or comes too slowly, others fetch."""
    told = together(nodes)
    before = {node: set(blobs) for node, blobs in told.fetches.items()}
    first = next(iter(before))
    told.finish(1.0, first)
    told.leave(1.1, first)
    told.hear(told.tracker.tick(1.1 + 0.9 * DRAIN_S))
    del before[first]
    assert told.fetches == before
    if ends:
        told.drained(1.1 + 0.9 * DRAIN_S)
    else:
        told.hear(told.tracker.tick(2.1 + DRAIN_S))
    assert set().union(*told.fetches.values()) == set(range(len(SIZES)))
    told.check()


def test_rest_of_a_node_that_left_comes_from_a_full_one() -> None:
    told = together(4)
    first, second = told.fetches
    trees_ = told.plan[first].trees
    for node in set(range(4)) - {first, second}:
        told.hear(told.tracker.handle(0.9, node, Report((1 << 30,) * trees_)))
    for node in (first, second):
        told.finish(1.0, node)
    told.leave(1.1, first)
    told.drained(1.2)
    assert told.fetches[second] == set(range(len(SIZES)))
    told.check()


def test_nobody_new_takes_from_one_who_has_left() -> None:
    told = Told(9)
    for node in range(8):
        told.join(0.0, node, set(range(len(SIZES))))
    told.hear(told.tracker.tick(GATHER_S))
    gone = next(node for node, plan in told.plan.items() if plan.relays)
    told.finish(1.0, gone)
    told.leave(1.0, gone)
    told.join(1.1, 8, set(range(len(SIZES))))
    assert gone not in {parent for links in told.parents[8].values() for parent, _ in links}
    told.drained(1.2)
    told.check()


def test_one_who_comes_when_all_have_just_left_begins_anew() -> None:
    told = together(2)
    for node in range(2):
        told.finish(1.0, node)
        told.leave(1.1, node)
    told.join(1.2, 1, {0, 1})
    told.hear(told.tracker.tick(1.2 + GATHER_S))
    assert told.fetches == {1: {0, 1}}


def test_one_who_comes_again_is_another_one() -> None:
    """A helper that was killed when it had all, and its successor, which has it no more."""
    told = together(3)
    told.finish(1.0, 0)
    told.leave(1.0, 0)
    told.join(1.1, 0, set(range(len(SIZES))))
    told.drained(1.1)
    told.check()


def test_the_last_does_not_wait_for_who_has_left() -> None:
    told = together(2)
    told.finish(1.0, 0)
    told.leave(1.0, 0)
    told.finish(1.1, 1)
    told.hear(told.tracker.tick(1.2))
    assert told.released == {1}


@pytest.mark.parametrize("nodes", [6, 10_000])
def test_a_source_that_says_nothing_hands_over_its_work(nodes: int) -> None:
    """It says something once a second, in a swarm of any size; others, of ten thousand, once in ten."""
    told = Told(nodes)
    for node in range(6):
        told.join(node * 0.01, node, set(range(len(SIZES))))
    told.hear(told.tracker.tick(1.0))
    silent, other = told.fetches
    trees_ = told.plan[silent].trees
    for second in range(1, 7):
        for node in range(6) if nodes == 6 or second == 1 else [other]:
            if node != silent:
                told.hear(told.tracker.handle(float(second), node, Report((0,) * trees_, fetched=1 << 20)))
        told.hear(told.tracker.tick(second + 0.5))
    assert told.fetches[silent] == set()
    assert told.fetches[other] == set(range(len(SIZES)))
    told.check()


def test_a_relay_that_many_complain_of_relays_no_more() -> None:
    told = together(8)
    slow = next(node for node, plan in told.plan.items() if plan.relays and node not in told.fetches)
    for node, by_tree in list(told.parents.items()):
        for tree, links in list(by_tree.items()):
            if slow in [parent for parent, _ in links]:
                told.hear(told.tracker.handle(1.0, node, Complaint(tree, slow, False, (0,) * told.plan[node].trees)))
    assert slow not in {
        parent for by_tree in told.parents.values() for links in by_tree.values() for parent, _ in links
    }
    told.check()


def test_who_comes_when_all_are_gone_begins_anew() -> None:
    told = together(3)
    for node in range(3):
        told.hear(told.tracker.handle(1.0, node, Report((0,) * told.plan[node].trees, done=True)))
    told.hear(told.tracker.tick(2.0))
    assert told.released == {0, 1, 2}
    for node in range(3):
        told.leave(3.0, node)
    told.join(60.0, 1, {0, 1})
    told.hear(told.tracker.tick(60.0 + GATHER_S))
    assert told.fetches[1] == {0, 1}


def test_how_far_the_nodes_are() -> None:
    told = Told(3)
    for node in range(2):
        told.lacks[node] = {0}
        told.hear(told.tracker.handle(0.0, node, Joined(("10.0.0.1", 1), (0,), name=f"n{node}")))
    told.hear(told.tracker.tick(GATHER_S))
    trees_ = told.plan[0].trees
    source = next(iter(told.fetches))
    told.hear(told.tracker.handle(1.0, source, Report((0,) * trees_, SIZES[0], done=True)))
    half = (SIZES[0] // 2 // trees_,) * trees_
    told.hear(told.tracker.handle(1.0, 1 - source, Report(half)))
    now = told.tracker.progress()
    assert (now.joined, now.ready, now.slowest, now.fetched) == (2, 1, f"n{1 - source}", SIZES[0])
    assert round(now.fraction, 2) == 0.5
    assert not told.tracker.all_have_it


def test_what_nodes_have_kept_they_give_and_nobody_fetches() -> None:
    told = Told(8)
    for node in range(7):
        told.join(0.0, node, set(), {0, 1} if node % 2 else {1, 2, 3})
    told.join(0.1, 7, set(range(len(SIZES))))
    told.hear(told.tracker.tick(0.2))
    told.check()
    assert 7 not in told.fetches
    assert sorted(blob for blobs in told.fetches.values() for blob in blobs) == [0, 1, 2, 3]
    assert max(sum(SIZES[blob] for blob in blobs) for blobs in told.fetches.values()) == SIZES[0]
    told.hear(told.tracker.tick(SEED_AFTER_S + 1))
    assert not told.tracker.wants_seed


def test_node_that_kept_a_blob_replaces_a_dead_one() -> None:
    told = Told(3)
    told.join(0.0, 0, set(), {0})
    told.join(0.0, 1, set(), {0})
    told.join(0.0, 2, {0})
    told.hear(told.tracker.tick(0.1))
    first = next(node for node, blobs in told.fetches.items() if blobs)
    told.leave(1.0, first)
    assert told.fetches == {1 - first: {0}}
    told.check()
