"""Who gets which blob from the registry: decisions of the tracker, without sockets and clocks as the rest of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from enroot_py.features.swarm.messages import SEED, Address, Failed, Joined

TRIES = 3  # nodes that cannot get a blob from the registry, until nobody is asked to any more
STRIKES = 3  # children that complain of a node until nobody takes from it any more
PATIENCE = 2.0  # seconds until fetchers are compared
EVEN = 1.3  # times one image, that one of two fetchers may give
SHORTEST = 0.5  # seconds of work by which one who has done it is compared
SLOW = 0.5  # of the rate of others: who is below that is slow
BEHIND = 8 << 20  # bytes less than it would have had then, from which on it may be: for less nobody asks again
PART = 4  # of all bytes as many
SILENT = 5.0  # seconds without a byte of the registry until the seed is asked


@dataclass(slots=True)
class Member:
    """A node, or the seed, as the tracker knows it."""

    address: Address
    lacks: frozenset[int]
    has: frozenset[int]  # whole, before it came
    name: str
    alone: frozenset[int] = frozenset()  # blobs that it fetches for itself
    relays: bool = False
    done: bool = False
    got: tuple[int, ...] = ()
    fetched: int = 0
    unfetched: int = 0
    asked: float = 0.0  # since when it fetches what it does now
    before: int = 0  # bytes that it had taken in then
    rate: float = 0.0  # bytes a second of it, when all has come
    heard: float = 0.0
    stalled: bool = False  # it has said nothing for long
    left: float = 0.0  # since when it is gone, though what it has sent may still come
    failed: set[int] = field(default_factory=set)  # blobs that it could not fetch
    refused: set[int] = field(default_factory=set)  # parents that it could not take from
    strikes: set[int] = field(default_factory=set)  # children that could not take from it

    @property
    def total(self) -> int:
        return sum(self.got)

    @property
    def taken(self) -> int:
        """Bytes that have come, from wherever."""
        return self.total + self.fetched

    def takes(self, blob: int) -> bool:
        """Whether a blob goes through it, or ends or begins there."""
        return self.relays or blob in self.lacks or blob in self.has


class Fetchers:
    """The nodes that fetch for all. Those that are to be told so are in ``changed``, until somebody clears it."""

    def __init__(self, sizes: Sequence[int], members: Mapping[int, Member], of_seed: bool) -> None:
        """``of_seed``: there is no registry, and who has no blob cannot fetch it."""
        self.now = 0.0
        self.changed: dict[int, None] = {}
        self.seed: Member | None = None
        self.why = Failed((), False, "")  # the last reason why one could not
        self._sizes = sizes
        self._members = members
        self.of_seed = of_seed
        self._by_blob: dict[int, int] = {}
        self._seed_is_bad = False
        self._since: float | None = None  # when a seed was wanted

    def __contains__(self, node: int) -> bool:
        return node in self._by_blob.values()

    @property
    def nodes(self) -> list[int]:
        return list(dict.fromkeys(self._by_blob.values()))

    @property
    def blobs(self) -> tuple[int, ...]:
        """Those that go round."""
        return tuple(sorted(self._by_blob))

    @property
    def goes_round(self) -> int:
        """Bytes of those."""
        return sum(self._sizes[blob] for blob in self._by_blob)

    def blobs_of(self, node: int) -> tuple[int, ...]:
        """What a node fetches for others."""
        return tuple(sorted(blob for blob, fetcher in self._by_blob.items() if fetcher == node))

    def all_of(self, node: int) -> tuple[int, ...]:
        """What a node fetches, for others and for itself."""
        return tuple(sorted(self.member(node).alone.union(self.blobs_of(node))))

    def member(self, node: int) -> Member:
        return self.seed if node == SEED and self.seed else self._members[node]

    def clear(self) -> None:
        self._by_blob.clear()
        self.changed.clear()
        self._since = None

    # -- who fetches

    def choose(self, blobs: Iterable[int]) -> None:
        """Those who have a blob; else two nodes that share the work, so that none of them has to be a fast one."""
        gives = self._givers(blobs)
        asked = [blob for blob in blobs if blob not in gives and not self.of_seed]
        shares = self._share(asked, 2)
        lacking = sum(bool(member.lacks) for member in self._members.values())
        if lacking == 3 and not self._is_even(shares):  # two others halve what one has to give
            shares = self._share(asked, 1)
        for blob in sorted(blobs, key=self._largest_first):
            self.add(gives.get(blob, shares.get(blob, SEED)), [blob])
        self._since = None

    def _largest_first(self, blob: int) -> tuple[int, int]:
        return -self._sizes[blob], blob

    def _share(self, blobs: Iterable[int], several: int) -> dict[int, int]:
        """By blob a node that fetches it, each of ``several`` with about as much to fetch as the others."""
        loads: dict[int, int] = {}
        shares: dict[int, int] = {}
        for blob in sorted(blobs, key=self._largest_first):
            lacking = [node for node, member in self._members.items() if blob in member.lacks]
            able = [node for node in lacking if node in loads]
            if len(loads) < several or not able:
                able += [node for node in lacking if node not in loads][:1]
            shares[blob] = min(able, key=lambda node: loads.get(node, 0))
            loads[shares[blob]] = loads.get(shares[blob], 0) + self._sizes[blob]
        return shares

    def _is_even(self, shares: Mapping[int, int]) -> bool:
        """Whether no node would give two others more than about one image."""
        loads = dict.fromkeys(shares.values(), 0)
        for blob, node in shares.items():
            loads[node] += self._sizes[blob]
        return 2 * max(loads.values(), default=0) <= EVEN * sum(loads.values())

    def _givers(self, blobs: Iterable[int]) -> dict[int, int]:
        """By blob somebody who has it, each of them with about as much to give as the others."""
        loads = {node: 0 for node, member in self._members.items() if member.has}
        givers: dict[int, int] = {}
        for blob in sorted(blobs, key=self._largest_first):
            if able := [node for node in loads if blob in self._members[node].has]:
                givers[blob] = min(able, key=loads.__getitem__)
                loads[givers[blob]] += self._sizes[blob]
        return givers

    def add(self, node: int, blobs: Collection[int]) -> None:
        """Let a node fetch some blobs beside those that it fetches already."""
        self._by_blob.update(dict.fromkeys(blobs, node))
        self._tell(node)

    def add_alone(self, node: int, blobs: Collection[int]) -> None:
        """Let a node fetch some blobs for itself."""
        self._members[node].alone |= set(blobs)
        self._tell(node)

    def _tell(self, node: int) -> None:
        if node != SEED or self.seed:
            member = self.member(node)
            member.asked, member.before, member.rate = self.now, member.taken, 0.0
            self.changed[node] = None

    def replace(self, node: int) -> None:
        """Let others go on with what a node has not finished, which may be gone."""
        for blob in self.blobs_of(node):
            del self._by_blob[blob]
            if any(blob in member.lacks for member in self._members.values()):
                self._find(blob)
        if node in self._members:
            self._tell(node)

    def _find(self, blob: int) -> None:
        """Let the one with the most bytes fetch a blob, of those that it goes through and who have not failed to.

        Where some have failed, it is left to the seed.
        """
        takers = [node for node, member in self._members.items() if self._may(member, blob)]
        tries = sum(blob in member.failed for member in self._members.values())
        if not takers or tries >= TRIES:
            self.add(SEED, [blob])
            return

        def rank(node: int) -> tuple[bool, bool, int]:
            member = self._members[node]
            has_it = blob in member.has or member.done and blob in member.lacks
            return not self.is_shunned(node), has_it, member.taken

        self.add(max(takers, key=rank), [blob])

    def _may(self, member: Member, blob: int) -> bool:
        can = blob in member.has if self.of_seed else member.takes(blob)
        return can and blob not in member.failed and not (member.stalled or member.left)

    def failed(self, node: int, failed: Failed) -> None:
        """Let another one try what a node could not fetch."""
        member = self._members[node]
        member.failed |= set(failed.blobs)
        member.alone -= set(failed.blobs)
        self.why = failed
        for blob in failed.blobs:
            if self._by_blob.get(blob, node) == node:
                self._find(blob)
        self._tell(node)

    def compare(self, node: int) -> None:
        """Let another one have the work of a fetcher that is slow."""
        own, slow = self._fetched_by(node), self.member(node)
        if not own:
            return
        if not slow.unfetched and not slow.rate and self.now >= slow.asked + SHORTEST:
            slow.rate = self._rate(slow)
        members = {other: self.member(other) for other in self.nodes if other != SEED or self.seed}
        rates = {other: self._rate(member) for other, member in members.items() if self._can_compare(member)}
        if not slow.unfetched or node not in rates:
            return
        best = max(rates, key=rates.__getitem__)
        behind = (rates[best] - rates[node]) * (self.now - slow.asked)
        least = max(BEHIND, self.goes_round // PART)
        if rates[node] < SLOW * rates[best] and behind >= least:
            self.add(best, own)
            self._tell(node)

    def _can_compare(self, member: Member) -> bool:
        return not member.left and bool(member.rate or self.now >= member.asked + PATIENCE)

    def _rate(self, member: Member) -> float:
        """Bytes a second that it takes in, since it has this work.

        From other nodes too: where its link is full of what another source gives, the registry has to wait.
        """
        return member.rate or (member.taken - member.before) / (self.now - member.asked)

    def _fetched_by(self, node: int) -> list[int]:
        """What it does not give of its own."""
        return [blob for blob in self.blobs_of(node) if blob not in self.member(node).has]

    # -- whom the others do not reach

    def is_shunned(self, node: int) -> bool:
        """Whether some of the others cannot take from a node."""
        return len(self.member(node).strikes) >= max(1, min(STRIKES, len(self._members) - 1))

    def has_successor(self, fetcher: int) -> bool:
        """Whether somebody whom the others reach may fetch each blob of a node."""
        if self.of_seed and fetcher != SEED:
            return True
        good = [node for node in self._members if node != fetcher and not self.is_shunned(node)]
        return all(any(self._may(self._members[node], blob) for node in good) for blob in self.blobs_of(fetcher))

    # -- when nobody reaches the registry

    @property
    def wants_seed(self) -> bool:
        return self._since is not None

    def look_for_seed(self) -> bool:
        """Ask for a seed where fetchers have nothing after a while; whether blobs that it should have are hopeless."""
        is_missing = SEED in self and self.seed is None
        if self._since is None:
            if is_missing or any(self._is_silent(fetcher) for fetcher in self.nodes):
                self._since = self.now
        elif is_missing and (self._seed_is_bad or self.now >= self._since + 2 * SILENT):
            self._seed_is_bad = True
            self.replace(SEED)
            return SEED in self
        return False

    def _is_silent(self, fetcher: int) -> bool:
        member = self._members.get(fetcher)
        if member is None or member.fetched or member.done or not self._fetched_by(fetcher):
            return False
        return self.now >= member.asked + SILENT

    def has_seed(self, joined: Joined) -> None:
        """There is a seed: it gets what is left to it, and what nothing has come of."""
        self.seed = Member(joined.address, frozenset(), frozenset(joined.has), joined.name, done=True)
        silent = [fetcher for fetcher in self.nodes if self._is_silent(fetcher)]
        self.add(SEED, [blob for fetcher in silent for blob in self.blobs_of(fetcher)])
        for fetcher in silent:
            self._tell(fetcher)

    def lose_seed(self) -> None:
        """The seed is gone, or of no use."""
        self.seed, self._seed_is_bad = None, True
        self.changed.pop(SEED, None)
        self.replace(SEED)
