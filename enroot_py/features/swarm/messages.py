"""The messages between the tracker of a swarm and its peers.

Messages identify a node by its number within the step, and a blob by its position in the manifest. A blob is cut into
pieces. Nodes pass pieces on along several trees (trees.py). The trees take turns with the pieces of a blob, see
Spool.piece().

The types of the fields have the bounds that wire.py checks when it decodes a message.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from enroot_py.features.swarm.trees import MAX_TREES


@dataclass(frozen=True, slots=True)
class Within:
    """The bounds of a number, or of the length of any other value."""

    low: int
    high: int


class IpAddress:
    """Marks a text that is an IP address or empty."""


Number = Annotated[int, Within(0, (1 << 63) - 1)]
Word = Annotated[int, Within(0, (1 << 32) - 1)]
Trees = Annotated[int, Within(1, MAX_TREES)]
Address = tuple[Annotated[str, IpAddress], Annotated[int, Within(1, 65535)]]  # host "": the tracker's host
HostName = Annotated[str, Within(0, 64)]  # HOST_NAME_MAX, sysconf(3)
Blobs = tuple[Number, ...]
Bytes = tuple[Number, ...]  # by tree
SEED = 0xFFFFFFFE  # the node number of the seed: a peer on the tracker's host that needs no blob for itself
REPORT_INTERVAL_S = 1.0  # between two reports of a peer that fetches from the registry


def report_interval(nodes: int) -> float:
    """Return the seconds between reports of a peer that fetches nothing: all such peers send at most 1000 a second."""
    return REPORT_INTERVAL_S * max(1.0, nodes / 1000)


@dataclass(frozen=True, slots=True)
class Joined:
    """The peer on host ``name`` listens at ``address``, lacks some blobs and already has others."""

    address: Address
    lacks: Blobs
    has: Blobs = ()
    name: HostName = ""


@dataclass(frozen=True, slots=True)
class Report:
    """The bytes that the peer has received by each tree (``got``) and from the registry (``fetched``).

    ``done``: the peer has every blob that it lacked. ``unfetched`` counts the bytes that it was asked to fetch from the
    registry and has not yet received.
    """

    got: Bytes
    fetched: Number = 0
    done: bool = False
    unfetched: Number = 0


@dataclass(frozen=True, slots=True)
class Complaint:
    """The peer complains about its parent in a tree.

    ``reached``: the peer is connected to the parent, but this tree is slower than the peer's other trees. If not
    ``reached``, the peer cannot connect, or the connection has ended.
    """

    tree: Number
    parent: Number
    reached: bool
    got: Bytes


@dataclass(frozen=True, slots=True)
class Failed:
    """The peer cannot fetch these blobs from the registry. ``refused``: the registry refuses them to all peers."""

    blobs: Blobs
    refused: bool
    reason: str
    hint: str = ""


FromPeer = Joined | Report | Complaint | Failed


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of all nodes of the step."""

    joined: int  # nodes
    ready: int  # nodes that have every blob
    slowest: str  # the name of the slowest node
    fraction: float  # received / wanted bytes of the slowest node
    fetched: int  # bytes from the registry


@dataclass(frozen=True, slots=True)
class Link:
    """A parent from which a peer downloads pieces of a tree. If ``blobs`` is not empty: only pieces of these blobs."""

    tree: Number
    parent: Number
    address: Address
    blobs: Blobs = ()


@dataclass(frozen=True, slots=True)
class Routes:
    """New links for a peer. They replace the peer's present links in the trees of ``links``.

    ``trees`` is the number of trees, and ``blobs`` are the blobs that they carry. A relay downloads all these blobs for
    its children. A leaf downloads only the blobs that it lacks.
    """

    trees: Trees
    blobs: Blobs
    relays: bool
    links: tuple[Link, ...]


@dataclass(frozen=True, slots=True)
class FetchBlobs:
    """Fetch only these blobs from the registry. Upload them to other peers that want them."""

    blobs: Blobs


@dataclass(frozen=True, slots=True)
class Released:
    """No node needs this peer any more."""


@dataclass(frozen=True, slots=True)
class Hopeless:
    """The swarm cannot deliver the image.

    If ``final``, no node can get the image. One node gets the reason and reports it. If not ``final``, a node that gets
    this message pulls the rest of the image from the registry.
    """

    final: bool
    reason: str = ""
    hint: str = ""


FromTracker = Routes | FetchBlobs | Released | Hopeless


# -- messages of the handshake


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message of the end that accepted a connection."""

    node: Word


@dataclass(frozen=True, slots=True)
class Come:
    """The first message of a peer to the tracker. ``lacks``: the node does not have the whole image."""

    lacks: bool


@dataclass(frozen=True, slots=True)
class Documents:
    """The tracker's answer for a registry image: its manifest, its config, signatures and the registry's tokens.

    ``named`` is the digest that the image's name resolves to: see manifests.Manifest.
    """

    named: str
    architecture: str
    manifest: bytes
    config: bytes
    evidence: bytes
    tokens: str


@dataclass(frozen=True, slots=True)
class File:
    """The tracker's answer for a file that srun's host sends; ``named`` is its digest."""

    named: str
    size: Annotated[int, Within(1, 1 << 50)]


@dataclass(frozen=True, slots=True)
class Refused:
    """The tracker's answer if it cannot get the image. For ``final``, see Hopeless."""

    reason: str
    hint: str
    final: bool


Answer = Documents | File | Refused


# -- messages between peers


@dataclass(frozen=True, slots=True)
class Take:
    """A child asks its parent for pieces of a tree.

    An item of ``wanted`` is a blob and a number: the child already has this many pieces of the blob in this tree.

    An empty ``wanted`` ends the download.
    """

    tree: Word
    trees: Trees
    wanted: tuple[tuple[Word, Word], ...]


Message = FromPeer | FromTracker | Hello | Come | Documents | File | Refused | Take
