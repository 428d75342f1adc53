"""What the tracker of a swarm and its peers say to each other.

A node is known by its number within the step, a blob by its position in the manifest, which all have. A blob is cut
into pieces, and the pieces of all blobs go down the trees in turn: number P of any blob goes by tree P modulo the
number of trees.

The types of fields have the bounds of what may come from elsewhere; wire.py decodes by them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from enroot_py.features.swarm.trees import MOST


@dataclass(frozen=True, slots=True)
class Within:
    """A bound of a number, or of the length of anything else."""

    low: int
    high: int


class IpAddress:
    """A bound of a text that is not empty."""


Number = Annotated[int, Within(0, (1 << 63) - 1)]
Word = Annotated[int, Within(0, (1 << 32) - 1)]
Trees = Annotated[int, Within(1, MOST)]
Address = tuple[Annotated[str, IpAddress], Annotated[int, Within(1, 65535)]]  # a host that is "" is the tracker's
HostName = Annotated[str, Within(0, 64)]  # HOST_NAME_MAX, sysconf(3)
Blobs = tuple[Number, ...]
Bytes = tuple[Number, ...]  # by tree
SEED = 0xFFFFFFFE  # no node's number: a peer on the tracker's host, which lacks nothing and fetches where nobody can
REPORT = 1.0  # seconds from one report to the next, of who fetches


def report_every(nodes: int) -> float:
    """Seconds from one report to the next, of others: the tracker hears a thousand in a second."""
    return REPORT * max(1.0, nodes / 1000)


@dataclass(frozen=True, slots=True)
class Joined:
    """A peer, whose host has this name, listens at ``address``, lacks these blobs, and has some to give."""

    address: Address
    lacks: Blobs
    has: Blobs = ()
    name: HostName = ""


@dataclass(frozen=True, slots=True)
class Report:
    """Bytes that a peer has by each tree and from the registry, and whether it lacks nothing any more.

    ``unfetched`` are bytes that it has still to get from the registry, as it was told to.
    """

    got: Bytes
    fetched: Number = 0
    done: bool = False
    unfetched: Number = 0


@dataclass(frozen=True, slots=True)
class Complaint:
    """A peer cannot reach its parent in a tree, or nothing comes from there while it comes by other trees."""

    tree: Number
    parent: Number
    reached: bool
    got: Bytes


@dataclass(frozen=True, slots=True)
class Failed:
    """A peer cannot get these blobs from the registry, for this reason; ``refused``: nor could another one."""

    blobs: Blobs
    refused: bool
    reason: str
    hint: str = ""


FromPeer = Joined | Report | Complaint | Failed


@dataclass(frozen=True, slots=True)
class Standing:
    """How many nodes have come and have all that they want, how far the last of them is, and what it has cost."""

    come: int
    ready: int
    slowest: str  # its name
    part: float  # of what it wants
    fetched: int  # bytes from the registry


@dataclass(frozen=True, slots=True)
class Link:
    """Where a peer takes the pieces of a tree from: these blobs' pieces, or those of all."""

    tree: Number
    parent: Number
    address: Address
    blobs: Blobs = ()


@dataclass(frozen=True, slots=True)
class Routes:
    """The links of some trees, in place of those that a peer has for them, and the blobs that go down ``trees`` trees.

    A peer that relays takes all blobs, for others; one that does not takes those that it lacks.
    """

    trees: Trees
    blobs: Blobs
    relays: bool
    links: tuple[Link, ...]


@dataclass(frozen=True, slots=True)
class FetchBlobs:
    """Get these blobs and no other from the registry, and be their source."""

    blobs: Blobs


@dataclass(frozen=True, slots=True)
class Released:
    """Nobody needs this peer any more."""


@dataclass(frozen=True, slots=True)
class Hopeless:
    """Nobody gets the image this way. Where that is ``final``, one of all nodes is told the reason, and says it.

    Else each asks the registry for itself.
    """

    final: bool
    reason: str = ""
    hint: str = ""


FromTracker = Routes | FetchBlobs | Released | Hopeless


# -- before that


@dataclass(frozen=True, slots=True)
class Hello:
    """The first word of who has accepted a connection."""

    node: Word


@dataclass(frozen=True, slots=True)
class Come:
    """The first word of a peer to the tracker: whether it lacks something of the image."""

    lacks: bool


@dataclass(frozen=True, slots=True)
class Documents:
    """The tracker's answer: what all need to know of an image."""

    named: str
    architecture: str
    manifest: bytes
    config: bytes
    evidence: bytes
    tokens: str


@dataclass(frozen=True, slots=True)
class File:
    """The same of a file that srun's host sends."""

    named: str
    size: Annotated[int, Within(1, 1 << 50)]


@dataclass(frozen=True, slots=True)
class Refused:
    """Or why nobody gets it: see Hopeless."""

    reason: str
    hint: str
    final: bool


Answer = Documents | File | Refused


# -- between peers


@dataclass(frozen=True, slots=True)
class Take:
    """A child takes pieces of a tree from here on: of each blob how many it has. None: no more of them."""

    tree: Word
    trees: Trees
    wanted: tuple[tuple[Word, Word], ...]


Message = FromPeer | FromTracker | Hello | Come | Documents | File | Refused | Take
