"""What a node knows of a swarm before it takes part. A step whose image is stored loads no more than this."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Swarm:
    """What all members know: a key, what it is for, how many nodes there are, and the networks that they may be in.

    Networks have commas between them; all are good, where there is none.
    """

    key: bytes
    context: str
    nodes: int
    networks: str = ""


@dataclass(frozen=True, slots=True)
class Invitation:
    """Where the tracker is, and who this node is among those of the step.

    It keeps some bytes for later ones, and listens at one of these ports.
    """

    host: str
    port: int
    node: int
    swarm: Swarm
    keep: int = 0
    ports: range = range(1)
