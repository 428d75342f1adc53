"""The tracker's decisions. The plan of a swarm names the fetcher of each blob and the parents of each peer.

This module uses neither sockets nor clocks. Events come in with their time, messages to peers go out. The same code
runs in srun and in benchmarks/swarm.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from enroot_py.features.swarm import trees
from enroot_py.features.swarm.fetchers import MAX_STRIKES, SLOW, Fetchers, PeerState
from enroot_py.features.swarm.messages import (
    REPORT_INTERVAL_S,
    SEED,
    Complaint,
    Failed,
    FetchBlobs,
    FromPeer,
    FromTracker,
    Hopeless,
    Joined,
    Link,
    Progress,
    Released,
    Report,
    Routes,
    report_interval,
)
from enroot_py.features.swarm.trees import SOURCES, BlobTree, Forest

GATHER_S = 0.5  # between the first peer and the plan, unless all nodes join earlier
GROWTH = 8  # plan again when one late peer has joined for every GROWTH planned peers
EARLY = 3  # do not plan again if a peer has received more than 1/EARLY of all bytes
LINGER_S = 30.0  # finished peers wait for late peers for this time
STALLED_AFTER_S = 2.0  # a peer is stalled when it has sent no message for this time plus three report intervals
DRAIN_S = 3.0  # the kernel of a peer may send for this time after the peer has left

Messages = list[tuple[int, FromTracker]]


class Tracker:
    """The state of one swarm. ``sizes`` are the sizes of the blobs. The step has ``nodes`` nodes.

    ``ready`` lists the nodes that already have every blob. With ``seed_only``, there is no registry: the seed has every
    blob.
    """

    def __init__(self, sizes: Sequence[int], nodes: int, ready: Iterable[int] = (), seed_only: bool = False) -> None:
        self._sizes = sizes
        self._nodes = nodes
        self._peers: dict[int, PeerState] = {}
        self._fetchers = Fetchers(sizes, self._peers, seed_only)
        self._forest = Forest(0)  # not planned yet
        self._now = 0.0
        self._first_joined_at = 0.0
        self._planned = 0  # peers that are part of the plan
        self._late: list[float] = []  # join times of the peers that are not part of the plan
        self._idle_since = 0.0  # since this time, no peer lacks a blob
        self._checked_at = 0.0  # time of the last check for stalled peers
        self._ready = set(ready)  # includes nodes that have left
        self._fetched: dict[int, int] = {}  # by node: bytes from the registry
        self._rerouted: dict[int, set[int]] = {}  # by node: trees of the next Routes message to the node
        self._outbox: Messages = []

    # -- events: each returns messages to peers

    def handle(self, now: float, node: int, message: FromPeer) -> Messages:
        """Handle a message of a peer. Raises ValueError if no peer of this swarm would send it."""
        self._clock(now)
        self._check(node, message)
        if node in self._peers:
            self._peers[node].heard_at, self._peers[node].stalled = now, False
        if node == SEED:
            self._handle_seed(message)
        elif isinstance(message, Joined):
            self._forget(node)  # the node's previous peer, which has left
            self._join(node, message)
        elif (peer := self._peers.get(node)) is None:
            pass  # the peer was released
        elif isinstance(message, Failed):
            self._failed(node, peer, message)
        elif len(message.got) == len(self._forest.trees):  # otherwise the message is about an older plan
            peer.got = message.got
            if isinstance(message, Report):
                self._report(node, peer, message)
            else:
                self._complain(node, peer, message)
        return self._flush()

    def left(self, now: float, node: int) -> Messages:
        """Handle the end of a peer's connection."""
        self._clock(now)
        peer = self._peers.get(node)
        if node == SEED:
            self._fetchers.lose_seed()
        elif peer and peer.lacks and peer.done and self._is_planned:
            peer.left_at = now  # its kernel may still send, tcp(7); its children complain when no more data comes
            if not any(map(self._listens, self._peers)):
                self._restart()
        else:
            self._forget(node)
        return self._flush()

    def tick(self, now: float) -> Messages:
        """Handle the passing of time; call it a few times a second."""
        self._clock(now)
        if self._is_planned and self._fetchers.check_seed():
            self._give_up(self._fetchers.last_failure)
        if self._is_planned and now >= self._checked_at + 1:
            if now > self._checked_at + STALLED_AFTER_S:  # the tracker itself was stopped: no peer is stalled
                for peer in self._peers.values():
                    peer.heard_at = now
            self._checked_at = now
            self._retire_stalled()
            drained = [node for node, peer in self._peers.items() if peer.left_at and now > peer.left_at + DRAIN_S]
            for node in drained:
                self._forget(node)
        if self._has_grown():
            self._plan_again()
        if self._peers and not self._is_planned:
            if len(self._peers) == self._nodes or now >= self._first_joined_at + GATHER_S:
                self._plan()
        elif not self._peers:
            self._restart()
        elif not self._all_done():
            self._idle_since = now
        elif len(self._peers) == self._nodes or now >= self._idle_since + LINGER_S:
            self._outbox += [(node, Released()) for node in filter(self._listens, self._peers)]
            self._restart()
        return self._flush()

    @property
    def _is_planned(self) -> bool:
        return bool(self._forest.trees)

    def _clock(self, now: float) -> None:
        self._now = self._fetchers.now = now

    def _restart(self) -> None:
        """Forget the plan and all peers. Peers that join later get a new plan."""
        self._peers.clear()
        self._fetchers.clear()
        self._rerouted.clear()
        self._forest, self._late = Forest(0), []

    def _check(self, node: int, message: FromPeer) -> None:
        if isinstance(message, Joined) and node in self._peers and not self._peers[node].left_at:
            raise ValueError(f"node {node} has already joined")
        blobs = message.lacks + message.has if isinstance(message, Joined) else getattr(message, "blobs", ())
        if not all(blob < len(self._sizes) for blob in blobs):
            raise ValueError("unknown blob")

    def _all_done(self) -> bool:
        """Check that every peer has every blob. Ignore stalled peers."""
        peers = self._peers.values()
        return all(peer.done or peer.stalled for peer in peers) and any(peer.done for peer in peers)

    # -- state for the tracker's process

    @property
    def wants_seed(self) -> bool:
        """Return whether a peer on the tracker's host should join as SEED."""
        return self._fetchers.wants_seed

    @property
    def all_have_it(self) -> bool:
        """Return whether each node of the step has every blob."""
        return len(self._ready) == self._nodes

    def progress(self) -> Progress:
        slowest, fraction, relayed = "", 1.0, self._fetchers.size
        for node, peer in self._peers.items():
            wanted = relayed if peer.relays else sum(self._sizes[blob] for blob in peer.lacks)
            received = min(1.0, peer.received / wanted) if wanted else 1.0
            if node not in self._ready and received <= fraction:
                slowest, fraction = peer.name, received
        joined = len(self._ready | self._peers.keys())
        return Progress(joined, len(self._ready), slowest, fraction, sum(self._fetched.values()))

    # -- messages to peers

    def _reroute(self, node: int, *trees: int) -> None:
        """Have _flush() send Routes to a peer, with the links of these trees."""
        self._rerouted.setdefault(node, set()).update(trees)

    def _flush(self) -> Messages:
        messages, self._outbox = self._outbox, []
        if self._fetchers.changed:
            changed = filter(self._listens, self._fetchers.changed)
            messages += [(node, FetchBlobs(self._fetchers.fetched_by(node))) for node in changed]
            for tree in self._forest.trees:
                for root in tree.roots:
                    self._reroute(root, tree.number)
            self._fetchers.changed.clear()
        if self._is_planned:
            rerouted = filter(self._listens, self._rerouted)
            messages += [(node, self._routes(node, self._rerouted[node])) for node in rerouted]
            self._rerouted.clear()
        return messages

    def _listens(self, node: int) -> bool:
        """Check whether a node has joined and not left."""
        return node in self and not self._fetchers.peer(node).left_at

    def __contains__(self, node: int) -> bool:
        return node in self._peers or node == SEED and self._fetchers.seed is not None

    def _routes(self, node: int, numbers: set[int]) -> Routes:
        """Return the links of a peer in some trees."""
        links: list[Link] = []
        for number in sorted(numbers):
            parent = self._forest.trees[number].parent.get(node)
            if parent is None:
                continue  # the node lacks no blob
            if parent != SOURCES:
                links.append(Link(number, parent, self._peers[parent].address))
                continue
            for fetcher in self._fetchers.nodes:
                if fetcher != node and fetcher in self:
                    address = self._fetchers.peer(fetcher).address
                    links.append(Link(number, fetcher, address, self._fetchers.shared_by(fetcher)))
        relays = node in self._forest.loads
        return Routes(len(self._forest.trees), self._fetchers.blobs, relays, tuple(links))

    # -- the plan

    def _join(self, node: int, joined: Joined) -> None:
        lacks = frozenset(joined.lacks)
        has = frozenset(joined.has)
        peer = PeerState(joined.address, lacks, has, joined.name, heard_at=self._now, done=not lacks)
        self._peers[node] = peer
        if peer.done:
            self._ready.add(node)
        if not self._is_planned:
            self._first_joined_at = self._now if len(self._peers) == 1 else self._first_joined_at
            return
        if new := lacks.difference(self._fetchers.blobs):  # blobs that no earlier peer lacked
            self._fetchers.add(node, new)
            for other in self._peers:
                self._reroute(other)
        self._reroute(node)
        if peer.done:
            return
        self._late.append(self._now)
        peer.relays = self._can_relay(peer)
        if peer.relays:
            self._forest.add(node)
        for tree in self._forest.trees:
            self._place(tree, [node])

    def _plan(self) -> None:
        """Choose the fetchers and build the trees."""
        self._fetchers.choose(set().union(*(peer.lacks for peer in self._peers.values())))
        fetchers = sum(node in self._peers for node in self._fetchers.nodes)
        self._forest = self._grow(trees.count(self._nodes - fetchers))  # nodes that may become relays
        for node in self._peers:
            self._reroute(node, *range(len(self._forest.trees)))
        self._idle_since = self._checked_at = self._now
        if self._fetchers.seed:
            self._reroute(SEED)

    def _grow(self, number: int) -> Forest:
        """Return ``number`` trees of the peers that lack blobs. All relays upload about the same number of bytes."""
        lacking = {node: peer for node, peer in self._peers.items() if peer.lacks}
        relays: list[int] = []
        leaves: list[int] = []
        for node, peer in lacking.items():
            peer.relays = self._can_relay(peer)
            (relays if peer.relays and node not in self._fetchers else leaves).append(node)
        self._planned, self._late = len(lacking), []
        if len(relays) == 1:  # all other peers would depend on this relay, even a slow one: only late peers may use it
            forest = Forest(number, (), list(lacking))
            forest.add(relays[0])
            return forest
        return Forest(number, relays, leaves)

    def _has_grown(self) -> bool:
        """Check whether so many peers have joined since the plan that the planned relays would upload too much.

        While peers are still joining, wait until their number has doubled: a plan for thousands of peers costs seconds.
        Never plan again when a peer has received many bytes (EARLY), or when some peer is unreachable or slow.
        """
        if not self._late or GROWTH * len(self._late) < self._planned:
            return False
        settled = len(self._peers) == self._nodes or self._now >= self._late[-1] + GATHER_S
        if not settled and len(self._late) < self._planned:
            return False
        peers = self._peers.values()
        if any(peer.refused or peer.strikes or peer.stalled or peer.left_at for peer in peers):
            return False
        return EARLY * max((peer.received for peer in peers), default=0) <= self._fetchers.size

    def _plan_again(self) -> None:
        """Build new trees, in which late peers are relays too. A peer that keeps its parent gets no message."""
        before, self._forest = self._forest, self._grow(len(self._forest.trees))
        for old, new in zip(before.trees, self._forest.trees, strict=True):
            for node, parent in new.parent.items():
                if old.parent.get(node) != parent:
                    self._reroute(node, new.number)
        for node in before.loads.keys() ^ self._forest.loads.keys():
            self._reroute(node)

    def _can_relay(self, peer: PeerState) -> bool:
        """Check whether a peer lacks at least half of all bytes. A relay downloads all bytes, for its children."""
        return 2 * sum(self._sizes[blob] for blob in peer.lacks) >= self._fetchers.size

    def _report(self, node: int, peer: PeerState, report: Report) -> None:
        peer.done, peer.fetched, peer.unfetched = report.done, report.fetched, report.unfetched
        self._fetched[node] = report.fetched
        if report.done:
            self._ready.add(node)
        self._fetchers.compare(node)

    def _handle_seed(self, message: FromPeer) -> None:
        if isinstance(message, Joined):
            self._fetchers.seed_joined(message)
            self._reroute(SEED)
        elif isinstance(message, Report):
            self._fetched[SEED] = message.fetched
            if self._fetchers.seed:
                self._fetchers.seed.fetched = message.fetched
        elif isinstance(message, Failed):
            self._fetchers.last_failure = message
            self._fetchers.lose_seed()
            if message.refused:
                self._give_up(message)

    # -- failures

    def _forget(self, node: int) -> None:
        if self._peers.pop(node, None) is not None and self._is_planned:
            for tree in self._forest.trees:
                self._forest.detach(tree, node)
            self._fetchers.replace(node)
            self._retire(node)

    def _retire_stalled(self) -> None:
        """Stop using peers whose process is stopped or hangs, though their kernel answers."""
        usual = report_interval(self._nodes)
        intervals = dict.fromkeys(self._fetchers.nodes, REPORT_INTERVAL_S)
        for node, peer in self._peers.items():
            limit = STALLED_AFTER_S + 3 * intervals.get(node, usual)
            if not peer.stalled and self._now > max(peer.heard_at, peer.asked_at) + limit:
                peer.stalled = True
                if node in intervals:
                    self._replace(node)
                self._retire(node)

    def _failed(self, node: int, peer: PeerState, failed: Failed) -> None:
        """Have another peer fetch the blobs. If the registry refuses blobs that this peer was to fetch, give up."""
        if not self._is_planned:
            peer.failed |= set(failed.blobs)  # before the plan: only remember that this peer cannot fetch
            return
        if failed.refused and failed.blobs and set(failed.blobs) <= set(self._fetchers.fetched_by(node)):
            self._give_up(failed)
            return
        was_alone = not peer.alone.isdisjoint(failed.blobs)
        self._fetchers.failed(node, failed)
        if was_alone:
            self._reroute(node, *range(len(self._forest.trees)))

    def _give_up(self, failed: Failed) -> None:
        """Send Hopeless to all peers. Give the reason to one of them, if possible to a peer that still lacks blobs."""
        peers = self._peers
        receivers = sorted(filter(self._listens, peers), key=lambda node: peers[node].done or peers[node].stalled)
        for number, node in enumerate(receivers):
            reason, hint = ("", "") if number else (failed.reason, failed.hint)
            self._outbox.append((node, Hopeless(failed.refused, reason, hint)))
        self._restart()

    def _replace(self, fetcher: int) -> None:
        """Reassign the blobs of a fetcher. The fetcher downloads the blobs from other peers instead."""
        self._fetchers.replace(fetcher)
        self._reroute(fetcher, *range(len(self._forest.trees)))

    def _complain(self, node: int, peer: PeerState, complaint: Complaint) -> None:
        """Find out whether the parent, the connection to it or an ancestor is to blame.

        If it is the parent or the connection, give the child another parent.
        """
        number, blamed = complaint.tree, complaint.parent
        if blamed not in self or number >= len(self._forest.trees):
            return  # the parent has left; its children have new parents
        parent, tree = self._fetchers.peer(blamed), self._forest.trees[number]
        if parent.left_at:
            self._forget(blamed)
            return
        if blamed in self._fetchers and tree.parent.get(node) == SOURCES:
            if not complaint.reached:
                self._avoid_fetcher(node, peer, blamed, tree)
            return
        if tree.parent.get(node) != blamed:
            return  # the child already has another parent
        if complaint.reached and (not parent.got or parent.got[number] <= peer.got[number]):
            if not self._is_slow(parent):
                return  # the parent is waiting too, and will complain about its own parent
            parent.strikes |= set(range(-MAX_STRIKES, 0))  # enough to retire the parent
        peer.refused.add(blamed)
        parent.strikes.add(node)
        if len(parent.strikes) >= MAX_STRIKES:
            self._retire(blamed)
        else:
            self._forest.detach(tree, node)
            self._place(tree, [node])

    def _avoid_fetcher(self, node: int, peer: PeerState, fetcher: int, tree: BlobTree) -> None:
        """Handle a root that cannot connect to a fetcher.

        If the fetcher is unreachable for several peers, replace the fetcher. Otherwise replace the root. If there is no
        replacement, have the root fetch the blobs itself. If the root cannot, exclude it from the swarm.
        """
        peer.refused.add(fetcher)
        self._fetchers.peer(fetcher).strikes.add(node)
        if self._fetchers.is_unreachable(fetcher) and self._fetchers.has_successor(fetcher):
            self._replace(fetcher)
            return
        if (parent := self._best_parent(tree, node)) == SOURCES:
            parent = self._other_root(peer, tree)
        if parent != SOURCES:
            self._forest.detach(tree, node)
            self._attach(tree, node, parent)
            return
        blobs = [blob for blob in self._fetchers.shared_by(fetcher) if peer.handles(blob)]
        if not self._fetchers.seed_only and peer.failed.isdisjoint(blobs):
            self._fetchers.add_alone(node, blobs)
        else:  # neither the fetcher nor the registry can be reached
            self._outbox.append((node, Hopeless(final=False)))
            self._forget(node)

    def _other_root(self, peer: PeerState, tree: BlobTree) -> int:
        """Choose a relay from which the peer may download, and make the relay a root. If there is none, return SOURCES.

        The new root must be able to connect to all fetchers, as far as the tracker knows.
        """
        fetchers = self._fetchers.nodes
        for other in sorted(self._forest.loads, key=lambda relay: relay not in tree.children):
            reaches_all = other not in fetchers and self._peers[other].refused.isdisjoint(fetchers)
            may = self._listens(other) and other not in peer.refused
            if tree.parent.get(other) != SOURCES and reaches_all and may:
                self._forest.detach(tree, other)
                self._attach(tree, other, SOURCES)
                return other
        return SOURCES

    def _is_slow(self, peer: PeerState) -> bool:
        downloads = sorted(other.downloaded for other in self._peers.values() if other.lacks)
        return peer.downloaded < SLOW * downloads[len(downloads) // 2]

    def _retire(self, node: int) -> None:
        """Stop using a node as a relay: give its children new parents, and a new root to each tree that it headed."""
        for tree, orphans in self._forest.retire(node):
            self._place(tree, orphans)
            if tree.parent.get(node) == SOURCES:
                self._forest.detach(tree, node)
                self._place(tree, [node])

    def _place(self, tree: BlobTree, orphans: Sequence[int]) -> None:
        """Find parents for orphans. Begin with relays, which may then be the parents of other orphans."""
        for orphan in sorted(orphans, key=lambda node: node not in tree.children):
            self._attach(tree, orphan, self._best_parent(tree, orphan))

    def _attach(self, tree: BlobTree, node: int, parent: int) -> None:
        self._forest.attach(tree, node, parent)
        self._reroute(node, tree.number)

    def _best_parent(self, tree: BlobTree, node: int) -> int:
        peer = self._peers[node]
        got = peer.got[tree.number] if peer.got else 0

        def is_ahead(other: int) -> bool:
            other_got = self._peers[other].got
            return not got or bool(other_got) and other_got[tree.number] >= got

        def may(other: int) -> bool:
            return other not in peer.refused and self._listens(other)

        return self._forest.best_parent(tree, node, may, is_ahead)
