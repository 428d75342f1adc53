"""How a message looks on the wire, which is TLS: its length, 32 bits, most significant byte first, and its JSON."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from functools import cache
from ipaddress import ip_address
from itertools import repeat
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

from enroot_py.swarm.messages import (
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
    from enroot_py.swarm.messages import FromPeer, FromTracker, Message

SHORT = 64 << 10  # bytes of a message of a peer
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


def encode(message: Message) -> dict[str, object]:
    """A message as an object of JSON."""
    return {"is": type(message).__name__, **{name: _plain(getattr(message, name)) for name in type(message).__slots__}}


def _plain(value: object) -> object:
    if isinstance(value, bytes):
        return b64encode(value).decode()
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    if is_dataclass(value):
        return [_plain(getattr(value, field.name)) for field in fields(value)]
    return value


def decode(message: Mapping[str, object], *kinds: type) -> Any:
    """A message of one of some kinds. Raises WireError."""
    name = message.get("is")
    for kind in kinds:
        if kind.__name__ == name:
            return kind(**{field: _checked(message.get(field), of, field) for field, of in _types(kind).items()})
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
def _types(kind: Any) -> dict[str, object]:
    return get_type_hints(kind, include_extras=True)


def _checked(value: object, of: Any, name: str) -> Any:
    """A value of JSON as one of a type. Raises WireError."""
    if get_origin(of) is Annotated:
        inner, *bounds = get_args(of)
        value = _checked(value, inner, name)
        for bound in bounds:
            _check_bound(value, bound, name)
        return value
    if get_origin(of) is tuple:
        types = get_args(of)
        if types[1:] == (...,):
            return tuple(_checked(each, types[0], name) for each in _list(value, name))
        return tuple(map(_checked, _list(value, name, len(types)), types, repeat(name)))
    if of is bytes:
        try:
            return b64decode(_checked(value, str, name), validate=True)
        except ValueError as e:
            raise WireError(f"{name} is no base64") from e
    if isinstance(of, type) and is_dataclass(of):
        fields_of = _types(of)
        return of(*map(_checked, _list(value, name, len(fields_of)), fields_of.values(), fields_of))
    if type(value) is not of:
        raise WireError(f"{name} is no {of.__name__}")
    return value


def _list(value: object, name: str, length: int | None = None) -> list[object]:
    if not isinstance(value, list) or length not in (None, len(value)):
        raise WireError(f"{name} is no such list")
    return value


def _check_bound(value: Any, bound: object, name: str) -> None:
    if isinstance(bound, Within):
        if not bound.low <= (value if isinstance(value, int) else len(value)) <= bound.high:
            raise WireError(f"{name} is out of bounds")
    elif bound is IpAddress and value:
        try:
            ip_address(value)
        except ValueError as e:
            raise WireError(str(e)) from e
