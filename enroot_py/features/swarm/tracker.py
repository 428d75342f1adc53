"""The decisions of a swarm's tracker: who fetches a blob from the registry, and who takes it from whom.

Neither sockets nor clocks: what happens goes in with its time, and what is to be said to peers comes out. The same code
runs in srun and in benchmarks/swarm.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from enroot_py.features.swarm import trees
from enroot_py.features.swarm.fetchers import SLOW, STRIKES, Fetchers, Member
from enroot_py.features.swarm.messages import (
    REPORT,
    SEED,
    Complaint,
    Failed,
    FetchBlobs,
    FromPeer,
    FromTracker,
    Hopeless,
    Joined,
    Link,
    Released,
    Report,
    Routes,
    Standing,
    report_every,
)
from enroot_py.features.swarm.trees import SOURCES, BlobTree, Forest

GATHER = 0.5  # seconds from the first peer to the plan, if not all are there before
GROWN = 8  # a new plan is made where one node for each so many of the old one has come later,
EARLY = 3  # and where nobody has more than one in so many of all bytes: he would wait for those
LINGER = 30.0  # seconds that all who are there stay for late ones, when they lack nothing any more
DEAF = 2.0  # seconds, and three reports, without a word, until nobody depends on a node
DRAIN = 3.0  # seconds for which what a node has sent may be on its way, when it has left

Said = list[tuple[int, FromTracker]]


class Tracker:
    """The state of one swarm: ``sizes`` are those of the blobs, by position in the manifest, ``nodes`` the step's.

    Those that are ``ready`` have them all. Where it is ``of_seed``, nobody else has them but the seed.
    """

    def __init__(self, sizes: Sequence[int], nodes: int, ready: Iterable[int] = (), of_seed: bool = False) -> None:
        self._sizes = sizes
        self._nodes = nodes
        self._members: dict[int, Member] = {}
        self._fetchers = Fetchers(sizes, self._members, of_seed)
        self._forest: Forest | None = None  # not planned yet
        self._now = 0.0
        self._first = 0.0  # when the first peer joined
        self._planned = 0  # peers that are part of the plan
        self._late: list[float] = []  # when each of the others joined
        self._idle = 0.0  # since when nobody lacks anything
        self._looked = 0.0  # for who has stalled
        self._ready = set(ready)  # also of those that have been released, or have left
        self._fetched: dict[int, int] = {}
        self._rerouted: dict[int, set[int]] = {}  # whom to tell of new parents: the trees, by node
        self._said: Said = []

    # -- what happens: each returns what to say to whom

    def handle(self, now: float, node: int, message: FromPeer) -> Said:
        """A peer has said something. Raises ValueError for what no member of this swarm would say."""
        self._clock(now)
        self._check(node, message)
        if node in self._members:
            self._members[node].heard, self._members[node].stalled = now, False
        if node == SEED:
            self._hear_seed(message)
        elif isinstance(message, Joined):
            self._forget(node)  # it has left before
            self._join(node, message)
        elif (member := self._members.get(node)) is None:
            pass  # it was released
        elif isinstance(message, Failed):
            self._failed(node, member, message)
        elif len(message.got) == (len(self._forest.trees) if self._forest else 0):  # else it knows another plan
            member.got = message.got
            if isinstance(message, Report):
                self._report(node, member, message)
            else:
                self._judge(node, member, message)
        return self._take()

    def left(self, now: float, node: int) -> Said:
        """A peer is gone, for whatever reason."""
        self._clock(now)
        member = self._members.get(node)
        if node == SEED:
            self._fetchers.lose_seed()
        elif member and member.lacks and member.done and self._forest:
            member.left = now  # its kernel may still send, tcp(7): those who take from it say when that ends
            if not any(map(self._hears, self._members)):
                self._end()
        else:
            self._forget(node)
        return self._take()

    def tick(self, now: float) -> Said:
        """To be called now and then, some times in a second."""
        self._clock(now)
        if self._forest and self._fetchers.look_for_seed():
            self._give_up(self._fetchers.why)
        if self._forest and now >= self._looked + 1:
            if now > self._looked + DEAF:  # this process was stopped itself
                for member in self._members.values():
                    member.heard = now
            self._looked = now
            self._find_stalled()
            for node in [node for node, member in self._members.items() if member.left and now > member.left + DRAIN]:
                self._forget(node)
        if self._has_grown():
            self._plan_anew()
        if self._members and not self._forest:
            if len(self._members) == self._nodes or now >= self._first + GATHER:
                self._plan()
        elif not self._members:
            self._end()
        elif not self._all_done():
            self._idle = now
        elif len(self._members) == self._nodes or now >= self._idle + LINGER:
            self._said += [(node, Released()) for node in filter(self._hears, self._members)]
            self._end()
        return self._take()

    def _clock(self, now: float) -> None:
        self._now = self._fetchers.now = now

    def _end(self) -> None:
        """Begin anew with those that come later still."""
        self._members.clear()
        self._fetchers.clear()
        self._rerouted.clear()
        self._forest, self._late = None, []

    def _check(self, node: int, message: FromPeer) -> None:
        if isinstance(message, Joined) and node in self._members and not self._members[node].left:
            raise ValueError(f"node {node} is there already")
        blobs = message.lacks if isinstance(message, Joined) else getattr(message, "blobs", ())
        blobs += message.has if isinstance(message, Joined) else ()
        if not all(blob < len(self._sizes) for blob in blobs):
            raise ValueError("a blob that is not there")

    def _all_done(self) -> bool:
        """Whether nobody lacks anything but those who say nothing any more."""
        members = self._members.values()
        return all(member.done or member.stalled for member in members) and any(member.done for member in members)

    # -- what others may know

    @property
    def wants_seed(self) -> bool:
        """Whether a peer on this host should join, as SEED."""
        return self._fetchers.wants_seed

    @property
    def all_have_it(self) -> bool:
        """Whether each node of the step has come and lacks nothing any more."""
        return len(self._ready) == self._nodes

    def progress(self) -> Standing:
        """How far the nodes are."""
        slowest, part = "", 1.0
        for node, member in self._members.items():
            wanted = sum(self._sizes[blob] for blob in (self._fetchers.blobs if member.relays else member.lacks))
            has = min(1.0, (member.total + member.fetched) / wanted) if wanted else 1.0
            if node not in self._ready and has <= part:
                slowest, part = member.name, has
        come = len(self._ready | self._members.keys())
        return Standing(come, len(self._ready), slowest, part, sum(self._fetched.values()))

    # -- what is to be said

    def _reroute(self, node: int, *number: int) -> None:
        """A peer has other parents in some trees, or there are other blobs."""
        self._rerouted.setdefault(node, set()).update(number)

    def _take(self) -> Said:
        """What has changed since it was said."""
        said, self._said = self._said, []
        if self._fetchers.changed:
            changed = filter(self._hears, self._fetchers.changed)
            said += [(node, FetchBlobs(self._fetchers.all_of(node))) for node in changed]
            for tree in self._forest.trees if self._forest else ():
                for top in tree.tops:
                    self._reroute(top, tree.number)
            self._fetchers.changed.clear()
        if self._forest:
            rerouted = filter(self._hears, self._rerouted)
            said += [(node, self._routes(node, self._rerouted[node])) for node in rerouted]
            self._rerouted.clear()
        return said

    def _hears(self, node: int) -> bool:
        """Whether a node is there, and has not left."""
        return node in self and not self._fetchers.member(node).left

    def __contains__(self, node: int) -> bool:
        return node in self._members or node == SEED and self._fetchers.seed is not None

    def _routes(self, node: int, numbers: set[int]) -> Routes:
        """Whom a peer takes from, in some of the trees."""
        assert self._forest
        links: list[Link] = []
        for number in sorted(numbers):
            parent = self._forest.trees[number].parent.get(node)
            if parent is None:
                continue  # it lacks nothing
            if parent != SOURCES:
                links.append(Link(number, parent, self._members[parent].address))
                continue
            for fetcher in self._fetchers.nodes:
                if fetcher != node and fetcher in self:
                    address = self._fetchers.member(fetcher).address
                    links.append(Link(number, fetcher, address, self._fetchers.blobs_of(fetcher)))
        relays = node in self._forest.loads
        return Routes(len(self._forest.trees), self._fetchers.blobs, relays, tuple(links))

    # -- the plan

    def _join(self, node: int, joined: Joined) -> None:
        lacks = frozenset(joined.lacks)
        member = Member(joined.address, lacks, frozenset(joined.has), joined.name, heard=self._now, done=not lacks)
        self._members[node] = member
        if member.done:
            self._ready.add(node)
        if not self._forest:
            self._first = self._now if len(self._members) == 1 else self._first
            return
        if new := lacks.difference(self._fetchers.blobs):  # those who were there had them
            self._fetchers.add(node, new)
            for other in self._members:
                self._reroute(other)
        self._reroute(node)
        if member.done:
            return
        self._late.append(self._now)
        member.relays = self._is_relay(member)
        if member.relays:
            self._forest.add(node)
        for tree in self._forest.trees:
            self._place(tree, [node])

    def _plan(self) -> None:
        """Choose who fetches, and build the trees of those that are there."""
        self._fetchers.choose(set().union(*(member.lacks for member in self._members.values())))
        fetchers = sum(node in self._members for node in self._fetchers.nodes)
        self._forest = self._grow(trees.count(self._nodes - fetchers))  # as many relays as there may be
        for node in self._members:
            self._reroute(node, *range(len(self._forest.trees)))
        self._idle = self._looked = self._now
        if self._fetchers.seed:
            self._reroute(SEED)

    def _grow(self, number: int) -> Forest:
        """So many trees of those that are there, in which each gives about as much as the others."""
        lacking = {node: member for node, member in self._members.items() if member.lacks}
        relays: list[int] = []
        leaves: list[int] = []
        for node, member in lacking.items():
            member.relays = self._is_relay(member)
            (relays if member.relays and node not in self._fetchers else leaves).append(node)
        self._planned, self._late = len(lacking), []
        if len(relays) == 1:  # others would have all from that one, however slow it is: only those who come later may
            forest = Forest(number, (), list(lacking))
            forest.add(relays[0])
            return forest
        return Forest(number, relays, leaves)

    def _has_grown(self) -> bool:
        """Whether so many have come since the plan that those who are part of it would give too much.

        While others come, only when there are twice as many: of thousands, each plan costs seconds of a processor. And
        only while there is much to come, and nobody has been found whom others cannot take from.
        """
        if not self._forest or not self._late or GROWN * len(self._late) < self._planned:
            return False
        settled = len(self._members) == self._nodes or self._now >= self._late[-1] + GATHER
        if not settled and len(self._late) < self._planned:
            return False
        members = self._members.values()
        if any(member.refused or member.strikes or member.stalled or member.left for member in members):
            return False
        return EARLY * max((member.taken for member in members), default=0) <= self._fetchers.goes_round

    def _plan_anew(self) -> None:
        """Have those relay too who have come since the plan; who takes from the same as before goes on."""
        assert self._forest
        before, self._forest = self._forest, self._grow(len(self._forest.trees))
        for old, new in zip(before.trees, self._forest.trees, strict=True):
            for node, parent in new.parent.items():
                if old.parent.get(node) != parent:
                    self._reroute(node, new.number)
        for node in before.loads.keys() ^ self._forest.loads.keys():
            self._reroute(node)

    def _is_relay(self, member: Member) -> bool:
        """Whether it lacks enough of what goes round to take all of it."""
        return 2 * sum(self._sizes[blob] for blob in member.lacks) >= self._fetchers.goes_round

    def _report(self, node: int, member: Member, report: Report) -> None:
        member.done, member.fetched, member.unfetched = report.done, report.fetched, report.unfetched
        self._fetched[node] = report.fetched
        if report.done:
            self._ready.add(node)
        self._fetchers.compare(node)

    def _hear_seed(self, message: FromPeer) -> None:
        if isinstance(message, Joined):
            self._fetchers.has_seed(message)
            self._reroute(SEED)
        elif isinstance(message, Report):
            self._fetched[SEED] = message.fetched
            if self._fetchers.seed:
                self._fetchers.seed.fetched = message.fetched
        elif isinstance(message, Failed):
            self._fetchers.why = message
            self._fetchers.lose_seed()
            if message.refused:
                self._give_up(message)

    # -- when something goes wrong

    def _forget(self, node: int) -> None:
        if self._members.pop(node, None) is not None and self._forest:
            for tree in self._forest.trees:
                self._forest.detach(tree, node)
            self._fetchers.replace(node)
            self._retire(node)

    def _find_stalled(self) -> None:
        """Depend no more on nodes that are stopped, or hang, though their kernel answers."""
        assert self._forest
        usual = report_every(self._nodes)
        every = dict.fromkeys(self._fetchers.nodes, REPORT)
        for node, member in self._members.items():
            longest = DEAF + 3 * every.get(node, usual)
            if not member.stalled and self._now > max(member.heard, member.asked) + longest:
                member.stalled = True
                if node in every:
                    self._replace(node)
                self._retire(node)

    def _failed(self, node: int, member: Member, failed: Failed) -> None:
        """Let another node try, unless the registry refuses what this node was asked to fetch."""
        if not self._forest:
            member.failed |= set(failed.blobs)  # nobody was asked to fetch anything
            return
        if failed.refused and failed.blobs and set(failed.blobs) <= set(self._fetchers.all_of(node)):
            self._give_up(failed)
            return
        was_alone = not member.alone.isdisjoint(failed.blobs)
        self._fetchers.failed(node, failed)
        if was_alone:
            self._reroute(node, *range(len(self._forest.trees)))

    def _give_up(self, failed: Failed) -> None:
        """Tell all that nobody gets the image from others, and one of them why."""
        members = self._members
        lacking = sorted(filter(self._hears, members), key=lambda node: members[node].done or members[node].stalled)
        for number, node in enumerate(lacking):
            reason, hint = ("", "") if number else (failed.reason, failed.hint)
            self._said.append((node, Hopeless(failed.refused, reason, hint)))
        self._end()

    def _replace(self, fetcher: int) -> None:
        """Let others fetch what one does, who takes it from them."""
        assert self._forest
        self._fetchers.replace(fetcher)
        self._reroute(fetcher, *range(len(self._forest.trees)))

    def _judge(self, node: int, member: Member, complaint: Complaint) -> None:
        """Who is to blame that nothing comes by a tree: the parent, the way from there, or somebody further up."""
        number, blamed = complaint.tree, complaint.parent
        if self._forest is None or blamed not in self or number >= len(self._forest.trees):
            return  # it is dead, which others have been told
        parent, tree = self._fetchers.member(blamed), self._forest.trees[number]
        if parent.left:
            self._forget(blamed)
            return
        if blamed in self._fetchers and tree.parent.get(node) == SOURCES:
            if not complaint.reached:
                self._avoid_fetcher(node, member, blamed, tree)
            return
        if tree.parent.get(node) != blamed:
            return  # it has another one by now
        if complaint.reached and (not parent.got or parent.got[number] <= member.got[number]):
            if not self._is_slow(parent):
                return  # it waits itself, and complains itself
            parent.strikes |= set(range(-STRIKES, 0))
        member.refused.add(blamed)
        parent.strikes.add(node)
        if len(parent.strikes) >= STRIKES:
            self._retire(blamed)
        else:
            self._forest.detach(tree, node)
            self._place(tree, [node])

    def _avoid_fetcher(self, node: int, member: Member, fetcher: int, tree: BlobTree) -> None:
        """A top cannot reach one: nor can others, or somebody else can be the top, or it fetches for itself."""
        assert self._forest
        member.refused.add(fetcher)
        self._fetchers.member(fetcher).strikes.add(node)
        if self._fetchers.is_shunned(fetcher) and self._fetchers.has_successor(fetcher):
            self._replace(fetcher)
            return
        if (parent := self._parent_of(tree, node)) == SOURCES:
            parent = self._other_top(member, tree)
        if parent != SOURCES:
            self._forest.detach(tree, node)
            self._attach(tree, node, parent)
            return
        blobs = [blob for blob in self._fetchers.blobs_of(fetcher) if member.takes(blob)]
        if not self._fetchers.of_seed and member.failed.isdisjoint(blobs):
            self._fetchers.add_alone(node, blobs)
        else:  # neither from there nor from the registry
            self._said.append((node, Hopeless(final=False)))
            self._forget(node)

    def _other_top(self, member: Member, tree: BlobTree) -> int:
        """Make somebody a top of a tree from whom a node may take, and who reaches all fetchers, as far as is known."""
        assert self._forest
        fetchers = self._fetchers.nodes
        for other in sorted(self._forest.loads, key=lambda relay: relay not in tree.children):
            reaches_all = other not in fetchers and self._members[other].refused.isdisjoint(fetchers)
            may = self._hears(other) and other not in member.refused
            if tree.parent.get(other) != SOURCES and reaches_all and may:
                self._forest.detach(tree, other)
                self._attach(tree, other, SOURCES)
                return other
        return SOURCES

    def _is_slow(self, member: Member) -> bool:
        totals = sorted(other.total for other in self._members.values() if other.lacks)
        return member.total < SLOW * totals[len(totals) // 2]

    def _retire(self, node: int) -> None:
        """Let a node relay no more: whoever takes from it gets another parent, and so does it where it was a top."""
        assert self._forest
        for tree, orphans in self._forest.retire(node):
            self._place(tree, orphans)
            if tree.parent.get(node) == SOURCES:
                self._forest.detach(tree, node)
                self._place(tree, [node])

    def _place(self, tree: BlobTree, orphans: Sequence[int]) -> None:
        """Find parents for nodes that have none; relays first, as others may go beneath them."""
        for orphan in sorted(orphans, key=lambda node: node not in tree.children):
            self._attach(tree, orphan, self._parent_of(tree, orphan))

    def _attach(self, tree: BlobTree, node: int, parent: int) -> None:
        assert self._forest
        self._forest.attach(tree, node, parent)
        self._reroute(node, tree.number)

    def _parent_of(self, tree: BlobTree, node: int) -> int:
        """Who is best for one of them."""
        assert self._forest
        member = self._members[node]
        got = member.got[tree.number] if member.got else 0

        def reaches(other: int) -> bool:
            its = self._members[other].got
            return not got or bool(its) and its[tree.number] >= got

        def may(other: int) -> bool:
            return other not in member.refused and self._hears(other)

        return self._forest.place(tree, node, may, reaches)
