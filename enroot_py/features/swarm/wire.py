"""How a message looks on the wire, which is TLS: its length, 32 bits, most significant byte first, and its JSON."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from ipaddress import ip_address
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

from enroot_py.features.swarm.messages import (
    Complaint,
    Failed,
    FetchBlobs,
    Hopeless,
    IpAddress,
    Joined,
    Released,
    Report,
    Routes,
    Within,
)

if TYPE_CHECKING:
    from enroot_py.features.swarm.messages import FromPeer, FromTracker, Message

Check = Callable[[object, str], Any]
SHORT = 64 << 10  # bytes of a message of a peer
LONG = 16 << 20  # of one of the tracker, which may have a manifest in it


class WireError(Exception):
    """What came is not what a member of this swarm would say."""


def frame(message: Mapping[str, object]) -> bytes:
    """A message as it is sent."""
    text = json.dumps(message, separators=(",", ":"), default=_plain).encode()
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


def encode(message: Message) -> dict[str, object]:
    """A message as an object of JSON, whose inner values ``frame`` knows."""
    return {"is": type(message).__name__, **{name: getattr(message, name) for name in type(message).__slots__}}


def _plain(value: Any) -> object:
    """What JSON has no word for."""
    return b64encode(value).decode() if isinstance(value, bytes) else [getattr(value, name) for name in value.__slots__]


def decode(message: Mapping[str, object], *kinds: type) -> Any:
    """A message of one of some kinds. Raises WireError."""
    name = message.get("is")
    for kind in kinds:
        if kind.__name__ == name:
            return kind(*[check(message.get(field), field) for field, check in _fields(kind)])
    raise WireError(f"a message of another kind: {name!r}")


def decode_from_peer(message: Mapping[str, object], address: str) -> FromPeer:
    """What a peer says; the host of its address is that of its connection, ``address``. Raises WireError."""
    said: FromPeer = decode(message, Joined, Report, Complaint, Failed)
    return replace(said, address=(address, said.address[1])) if isinstance(said, Joined) else said


def decode_from_tracker(message: Mapping[str, object]) -> FromTracker:
    """What the tracker says. Raises WireError."""
    said: FromTracker = decode(message, Routes, FetchBlobs, Released, Hopeless)
    if isinstance(said, Routes) and not all(link.tree < said.trees for link in said.links):
        raise WireError("a tree that is not there")
    return said


@cache
def _fields(kind: Any) -> list[tuple[str, Check]]:
    return [(name, _check(of)) for name, of in get_type_hints(kind, include_extras=True).items()]


@cache
def _check(of: Any) -> Check:
    """What makes a value of a type of one of JSON, whose name it is told. All raise WireError."""
    if get_origin(of) is Annotated:
        inner, bound = get_args(of)
        return _bounded(_check(inner), bound)
    if get_origin(of) is tuple:
        types = get_args(of)
        if types[1:] == (...,):
            each = _check(types[0])
            return lambda value, name: tuple([each(one, name) for one in _list(value, name)])
        return _row(tuple, [_check(one) for one in types])
    if of is bytes:
        return _bytes
    if hasattr(of, "__dataclass_fields__"):
        checks = [check for _, check in _fields(of)]
        return _row(lambda values: of(*values), checks)

    def plain(value: object, name: str) -> object:
        if type(value) is not of:
            raise WireError(f"{name} is no {of.__name__}")
        return value

    return plain


def _bounded(check: Check, bound: object) -> Check:
    def within(value: object, name: str) -> Any:
        assert isinstance(bound, Within)
        checked = check(value, name)
        if not bound.low <= (checked if isinstance(checked, int) else len(checked)) <= bound.high:
            raise WireError(f"{name} is out of bounds")
        return checked

    def address(value: object, name: str) -> Any:
        try:
            if host := check(value, name):
                ip_address(host)
        except ValueError as e:
            raise WireError(str(e)) from e
        return host

    return address if bound is IpAddress else within


def _row(make: Callable[[Any], Any], checks: Sequence[Check]) -> Check:
    """A list of as many values as there are checks."""

    def row(value: object, name: str) -> Any:
        values = _list(value, name)
        if len(values) != len(checks):
            raise WireError(f"{name} has {len(values)} values")
        return make([check(one, name) for check, one in zip(checks, values, strict=True)])

    return row


def _list(value: object, name: str) -> list[object]:
    if not isinstance(value, list):
        raise WireError(f"{name} is no list")
    return value


def _bytes(value: object, name: str) -> bytes:
    try:
        if isinstance(value, str):
            return b64decode(value, validate=True)
    except ValueError:
        pass
    raise WireError(f"{name} is no base64")
