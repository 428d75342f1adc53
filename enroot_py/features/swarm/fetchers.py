"""The tracker's choice of fetchers. The fetcher of a blob gets it from the registry, unless it has the blob already."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from enroot_py.features.swarm.messages import SEED, Address, Failed, Joined

MAX_TRIES = 3  # when this many peers have failed to fetch a blob, the seed has to fetch it
MAX_STRIKES = 3  # when this many children have complained about a peer, it stops being a relay
COMPARE_AFTER_S = 2.0  # a fetcher works for this time before its rate is compared
MAX_UPLOAD = 1.3  # of three peers, use two fetchers only if each uploads at most this many times the image's size
MIN_WORK_S = 0.5  # the rate of a finished fetcher is computed at its first report after this time
SLOW = 0.5  # a fetcher is slow if its rate is less than this part of the best rate
MIN_LAG_BYTES = 8 << 20  # a fetcher that lags less is not replaced: another request to the registry would cost more
MIN_LAG_PART = 4  # the lag must also be at least 1/MIN_LAG_PART of all bytes
SEED_AFTER_S = 5.0  # when a fetcher has got no byte from the registry for this time, the tracker wants a seed


@dataclass(slots=True)
class PeerState:
    """A peer, or the seed, as the tracker knows it."""

    address: Address
    lacks: frozenset[int]
    has: frozenset[int]  # blobs that were complete when the peer joined
    name: str
    alone: frozenset[int] = frozenset()  # blobs that the peer fetches for itself only
    relays: bool = False
    done: bool = False
    got: tuple[int, ...] = ()
    fetched: int = 0
    unfetched: int = 0
    asked_at: float = 0.0  # time of the last FetchBlobs
    received_before: int = 0  # ``received`` at the time of the last FetchBlobs
    rate: float = 0.0  # bytes a second; set only when a fetcher has finished
    heard_at: float = 0.0
    stalled: bool = False  # no message has come for a long time
    left_at: float = 0.0  # time when the connection ended; the peer's kernel may still send
    failed: set[int] = field(default_factory=set)  # blobs that the peer could not fetch
    refused: set[int] = field(default_factory=set)  # parents that are unreachable or slow for the peer
    strikes: set[int] = field(default_factory=set)  # children that complained about the peer

    @property
    def downloaded(self) -> int:
        """Bytes from other peers."""
        return sum(self.got)

    @property
    def received(self) -> int:
        """Bytes from other peers and from the registry."""
        return self.downloaded + self.fetched

    def handles(self, blob: int) -> bool:
        """Check whether the peer relays, lacks or has a blob."""
        return self.relays or blob in self.lacks or blob in self.has


class Fetchers:
    """The fetcher of each blob.

    ``changed`` lists the peers to which the tracker has to send a new FetchBlobs. The tracker clears the list.
    """

    def __init__(self, sizes: Sequence[int], peers: Mapping[int, PeerState], seed_only: bool) -> None:
        """``seed_only``: there is no registry, so only a peer that has a blob can be its fetcher."""
        self.now = 0.0
        self.changed: dict[int, None] = {}
        self.seed: PeerState | None = None
        self.last_failure = Failed((), False, "")
        self._sizes = sizes
        self._peers = peers
        self.seed_only = seed_only
        self._by_blob: dict[int, int] = {}
        self._seed_is_bad = False
        self._seed_wanted_at: float | None = None

    def __contains__(self, node: int) -> bool:
        return node in self._by_blob.values()

    @property
    def nodes(self) -> list[int]:
        return list(dict.fromkeys(self._by_blob.values()))

    @property
    def blobs(self) -> tuple[int, ...]:
        """The blobs that the trees carry."""
        return tuple(sorted(self._by_blob))

    @property
    def size(self) -> int:
        """Bytes of the blobs that the trees carry."""
        return sum(self._sizes[blob] for blob in self._by_blob)

    def shared_by(self, node: int) -> tuple[int, ...]:
        """Return the blobs that a peer fetches for all peers."""
        return tuple(sorted(blob for blob, fetcher in self._by_blob.items() if fetcher == node))

    def fetched_by(self, node: int) -> tuple[int, ...]:
        """Return the blobs that a peer fetches for all peers or for itself only."""
        return tuple(sorted(self.peer(node).alone.union(self.shared_by(node))))

    def peer(self, node: int) -> PeerState:
        return self.seed if node == SEED and self.seed else self._peers[node]

    def clear(self) -> None:
        self._by_blob.clear()
        self.changed.clear()
        self._seed_wanted_at = None

    # -- assignment

    def choose(self, blobs: Iterable[int]) -> None:
        """Assign each blob to a peer that has it, if any. Divide the other blobs between two peers: one may be slow.

        With ``seed_only``, the seed gets the other blobs.
        """
        owners = self._owners(blobs)
        missing = [blob for blob in blobs if blob not in owners and not self.seed_only]
        shares = self._share(missing, 2)
        lacking = sum(bool(peer.lacks) for peer in self._peers.values())
        # A single fetcher sends one half of the image to each of the two other peers, which exchange the halves.
        if lacking == 3 and not self._is_even(shares):
            shares = self._share(missing, 1)
        for blob in sorted(blobs, key=self._largest_first):
            self.add(owners.get(blob, shares.get(blob, SEED)), [blob])
        self._seed_wanted_at = None

    def _largest_first(self, blob: int) -> tuple[int, int]:
        return -self._sizes[blob], blob

    def _share(self, blobs: Iterable[int], fetchers: int) -> dict[int, int]:
        """Map each blob to a peer that lacks it. Choose only ``fetchers`` different peers, if possible."""

        def candidates(blob: int, loads: Mapping[int, int]) -> list[int]:
            lacking = [node for node, peer in self._peers.items() if blob in peer.lacks]
            chosen = [node for node in lacking if node in loads]
            if len(loads) < fetchers or not chosen:
                chosen += [node for node in lacking if node not in loads][:1]
            return chosen

        return self._spread(blobs, candidates)

    def _owners(self, blobs: Iterable[int]) -> dict[int, int]:
        """Map each blob to a peer that has it. Omit blobs that no peer has."""
        return self._spread(blobs, lambda blob, loads: [node for node, peer in self._peers.items() if blob in peer.has])

    def _spread(
        self, blobs: Iterable[int], candidates: Callable[[int, Mapping[int, int]], list[int]]
    ) -> dict[int, int]:
        """Map each blob to one of its candidates. Give all chosen peers about the same number of bytes."""
        loads: dict[int, int] = {}
        chosen: dict[int, int] = {}
        for blob in sorted(blobs, key=self._largest_first):
            if nodes := candidates(blob, loads):
                chosen[blob] = node = min(nodes, key=lambda node: loads.get(node, 0))
                loads[node] = loads.get(node, 0) + self._sizes[blob]
        return chosen

    def _is_even(self, shares: Mapping[int, int]) -> bool:
        """Check that no fetcher would upload much more than the image's size, if it sends its blobs to two peers."""
        loads = dict.fromkeys(shares.values(), 0)
        for blob, node in shares.items():
            loads[node] += self._sizes[blob]
        return 2 * max(loads.values(), default=0) <= MAX_UPLOAD * sum(loads.values())

    def add(self, node: int, blobs: Collection[int]) -> None:
        """Have a peer fetch more blobs for all peers."""
        self._by_blob.update(dict.fromkeys(blobs, node))
        self._notify(node)

    def add_alone(self, node: int, blobs: Collection[int]) -> None:
        """Have a peer fetch more blobs for itself only."""
        self._peers[node].alone |= set(blobs)
        self._notify(node)

    def _notify(self, node: int) -> None:
        if node != SEED or self.seed:
            peer = self.peer(node)
            peer.asked_at, peer.received_before, peer.rate = self.now, peer.received, 0.0
            self.changed[node] = None

    def replace(self, node: int) -> None:
        """Reassign the blobs of a fetcher, except blobs that no peer lacks. The fetcher may have left."""
        for blob in self.shared_by(node):
            del self._by_blob[blob]
            if any(blob in peer.lacks for peer in self._peers.values()):
                self._reassign(blob)
        if node in self._peers:
            self._notify(node)

    def _reassign(self, blob: int) -> None:
        """Assign a blob to a peer, or to the seed if no peer may fetch it or MAX_TRIES peers have failed to fetch it.

        Order of preference: reachable peers; peers that have the blob; the peer that has received the most bytes.
        """
        candidates = [node for node, peer in self._peers.items() if self._may_fetch(peer, blob)]
        tries = sum(blob in peer.failed for peer in self._peers.values())
        if not candidates or tries >= MAX_TRIES:
            self.add(SEED, [blob])
            return

        def rank(node: int) -> tuple[bool, bool, int]:
            peer = self._peers[node]
            has_it = blob in peer.has or peer.done and blob in peer.lacks
            return not self.is_unreachable(node), has_it, peer.received

        self.add(max(candidates, key=rank), [blob])

    def _may_fetch(self, peer: PeerState, blob: int) -> bool:
        can = blob in peer.has if self.seed_only else peer.handles(blob)
        return can and blob not in peer.failed and not (peer.stalled or peer.left_at)

    def failed(self, node: int, failed: Failed) -> None:
        """Reassign the blobs that a peer could not fetch."""
        peer = self._peers[node]
        peer.failed |= set(failed.blobs)
        peer.alone -= set(failed.blobs)
        self.last_failure = failed
        for blob in failed.blobs:
            if self._by_blob.get(blob, node) == node:
                self._reassign(blob)
        self._notify(node)

    # -- slow fetchers

    def compare(self, node: int) -> None:
        """If a fetcher is slow, give its blobs to the fastest fetcher."""
        blobs, peer = self._lacked_by(node), self.peer(node)
        if not blobs:
            return
        if not peer.unfetched and not peer.rate and self.now >= peer.asked_at + MIN_WORK_S:
            peer.rate = self._rate(peer)
        fetchers = {other: self.peer(other) for other in self.nodes if other != SEED or self.seed}
        rates = {other: self._rate(fetcher) for other, fetcher in fetchers.items() if self._can_compare(fetcher)}
        if not peer.unfetched or node not in rates:
            return
        best = max(rates, key=rates.__getitem__)
        lag = (rates[best] - rates[node]) * (self.now - peer.asked_at)
        if rates[node] < SLOW * rates[best] and lag >= max(MIN_LAG_BYTES, self.size // MIN_LAG_PART):
            self.add(best, blobs)
            self._notify(node)

    def _can_compare(self, peer: PeerState) -> bool:
        return not peer.left_at and bool(peer.rate or self.now >= peer.asked_at + COMPARE_AFTER_S)

    def _rate(self, peer: PeerState) -> float:
        """Return the bytes a second that a fetcher has received since it was asked to fetch.

        Bytes from other peers count too: they share the fetcher's network connection with the bytes from the registry.
        """
        return peer.rate or (peer.received - peer.received_before) / (self.now - peer.asked_at)

    def _lacked_by(self, node: int) -> list[int]:
        """Return the blobs assigned to a fetcher, except blobs that it had when it joined."""
        return [blob for blob in self.shared_by(node) if blob not in self.peer(node).has]

    # -- unreachable fetchers

    def is_unreachable(self, node: int) -> bool:
        """Check whether MAX_STRIKES children, or all other peers if they are fewer, have complained about a peer."""
        return len(self.peer(node).strikes) >= max(1, min(MAX_STRIKES, len(self._peers) - 1))

    def has_successor(self, fetcher: int) -> bool:
        """Check whether every blob of a fetcher may be fetched by another peer that is reachable.

        With ``seed_only``, the seed can always replace another fetcher.
        """
        if self.seed_only and fetcher != SEED:
            return True
        good = [node for node in self._peers if node != fetcher and not self.is_unreachable(node)]
        return all(any(self._may_fetch(self._peers[node], blob) for node in good) for blob in self.shared_by(fetcher))

    # -- the seed

    @property
    def wants_seed(self) -> bool:
        return self._seed_wanted_at is not None

    def check_seed(self) -> bool:
        """Request a seed if a fetcher gets no bytes from the registry, or if a blob is assigned to a missing seed.

        Return True if the seed has not joined in time and no other peer can fetch its blobs.
        """
        is_missing = SEED in self and self.seed is None
        if self._seed_wanted_at is None:
            if is_missing or any(self._is_silent(fetcher) for fetcher in self.nodes):
                self._seed_wanted_at = self.now
        elif is_missing and (self._seed_is_bad or self.now >= self._seed_wanted_at + 2 * SEED_AFTER_S):
            self._seed_is_bad = True
            self.replace(SEED)
            return SEED in self
        return False

    def _is_silent(self, fetcher: int) -> bool:
        """Check whether a fetcher has got no byte from the registry in SEED_AFTER_S."""
        peer = self._peers.get(fetcher)
        if peer is None or peer.fetched or peer.done or not self._lacked_by(fetcher):
            return False
        return self.now >= peer.asked_at + SEED_AFTER_S

    def seed_joined(self, joined: Joined) -> None:
        """Give the seed the blobs of the fetchers that have received nothing from the registry."""
        self.seed = PeerState(joined.address, frozenset(), frozenset(joined.has), joined.name, done=True)
        silent = [fetcher for fetcher in self.nodes if self._is_silent(fetcher)]
        self.add(SEED, [blob for fetcher in silent for blob in self.shared_by(fetcher)])
        for fetcher in silent:
            self._notify(fetcher)

    def lose_seed(self) -> None:
        """Reassign the blobs of the seed, which has left or cannot fetch them."""
        self.seed, self._seed_is_bad = None, True
        self.changed.pop(SEED, None)
        self.replace(SEED)
