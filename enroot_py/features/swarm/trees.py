"""The trees of a swarm: in each of them some nodes relay, which give what they take to others; the rest are its leaves.

As in SplitStream (Castro et al., SOSP 2003) a node relays in one tree and is a leaf of the others, so that everybody
gives about as much as he takes, and one who is slow or dies costs others a fraction of their stream for a moment.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence

SOURCES = -1  # the parent of a tree's top: whoever has the blobs from the registry
MOST = 32  # trees; each is a connection of every node
FAIR = 1.25  # times the average that a relay may have to give
_CHOICES = 5  # of a few at random the one with the fewest children is nearly as good as of all


class _Pool:
    """Nodes of which some can be drawn at no cost that grows with their number."""

    def __init__(self, nodes: Iterable[int] = ()) -> None:
        self._nodes = list(nodes)
        self._place = {node: place for place, node in enumerate(self._nodes)}

    def add(self, node: int) -> None:
        if node not in self._place:
            self._place[node] = len(self._nodes)
            self._nodes.append(node)

    def remove(self, node: int) -> None:
        """Where it is one of them, let the last one take its place."""
        if (place := self._place.pop(node, None)) is None:
            return
        last = self._nodes.pop()
        if last != node:
            self._nodes[place] = last
            self._place[last] = place

    def draw(self, by: random.Random) -> list[int]:
        """A few of them, or all of a few."""
        return self._nodes if len(self._nodes) <= _CHOICES else by.sample(self._nodes, _CHOICES)


def count(relays: int) -> int:
    """How many trees let each of so many relays give the least: where it is few, one tree for each."""
    if relays <= MOST:
        return max(relays, 1)
    return min(range(8, MOST + 1), key=lambda trees: (-(-(relays - 1) // (relays // trees)) / trees, trees))


class BlobTree:
    """Who takes from whom. A node is attached beneath the sources or, for a moment, beneath nobody."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.parent: dict[int, int] = {}
        self.children: dict[int, list[int]] = {}  # of relays
        self.relays = _Pool()  # who has children
        self.tops: set[int] = set()  # beneath the sources

    def is_beneath(self, node: int, other: int) -> bool:
        """Whether a node takes what the other one gives, or takes nothing."""
        while node in self.parent:
            node = self.parent[node]
            if node == other:
                return True
        return node != SOURCES


class Forest:
    """The trees of all nodes. ``loads`` are the children, over all trees, of those who may relay."""

    def __init__(self, trees: int, relays: Sequence[int], leaves: Sequence[int]) -> None:
        self.trees = [BlobTree(number) for number in range(trees)]
        self.loads = dict.fromkeys(relays, 0)
        self._load = 0  # of all
        self._relays = _Pool(relays)
        self._random = random.Random(trees)
        for number, tree in enumerate(self.trees):
            turn = number % max(len(relays), 1)
            own = relays[number::trees] or [*relays[turn:], *relays[:turn]]
            first = set(own)
            others = [node for node in relays if node not in first]
            self._build(tree, own, [*own, *others, *leaves])

    def _build(self, tree: BlobTree, relays: Sequence[int], nodes: Sequence[int]) -> None:
        """Attach nodes beneath relays, which are the first of them, each with as many children as the others."""
        each = -(-(len(nodes) - 1) // max(len(relays), 1))
        places = (relay for relay in relays for _ in range(each))
        for position, node in enumerate(nodes):
            self.attach(tree, node, next(places, SOURCES) if position else SOURCES)

    def add(self, relay: int) -> None:
        """Let one more node relay, which nobody takes from yet."""
        self.loads[relay] = 0
        self._relays.add(relay)

    def attach(self, tree: BlobTree, node: int, parent: int) -> None:
        tree.parent[node] = parent
        if parent == SOURCES:
            tree.tops.add(node)
        else:
            tree.children.setdefault(parent, []).append(node)
            tree.relays.add(parent)
            self.loads[parent] += 1
            self._load += 1

    def detach(self, tree: BlobTree, node: int) -> None:
        parent = tree.parent.pop(node, SOURCES)
        tree.tops.discard(node)
        if parent != SOURCES and parent in self.loads:
            tree.children[parent].remove(node)
            self.loads[parent] -= 1
            self._load -= 1

    def retire(self, node: int) -> list[tuple[BlobTree, list[int]]]:
        """Let a node relay no more: its children, by tree, which are beneath nobody now."""
        self._load -= self.loads.pop(node, 0)
        self._relays.remove(node)
        orphans = [(tree, tree.children.pop(node)) for tree in self.trees if node in tree.children]
        for tree, children in orphans:
            tree.relays.remove(node)
            for child in children:
                del tree.parent[child]
        return orphans

    def place(self, tree: BlobTree, node: int, may: Callable[[int], bool], reaches: Callable[[int], bool]) -> int:
        """The best parent for a node, of some that are drawn by lot; the sources, where there is none.

        Those come first that ``reaches`` as far as the node, then relays of this tree that give no more than is fair,
        then whoever gives the least.
        """
        fair = FAIR * self._load / max(len(self.loads), 1)

        def rank(other: int) -> tuple[bool, bool, int]:
            return not reaches(other), other not in tree.children or self.loads[other] > fair, self.loads[other]

        drawn = [*tree.relays.draw(self._random), *self._relays.draw(self._random)]
        gives = node in tree.children  # else nobody is beneath it
        candidates = [
            other for other in drawn if other != node and may(other) and not (gives and tree.is_beneath(other, node))
        ]
        return min(candidates, key=rank, default=SOURCES)
