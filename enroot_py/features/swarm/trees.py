"""The trees of a swarm. In each tree some nodes are relays, which upload downloaded pieces; the rest are leaves.

As in SplitStream (Castro et al., SOSP 2003), a node is normally a relay in one tree and a leaf in the others. So each
node uploads about as much as it downloads, and a slow or dead node delays only a fraction of the others' bytes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence

SOURCES = -1  # the parent of a tree's roots: the nodes that fetch from the registry
MAX_TREES = 32  # each tree costs every node a connection
FAIR_LOAD = 1.25  # avoid relays that have more than this many times the average number of children
_SAMPLE = 5  # relays in a random sample: its least loaded relay is nearly as good as the least loaded of all


class _Pool:
    """A set of nodes. A random sample takes constant time."""

    def __init__(self, nodes: Iterable[int] = ()) -> None:
        self._nodes = list(nodes)
        self._index = {node: index for index, node in enumerate(self._nodes)}

    def add(self, node: int) -> None:
        if node not in self._index:
            self._index[node] = len(self._nodes)
            self._nodes.append(node)

    def remove(self, node: int) -> None:
        """Remove a node, if present, and move the last node to the free index."""
        if (index := self._index.pop(node, None)) is None:
            return
        last = self._nodes.pop()
        if last != node:
            self._nodes[index] = last
            self._index[last] = index

    def sample(self, generator: random.Random) -> list[int]:
        return self._nodes if len(self._nodes) <= _SAMPLE else generator.sample(self._nodes, _SAMPLE)


def count(relays: int) -> int:
    """Return the number of trees that makes each of ``relays`` relays upload the least."""
    if relays <= MAX_TREES:
        return max(relays, 1)
    return min(range(8, MAX_TREES + 1), key=lambda trees: (-(-(relays - 1) // (relays // trees)) / trees, trees))


class BlobTree:
    """The parent of each node in one tree. A parent is a relay or SOURCES. An orphan has no parent for a moment."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.parent: dict[int, int] = {}
        self.children: dict[int, list[int]] = {}  # by relay
        self.relays = _Pool()  # nodes with children
        self.roots: set[int] = set()

    def is_beneath(self, node: int, other: int) -> bool:
        """Check whether ``other`` is an ancestor of a node, or the node has no path to the sources."""
        while node in self.parent:
            node = self.parent[node]
            if node == other:
                return True
        return node != SOURCES


class Forest:
    """All trees. ``loads`` counts the children of each relay in all trees."""

    def __init__(self, trees: int, relays: Sequence[int] = (), leaves: Sequence[int] = ()) -> None:
        self.trees = [BlobTree(number) for number in range(trees)]
        self.loads = dict.fromkeys(relays, 0)
        self._total_load = 0
        self._relays = _Pool(relays)
        self._random = random.Random(trees)
        for number, tree in enumerate(self.trees):
            turn = number % max(len(relays), 1)
            tree_relays = relays[number::trees] or [*relays[turn:], *relays[:turn]]
            relay_set = set(tree_relays)
            others = [node for node in relays if node not in relay_set]
            self._build(tree, tree_relays, [*tree_relays, *others, *leaves])

    def _build(self, tree: BlobTree, relays: Sequence[int], nodes: Sequence[int]) -> None:
        """Attach ``nodes``, the first of which are the ``relays``. All relays get about the same number of children."""
        each = -(-(len(nodes) - 1) // max(len(relays), 1))
        parents = (relay for relay in relays for _ in range(each))
        for position, node in enumerate(nodes):
            self.attach(tree, node, next(parents, SOURCES) if position else SOURCES)

    def add(self, relay: int) -> None:
        """Add a relay without children."""
        self.loads[relay] = 0
        self._relays.add(relay)

    def attach(self, tree: BlobTree, node: int, parent: int) -> None:
        tree.parent[node] = parent
        if parent == SOURCES:
            tree.roots.add(node)
        else:
            tree.children.setdefault(parent, []).append(node)
            tree.relays.add(parent)
            self.loads[parent] += 1
            self._total_load += 1

    def detach(self, tree: BlobTree, node: int) -> None:
        parent = tree.parent.pop(node, SOURCES)
        tree.roots.discard(node)
        if parent != SOURCES and parent in self.loads:
            tree.children[parent].remove(node)
            self.loads[parent] -= 1
            self._total_load -= 1

    def retire(self, node: int) -> list[tuple[BlobTree, list[int]]]:
        """Stop using a node as a relay. Return the orphaned children by tree."""
        self._total_load -= self.loads.pop(node, 0)
        self._relays.remove(node)
        orphans = [(tree, tree.children.pop(node)) for tree in self.trees if node in tree.children]
        for tree, children in orphans:
            tree.relays.remove(node)
            for child in children:
                del tree.parent[child]
        return orphans

    def best_parent(
        self, tree: BlobTree, node: int, may: Callable[[int], bool], is_ahead: Callable[[int], bool]
    ) -> int:
        """Return the best parent for a node among a random sample of the relays, or SOURCES if there is none.

        Order of preference: relays with at least as many bytes of the tree as the node (``is_ahead``); relays of this
        tree without an unfair load; relays with few children. Only relays for which ``may`` returns True are used.
        """
        fair = FAIR_LOAD * self._total_load / max(len(self.loads), 1)

        def rank(other: int) -> tuple[bool, bool, int]:
            return not is_ahead(other), other not in tree.children or self.loads[other] > fair, self.loads[other]

        sample = [*tree.relays.sample(self._random), *self._relays.sample(self._random)]
        has_children = node in tree.children  # otherwise no relay is beneath the node
        candidates = [
            other
            for other in sample
            if other != node and may(other) and not (has_children and tree.is_beneath(other, node))
        ]
        return min(candidates, key=rank, default=SOURCES)
