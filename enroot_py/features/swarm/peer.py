"""A peer's decisions: downloads from parents, fetches from the registry, and complaints to the tracker.

Like tracker.py, this module uses neither sockets nor clocks. Events come in with their time, actions go out.
"""

from __future__ import annotations

from dataclasses import dataclass

from enroot_py.features.swarm.messages import (
    REPORT_INTERVAL_S,
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
    report_interval,
)

CONNECT_TIMEOUT_S = 6.0  # a connection to a parent takes four round trips, and each packet may wait in a full queue
COMPLAIN_AFTER_S = 1.0  # complain about a slow parent after this time, and again after the same time
LAG_BYTES = 8 << 20  # a tree is slow if it has brought this many bytes fewer than the fastest tree,
SLOW = 0.5  # and less than this part of the median of all trees
ALONE_AFTER_S = 10.0  # if the tracker is lost and no parent has sent a byte for this time, fetch everything


@dataclass(frozen=True, slots=True)
class SendToTracker:
    message: FromPeer


@dataclass(frozen=True, slots=True)
class Download:
    """Ask a parent for the missing pieces of a tree, but only for pieces of ``blobs``."""

    link: Link
    blobs: frozenset[int]


@dataclass(frozen=True, slots=True)
class StopDownload:
    link: Link


@dataclass(frozen=True, slots=True)
class FetchFromRegistry:
    """Fetch the missing bytes of these blobs, and only these, from the registry."""

    blobs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Leave:
    """End the peer: no other node needs it, or the swarm cannot deliver the image."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """End the peer: no node can get the image. Report the reason, if any, to the user."""

    reason: str
    hint: str


Action = SendToTracker | Download | StopDownload | FetchFromRegistry | Leave | GiveUp


@dataclass(slots=True)
class _Flow:
    """A link in use."""

    link: Link
    blobs: frozenset[int]
    since: float  # time of the Routes message, of the connection or of the last complaint, whichever is latest
    reached: bool = False
    received_at: float = 0.0  # time of the last byte


class Peer:
    """The state machine of one peer. ``joined`` is its first message."""

    def __init__(self, joined: Joined, nodes: int) -> None:
        self._joined = joined
        self._lacks = frozenset(joined.lacks)
        self._interval = report_interval(nodes)
        self._routes: Routes | None = None
        self._flows: dict[int, list[_Flow]] = {}  # by tree
        self._fetches: set[int] = set()  # blobs that the peer has to fetch from the registry
        self._fetched = self._unfetched = 0  # bytes from the registry: received, and still to come
        self._got: list[int] = []  # bytes received by each tree
        self._reported_at = 0.0
        self._tracker_lost_at: float | None = None
        self._fetches_all = False
        self._done = False

    def begin(self, now: float) -> list[Action]:
        self._reported_at = now
        return [SendToTracker(self._joined)]

    # -- events: each returns actions

    def handle(self, now: float, message: FromTracker) -> list[Action]:
        if isinstance(message, Routes):
            return self._follow(now, message)
        if isinstance(message, FetchBlobs):
            self._fetches = set(message.blobs)
            return [FetchFromRegistry(message.blobs), *self._update_downloads()]
        if isinstance(message, Hopeless) and message.final:
            return [GiveUp(message.reason, message.hint)]
        return [Leave()]

    def reached(self, now: float, link: Link) -> list[Action]:
        """The connection to the link's parent is established."""
        for flow in self._flows_of(link):
            flow.reached, flow.since = True, now
        return []

    def lost(self, now: float, link: Link) -> list[Action]:
        """The connection to the link's parent has ended, or has failed."""
        return [action for flow in self._flows_of(link) for action in self._complain(now, flow, reached=False)]

    def downloaded(self, now: float, link: Link, count: int) -> None:
        self._got[link.tree] += count
        for flow in self._flows_of(link):
            flow.received_at = now

    def fetched(self, count: int, unfetched: int) -> None:
        """Count bytes from the registry. ``unfetched`` bytes are still to come."""
        self._fetched += count
        if self._unfetched and not unfetched:
            self._reported_at = 0.0  # report at once: the tracker compares fetchers by their rates
        self._unfetched = unfetched

    def failed(self, blob: int, *, refused: bool, reason: str, hint: str) -> list[Action]:
        """A blob cannot be fetched from the registry."""
        if self._tracker_lost_at is not None:
            return [GiveUp(reason, hint)] if refused else [Leave()]
        return [SendToTracker(Failed((blob,), refused, reason, hint))]

    def finished(self, now: float) -> list[Action]:
        """Every blob is complete."""
        self._done = True
        return [self._report(now)]

    def tick(self, now: float) -> list[Action]:
        """Handle the passing of time; call it a few times a second."""
        if self._tracker_lost_at is not None:
            return [] if self._done else self._go_on_alone(now)
        if self._done:
            return [self._report(now)] if self._routes and now >= self._reported_at + self._interval else []
        actions: list[Action] = []
        median = sorted(self._got)[len(self._got) // 2] if self._got else 0
        for tree, flows in self._flows.items():
            is_slow = self._got[tree] + LAG_BYTES <= max(self._got) and self._got[tree] < SLOW * median
            for flow in flows:
                if not flow.blobs:
                    continue  # the peer downloads nothing by this link
                waited = now - flow.since
                limit = COMPLAIN_AFTER_S if flow.reached else CONNECT_TIMEOUT_S
                if waited >= limit and (is_slow or not flow.reached):
                    actions += self._complain(now, flow, reached=flow.reached)
        interval = REPORT_INTERVAL_S if self._fetches else self._interval
        if self._routes and now >= self._reported_at + interval:
            actions.append(self._report(now))
        return actions

    def tracker_lost(self, now: float) -> list[Action]:
        self._tracker_lost_at = now
        return []

    # -- reactions

    def _flows_of(self, link: Link) -> list[_Flow]:
        return [flow for flow in self._flows.get(link.tree, ()) if flow.link == link]

    def _follow(self, now: float, routes: Routes) -> list[Action]:
        """Replace the links of the trees that the routes name."""
        actions: list[Action] = []
        if len(self._got) != routes.trees:
            actions += [StopDownload(flow.link) for flows in self._flows.values() for flow in flows]
            self._got, self._flows = [0] * routes.trees, {}
        self._routes = routes
        for tree in {link.tree for link in routes.links}:
            links = [link for link in routes.links if link.tree == tree]
            before = self._flows.get(tree, [])
            actions += [StopDownload(flow.link) for flow in before if flow.link not in links]
            kept = [flow for flow in before if flow.link in links]
            new = [_Flow(link, frozenset(), now) for link in links if link not in [flow.link for flow in kept]]
            self._flows[tree] = kept + new
        return actions + self._update_downloads()

    def _update_downloads(self) -> list[Action]:
        """Ask each parent for the wanted blobs, unless the last request to this parent was the same."""
        if self._routes is None:
            return []
        wanted = frozenset(self._routes.blobs if self._routes.relays else self._lacks) - self._fetches
        actions: list[Action] = []
        for flows in self._flows.values():
            for flow in flows:
                blobs = wanted & frozenset(flow.link.blobs) if flow.link.blobs else wanted
                if blobs != flow.blobs:
                    flow.blobs = blobs
                    actions.append(Download(flow.link, blobs))
        return actions

    def _complain(self, now: float, flow: _Flow, *, reached: bool) -> list[Action]:
        flow.since = now
        return [SendToTracker(Complaint(flow.link.tree, flow.link.parent, reached, tuple(self._got)))]

    def _report(self, now: float) -> SendToTracker:
        self._reported_at = now
        return SendToTracker(Report(tuple(self._got), self._fetched, self._done, self._unfetched))

    def _go_on_alone(self, now: float) -> list[Action]:
        """Without a tracker, keep the parents while bytes come; then fetch the rest from the registry."""
        assert self._tracker_lost_at is not None
        flows = [flow for flows in self._flows.values() for flow in flows]
        is_receiving = any(now - flow.received_at < ALONE_AFTER_S for flow in flows)
        if self._fetches_all or is_receiving or now - self._tracker_lost_at < CONNECT_TIMEOUT_S:
            return []
        self._fetches_all = True
        self._fetches |= self._lacks
        self._flows = {}
        return [*(StopDownload(flow.link) for flow in flows), FetchFromRegistry(tuple(sorted(self._fetches)))]
