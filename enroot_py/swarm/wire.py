"""How a message looks on the wire, which is TLS: its length, 32 bits, most significant byte first, and its JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from ipaddress import ip_address
from typing import TYPE_CHECKING

from enroot_py.swarm.messages import Complaint, Failed, FetchBlobs, Hopeless, Joined, Link, Released, Report, Routes
from enroot_py.swarm.trees import MOST

if TYPE_CHECKING:
    from enroot_py.swarm.messages import FromPeer, FromTracker

SHORT = 64 << 10  # bytes of a message of a peer
MOST_OF_A_NAME = 64  # HOST_NAME_MAX, sysconf(3)
LONG = 16 << 20  # of one of the tracker, which may have a manifest in it


class WireError(Exception):
    """What came is not what a member of this swarm would say."""


def frame(message: Mapping[str, object]) -> bytes:
    """A message as it is sent."""
    text = json.dumps(message, separators=(",", ":")).encode()
    return len(text).to_bytes(4, "big") + text


def unframe(buffer: bytearray, most: int) -> dict[str, object] | None:
    """The first message of a buffer, which is taken out of it; None where it is not all there.

    Raises WireError for one that is longer than ``most`` bytes, or is no JSON object.
    """
    if len(buffer) < 4:
        return None
    length = int.from_bytes(buffer[:4], "big")
    if length > most:
        raise WireError(f"a message of {length} bytes")
    if len(buffer) < 4 + length:
        return None
    text = bytes(buffer[4 : 4 + length])
    del buffer[: 4 + length]
    try:
        message = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise WireError("a message that is no JSON") from e
    if not isinstance(message, dict):
        raise WireError("a message that is no object")
    return message


# -- messages as JSON


def encode(message: FromPeer | FromTracker) -> dict[str, object]:
    """A message as an object of JSON."""
    name = type(message).__name__
    if isinstance(message, Routes):
        links = [[link.tree, link.parent, *link.address, list(link.blobs)] for link in message.links]
        return {"is": name, "trees": message.trees, "blobs": message.blobs, "relays": message.relays, "links": links}
    return {"is": name, **{field: getattr(message, field) for field in type(message).__slots__}}


def decode_hello(message: Mapping[str, object]) -> int:
    """The node that has accepted a connection, as it says first. Raises WireError."""
    take = _Fields(message)
    if take.kind() != "Hello":
        raise WireError("it does not say who it is")
    return take.number("node")


def decode_from_peer(message: Mapping[str, object], address: str) -> FromPeer:
    """What a peer says; the host of its address is that of its connection, ``address``. Raises WireError."""
    take = _Fields(message)
    kind = take.kind()
    if kind == "Joined":
        blobs = take.numbers("lacks"), take.numbers("has")
        return Joined((address, take.port()), *blobs, take.text("name")[:MOST_OF_A_NAME])
    if kind == "Report":
        bytes_ = take.number("fetched"), take.number("unfetched")
        return Report(take.numbers("got"), bytes_[0], take.flag("done"), bytes_[1])
    if kind == "Complaint":
        return Complaint(take.number("tree"), take.number("parent"), take.flag("reached"), take.numbers("got"))
    if kind == "Failed":
        return Failed(take.numbers("blobs"), take.flag("refused"), take.text("reason"), take.text("hint"))
    raise WireError(f"a peer says {kind!r}")


def decode_from_tracker(message: Mapping[str, object]) -> FromTracker:
    """What the tracker says. Raises WireError."""
    take = _Fields(message)
    kind = take.kind()
    if kind == "Routes":
        plan = Routes(take.number("trees"), take.numbers("blobs"), take.flag("relays"), take.links())
        if not 0 < plan.trees <= MOST or not all(link.tree < plan.trees for link in plan.links):
            raise WireError("a tree that is not there")
        return plan
    if kind == "FetchBlobs":
        return FetchBlobs(take.numbers("blobs"))
    if kind == "Released":
        return Released()
    if kind == "Hopeless":
        return Hopeless(take.flag("final"), take.text("reason"), take.text("hint"))
    raise WireError(f"the tracker says {kind!r}")


class _Fields:
    """The fields of a message, each checked for its type. All raise WireError."""

    def __init__(self, message: Mapping[str, object]) -> None:
        self._message = message

    def kind(self) -> str:
        return str(self._message.get("is"))

    def number(self, name: str) -> int:
        return _checked(self._message.get(name), name)

    def numbers(self, name: str) -> tuple[int, ...]:
        value = self._message.get(name)
        if not isinstance(value, list):
            raise WireError(f"{name} is no list")
        return tuple(_checked(each, name) for each in value)

    def flag(self, name: str) -> bool:
        value = self._message.get(name)
        if not isinstance(value, bool):
            raise WireError(f"{name} is neither true nor false")
        return value

    def text(self, name: str) -> str:
        value = self._message.get(name)
        if not isinstance(value, str):
            raise WireError(f"{name} is no text")
        return value

    def port(self) -> int:
        address = self._message.get("address")
        if not isinstance(address, list) or len(address) != 2:
            raise WireError("no address")
        return _port(address[1])

    def links(self) -> tuple[Link, ...]:
        rows = self._message.get("links")
        if not isinstance(rows, list):
            raise WireError("links is no list")
        return tuple(self._link(row) for row in rows)

    @staticmethod
    def _link(row: object) -> Link:
        if not isinstance(row, list) or len(row) != 5 or not isinstance(row[2], str) or not isinstance(row[4], list):
            raise WireError("no link")
        tree, parent, host, port, blobs = row
        if host:
            _address(host)
        blobs = tuple(_checked(blob, "blobs") for blob in blobs)
        return Link(_checked(tree, "tree"), _checked(parent, "parent"), (host, _port(port)), blobs)


def _checked(value: object, name: str) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise WireError(f"{name} is no number")
    return value


def _address(host: str) -> None:
    try:
        ip_address(host)
    except ValueError as e:
        raise WireError(str(e)) from e


def _port(value: object) -> int:
    port = _checked(value, "port")
    if not 0 < port < 1 << 16:
        raise WireError(f"no port: {port}")
    return port
