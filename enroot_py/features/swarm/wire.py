"""The encoding of a message inside TLS: 4 bytes of length (most significant first), then JSON."""

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
MAX_PEER_BYTES = 64 << 10  # message size
MAX_TRACKER_BYTES = 16 << 20  # message size: the tracker sends manifests


class WireError(Exception):
    """The other end sent data that no member of this swarm would send."""


def frame(message: Mapping[str, object]) -> bytes:
    text = json.dumps(message, separators=(",", ":"), default=_json_value).encode()
    return len(text).to_bytes(4, "big") + text


def unframe(buffer: bytearray, max_bytes: int) -> dict[str, object] | None:
    """Remove the first message from a buffer and return it, or None if it is incomplete.

    Raises WireError if the message is longer than ``max_bytes`` or not a JSON object.
    """
    if len(buffer) < 4:
        return None
    length = int.from_bytes(buffer[:4], "big")
    if length > max_bytes:
        raise WireError(f"a message of {length} bytes")
    if len(buffer) < 4 + length:
        return None
    text = bytes(buffer[4 : 4 + length])
    del buffer[: 4 + length]
    try:
        message = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise WireError("a message that is not JSON") from e
    if not isinstance(message, dict):
        raise WireError("a message that is not an object")
    return message


def encode(message: Message) -> dict[str, object]:
    """Return a message as a dict, which frame() can encode."""
    return {"is": type(message).__name__, **{name: getattr(message, name) for name in type(message).__slots__}}


def _json_value(value: Any) -> object:
    """Return the JSON value for bytes or a dataclass."""
    return b64encode(value).decode() if isinstance(value, bytes) else [getattr(value, name) for name in value.__slots__]


def decode(message: Mapping[str, object], *kinds: type) -> Any:
    """Return the message, if its class is one of ``kinds``. Raises WireError."""
    name = message.get("is")
    for kind in kinds:
        if kind.__name__ == name:
            return kind(*[check(message.get(field), field) for field, check in _fields(kind)])
    raise WireError(f"unexpected message {name!r}")


def decode_from_peer(message: Mapping[str, object], host: str) -> FromPeer:
    """Return a message of a peer that has connected from ``host``. If it is Joined, replace the host of its address."""
    decoded: FromPeer = decode(message, Joined, Report, Complaint, Failed)
    return replace(decoded, address=(host, decoded.address[1])) if isinstance(decoded, Joined) else decoded


def decode_from_tracker(message: Mapping[str, object]) -> FromTracker:
    decoded: FromTracker = decode(message, Routes, FetchBlobs, Released, Hopeless)
    if isinstance(decoded, Routes) and not all(link.tree < decoded.trees for link in decoded.links):
        raise WireError("unknown tree")
    return decoded


@cache
def _fields(kind: Any) -> list[tuple[str, Check]]:
    return [(name, _check(hint)) for name, hint in get_type_hints(kind, include_extras=True).items()]


@cache
def _check(hint: Any) -> Check:
    """Return a function that converts a JSON value to the type of a hint.

    The function takes the value and its name. It raises WireError.
    """
    if get_origin(hint) is Annotated:
        inner, bound = get_args(hint)
        return _bounded(_check(inner), bound)
    if get_origin(hint) is tuple:
        types = get_args(hint)
        if types[1:] == (...,):
            each = _check(types[0])
            return lambda value, name: tuple([each(item, name) for item in _list(value, name)])
        return _row(tuple, [_check(item) for item in types])
    if hint is bytes:
        return _bytes
    if hasattr(hint, "__dataclass_fields__"):
        checks = [check for _, check in _fields(hint)]
        return _row(lambda values: hint(*values), checks)

    def plain(value: object, name: str) -> object:
        if type(value) is not hint:
            raise WireError(f"{name} is not of type {hint.__name__}")
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
    """Return a check of a list that applies ``checks``, one to each value, and passes the results to ``make``."""

    def row(value: object, name: str) -> Any:
        values = _list(value, name)
        if len(values) != len(checks):
            raise WireError(f"{name} has {len(values)} values")
        return make([check(item, name) for check, item in zip(checks, values, strict=True)])

    return row


def _list(value: object, name: str) -> list[object]:
    if not isinstance(value, list):
        raise WireError(f"{name} is not a list")
    return value


def _bytes(value: object, name: str) -> bytes:
    try:
        if isinstance(value, str):
            return b64decode(value, validate=True)
    except ValueError:
        pass
    raise WireError(f"{name} is not base64")
