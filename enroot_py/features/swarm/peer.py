"""The decisions of one peer of a swarm: whom it takes from, and when it complains.

Neither sockets nor clocks, as tracker.py: what happens goes in with its time, and what to do comes out.
"""

from __future__ import annotations

from dataclasses import dataclass

from enroot_py.features.swarm.messages import (
    REPORT,
    Complaint,
    Failed,
    FetchBlobs,
    FromPeer,
    FromTracker,
    Hopeless,
    Joined,
    Link,
    Report,
    Routes,
    report_every,
)

CONNECT = 6.0  # seconds to reach a parent in: four trips, each behind what waits in a full queue
PATIENCE = 1.0  # seconds with a parent until it may be slow, and from one complaint to the next
BEHIND = 8 << 20  # bytes by one tree less than by others, from which on it may be slow
SLOW = 0.5  # of what comes by other trees: less is slow
ALONE = 10.0  # seconds without a plan, or without a tracker to complain to


@dataclass(frozen=True, slots=True)
class Tell:
    """Say this to the tracker."""

    message: FromPeer


@dataclass(frozen=True, slots=True)
class Take:
    """Ask a parent for the pieces of a tree that are not here, of these blobs and no other."""

    link: Link
    blobs: frozenset[int]


@dataclass(frozen=True, slots=True)
class Drop:
    """Take nothing more of this link."""

    link: Link


@dataclass(frozen=True, slots=True)
class Get:
    """Get these blobs and no other from the registry, as far as they are not here; others may ask for what is."""

    blobs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Leave:
    """Nobody needs what is here."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The image cannot be had; the reason is for the user, if there is one."""

    reason: str
    hint: str


Action = Tell | Take | Drop | Get | Leave | GiveUp


@dataclass(slots=True)
class _Flow:
    """A link that is in use."""

    link: Link
    blobs: frozenset[int]
    since: float  # it was planned or reached, or complained of
    reached: bool = False
    heard: float = 0.0  # the last byte


class Peer:
    """One node's part: that of one which says this to the tracker."""

    def __init__(self, joined: Joined, nodes: int) -> None:
        self._joined = joined
        self._lacks = frozenset(joined.lacks)
        self._every = report_every(nodes)
        self._plan: Routes | None = None
        self._flows: dict[int, list[_Flow]] = {}  # by tree
        self._own: set[int] = set()  # blobs that it has from the registry
        self._fetched = self._unfetched = 0  # bytes of them, that have come and that have not
        self._got: list[int] = []
        self._reported = 0.0
        self._orphaned: float | None = None  # since when there is no tracker
        self._gets_all = False  # from the registry
        self._done = False

    def begin(self, now: float) -> list[Action]:
        self._reported = now
        return [Tell(self._joined)]

    # -- what happens

    def handle(self, now: float, message: FromTracker) -> list[Action]:
        if isinstance(message, Routes):
            return self._follow(now, message)
        if isinstance(message, FetchBlobs):
            self._own = set(message.blobs)
            return [Get(message.blobs), *self._ask()]
        if isinstance(message, Hopeless):
            return [GiveUp(message.reason, message.hint)] if message.final else [Leave()]
        return [Leave()]

    def reached(self, now: float, link: Link) -> list[Action]:
        """The parent of a link has answered."""
        for flow in self._of(link):
            flow.reached, flow.since = True, now
        return []

    def lost(self, now: float, link: Link) -> list[Action]:
        """The parent of a link is gone, or was never there."""
        return [action for flow in self._of(link) for action in self._complain(now, flow, reached=False)]

    def took(self, now: float, link: Link, count: int) -> None:
        """Some bytes have come."""
        self._got[link.tree] += count
        for flow in self._of(link):
            flow.heard = now

    def fetched(self, count: int, unfetched: int) -> None:
        """Some bytes have come from the registry, and so many are still to come."""
        self._fetched += count
        if self._unfetched and not unfetched:
            self._reported = 0.0  # by its rate others are judged
        self._unfetched = unfetched

    def failed(self, blob: int, *, refused: bool, reason: str, hint: str) -> list[Action]:
        """A blob does not come from the registry."""
        if self._orphaned is not None:
            return [GiveUp(reason, hint)] if refused else [Leave()]
        return [Tell(Failed((blob,), refused, reason, hint))]

    def finished(self, now: float) -> list[Action]:
        """Nothing is lacking any more."""
        self._done = True
        return [self._report(now)]

    def tick(self, now: float) -> list[Action]:
        """To be called now and then, some times in a second."""
        if self._orphaned is not None:
            return [] if self._done else self._alone(now)
        if self._done:
            return [self._report(now)] if self._plan and now >= self._reported + self._every else []
        actions: list[Action] = []
        usual = sorted(self._got)[len(self._got) // 2] if self._got else 0
        for tree, flows in self._flows.items():
            is_behind = self._got[tree] + BEHIND <= max(self._got) and self._got[tree] < SLOW * usual
            for flow in flows:
                if not flow.blobs:
                    continue  # it is not asked for anything
                waited = now - flow.since
                if waited >= (PATIENCE if flow.reached else CONNECT) and (is_behind or not flow.reached):
                    actions += self._complain(now, flow, reached=flow.reached)
        if self._plan and now >= self._reported + (REPORT if self._own else self._every):
            actions.append(self._report(now))
        return actions

    def left_alone(self, now: float) -> list[Action]:
        """The tracker is gone."""
        self._orphaned = now
        return []

    # -- what to do then

    def _of(self, link: Link) -> list[_Flow]:
        return [flow for flow in self._flows.get(link.tree, ()) if flow.link == link]

    def _follow(self, now: float, plan: Routes) -> list[Action]:
        actions: list[Action] = []
        if len(self._got) != plan.trees:
            actions += [Drop(flow.link) for flows in self._flows.values() for flow in flows]
            self._got, self._flows = [0] * plan.trees, {}
        self._plan = plan
        for tree in {link.tree for link in plan.links}:
            links = [link for link in plan.links if link.tree == tree]
            before = self._flows.get(tree, [])
            actions += [Drop(flow.link) for flow in before if flow.link not in links]
            kept = [flow for flow in before if flow.link in links]
            new = [_Flow(link, frozenset(), now) for link in links if link not in [flow.link for flow in kept]]
            self._flows[tree] = kept + new
        return actions + self._ask()

    def _ask(self) -> list[Action]:
        """Ask for what is wanted, wherever that is something else than before."""
        if self._plan is None:
            return []
        wanted = frozenset(self._plan.blobs if self._plan.relays else self._lacks) - self._own
        actions: list[Action] = []
        for flows in self._flows.values():
            for flow in flows:
                blobs = wanted & frozenset(flow.link.blobs) if flow.link.blobs else wanted
                if blobs != flow.blobs:
                    flow.blobs = blobs
                    actions.append(Take(flow.link, blobs))
        return actions

    def _complain(self, now: float, flow: _Flow, *, reached: bool) -> list[Action]:
        flow.since = now
        return [Tell(Complaint(flow.link.tree, flow.link.parent, reached, tuple(self._got)))]

    def _report(self, now: float) -> Tell:
        self._reported = now
        return Tell(Report(tuple(self._got), self._fetched, self._done, self._unfetched))

    def _alone(self, now: float) -> list[Action]:
        """Go on with what comes; get from the registry what does not."""
        assert self._orphaned is not None
        flows = [flow for flows in self._flows.values() for flow in flows]
        if self._gets_all or any(now - flow.heard < ALONE for flow in flows) or now - self._orphaned < CONNECT:
            return []
        self._gets_all = True
        self._own |= self._lacks
        self._flows = {}
        return [*(Drop(flow.link) for flow in flows), Get(tuple(sorted(self._own)))]
