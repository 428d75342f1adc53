"""How members of a swarm prove to each other who they are, and how a message looks on the wire. Without sockets.

Both ends of a connection have the key of the swarm. The connecting end says who it is, draws a nonce, and proves by
HMAC-SHA256 (RFC 2104) over this that it has the key: so a stranger is known by its first message. Anyone who hears
that message can repeat it. So the other end draws a nonce too, and both prove the key over both nonces. Both nonces
also yield two session keys, one for each direction. A message is its length (32 bits, most significant byte first),
its JSON, and an HMAC of 16 bytes over the number that it has in its direction and the JSON.
If both have said that they can, all that follows the proofs goes by TLS, with a third key: see tls.py.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from typing import TYPE_CHECKING

from enroot_py.swarm.messages import Complaint, Failed, FetchBlobs, Hopeless, Joined, Link, Released, Report, Routes
from enroot_py.swarm.trees import MOST

if TYPE_CHECKING:
    from enroot_py.swarm.messages import FromPeer, FromTracker

MAGIC = b"penroot4"
NONCE = 16
PROOF = 32
MAC = 16
_OWN = 4 + 1 + NONCE  # bytes that an end says of itself: its node, whether it has TLS, and a nonce
HELLO = len(MAGIC) + 1 + _OWN + PROOF  # bytes that the one who connects sends first
ANSWER = _OWN + PROOF
SHORT = 64 << 10  # bytes of a message of a peer
MOST_OF_A_NAME = 64  # HOST_NAME_MAX, sysconf(3)
LONG = 16 << 20  # of one of the tracker, which may have a manifest in it


class WireError(Exception):
    """What came is not what a member of this swarm would say."""


@dataclass(frozen=True, slots=True)
class End:
    """Who is at an end of a connection: its node, for what it is there, one letter, and whether it has TLS."""

    node: int
    role: str
    tls: bool = False


class Handshake:
    """One end of a connection until both have proved to have the key.

    ``feed`` takes what has come; ``out`` is to be sent then, and ``session`` is there at the end, with ``secret``, the
    key for TLS, if both ends have ``tls``.
    """

    def __init__(self, key: bytes, context: str, end: End, *, connects: bool) -> None:
        self._key = key
        self._context = context.encode()
        self._role = end.role.encode()
        self._own = _number(end.node) + bytes([end.tls]) + os.urandom(NONCE)
        self.connects = connects
        self._buffer = b""
        self._transcript = b""
        self.claimed: int | None = None  # the node that connects, by its first message
        self.other = -1  # the node at the other end
        self.session: Session | None = None
        self.secret = b""
        self.out = b""
        if connects:
            self._know(self._own, b"")
            self.out = MAGIC + self._role + self._own + self._prove(b"hello")

    def feed(self, data: bytes) -> bytes:
        """What came after the handshake, once that is done. Raises WireError."""
        self._buffer += data
        if self.connects:
            if len(self._buffer) >= ANSWER:
                theirs, proof = self._cut(ANSWER - PROOF), self._cut(PROOF)
                self._know(self._own, theirs)
                self._check(b"connected", proof)
                self.out = self._prove(b"connects")
                self._end(theirs)
        elif self.claimed is None:
            begin = MAGIC + self._role
            if not begin.startswith(self._buffer[: len(begin)]):
                raise WireError("no member of a swarm, or one of another version")
            if len(self._buffer) >= HELLO:
                self._cut(len(begin))
                self._theirs, proof = self._cut(_OWN), self._cut(PROOF)
                self._know(self._theirs, b"")
                self._check(b"hello", proof)
                if self._buffer:
                    raise WireError("more than a hello")
                self.claimed = int.from_bytes(self._theirs[:4], "big")
                self._know(self._theirs, self._own)
                self.out = self._own + self._prove(b"connected")
        elif len(self._buffer) >= PROOF:
            self._check(b"connects", self._cut(PROOF))
            self._end(self._theirs)
        rest = self._buffer
        if self.session is None:
            return b""
        self._buffer = b""
        return rest

    def _cut(self, count: int) -> bytes:
        head, self._buffer = self._buffer[:count], self._buffer[count:]
        return head

    def _know(self, connecting: bytes, connected: bytes) -> None:
        context = _number(len(self._context)) + self._context
        self._transcript = MAGIC + self._role + context + connecting + connected

    def _prove(self, who: bytes) -> bytes:
        return hmac.digest(self._key, who + b"\0" + self._transcript, hashlib.sha256)

    def _check(self, who: bytes, proof: bytes) -> None:
        if not hmac.compare_digest(proof, self._prove(who)):
            raise WireError("the key of another swarm")

    def _end(self, theirs: bytes) -> None:
        self.other = int.from_bytes(theirs[:4], "big")
        keys = [self._prove(b"says connecting"), self._prove(b"says connected")]
        own, their = keys if self.connects else reversed(keys)
        self.session = Session(own, their)
        if self._own[4] and theirs[4]:
            self.secret = self._prove(b"says by TLS")


class Session:
    """The messages of a connection, in both directions."""

    def __init__(self, own: bytes, theirs: bytes) -> None:
        self._own, self._theirs = own, theirs
        self._sent = self._received = 0

    def seal(self, message: Mapping[str, object]) -> bytes:
        text = json.dumps(message, separators=(",", ":")).encode()
        self._sent += 1
        return _number(len(text)) + text + self._mac(self._own, self._sent, text)

    def open(self, buffer: bytearray, most: int) -> dict[str, object] | None:
        """The first message of a buffer, which is taken out of it; None where it is not all there.

        Raises WireError for one that is longer than ``most`` bytes, is no JSON object, or was not said here and now.
        """
        if len(buffer) < 4:
            return None
        length = int.from_bytes(buffer[:4], "big")
        if length > most:
            raise WireError(f"a message of {length} bytes")
        end = 4 + length + MAC
        if len(buffer) < end:
            return None
        text, mac = bytes(buffer[4 : 4 + length]), bytes(buffer[4 + length : end])
        del buffer[:end]
        self._received += 1
        if not hmac.compare_digest(mac, self._mac(self._theirs, self._received, text)):
            raise WireError("a message of somebody else")
        try:
            message = json.loads(text)
        except (ValueError, RecursionError) as e:
            raise WireError("a message that is no JSON") from e
        if not isinstance(message, dict):
            raise WireError("a message that is no object")
        return message

    def hide(self, text: str) -> str:
        """A secret as others cannot read it, for the other end."""
        nonce = os.urandom(NONCE)
        return (nonce + self._masked(self._own, nonce, text.encode())).hex()

    def reveal(self, hidden: str) -> str:
        """A secret of the other end. Raises WireError."""
        try:
            data = bytes.fromhex(hidden)
            return self._masked(self._theirs, data[:NONCE], data[NONCE:]).decode()
        except ValueError as e:
            raise WireError("no secret") from e

    @staticmethod
    def _masked(key: bytes, nonce: bytes, data: bytes) -> bytes:
        """Bytes with a stream of HMACs over ``nonce`` and a counter added to them, bit by bit; or without it again."""
        blocks = range(-(-len(data) // PROOF))
        stream = b"".join(hmac.digest(key, b"mask" + nonce + _number(block), hashlib.sha256) for block in blocks)
        return bytes(one ^ other for one, other in zip(data, stream, strict=False))

    @staticmethod
    def _mac(key: bytes, number: int, text: bytes) -> bytes:
        return hmac.digest(key, number.to_bytes(8, "big") + text, hashlib.sha256)[:MAC]


def _number(value: int) -> bytes:
    return value.to_bytes(4, "big")


# -- messages as JSON


def encode(message: FromPeer | FromTracker) -> dict[str, object]:
    """A message as an object of JSON."""
    name = type(message).__name__
    if isinstance(message, Routes):
        links = [[link.tree, link.parent, *link.address, list(link.blobs)] for link in message.links]
        return {"is": name, "trees": message.trees, "blobs": message.blobs, "relays": message.relays, "links": links}
    return {"is": name, **{field: getattr(message, field) for field in type(message).__slots__}}


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
