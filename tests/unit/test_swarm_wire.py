"""Encode the messages of a swarm, and refuse bytes that are no message."""

from __future__ import annotations

import json
import random

import pytest

from enroot_py.features.swarm import wire
from enroot_py.features.swarm.messages import (
    Come,
    Complaint,
    Documents,
    Failed,
    FetchBlobs,
    File,
    FromPeer,
    FromTracker,
    Hello,
    Hopeless,
    Joined,
    Link,
    Message,
    Refused,
    Released,
    Report,
    Routes,
    Take,
)
from enroot_py.features.swarm.wire import WireError


@pytest.mark.parametrize("cut", [1, 7, 1 << 20])
def test_message_in_parts_is_joined(cut: int) -> None:
    data, buffer = wire.frame({"a": 1}) + wire.frame({"b": 2}), bytearray()
    messages = []
    for start in range(0, len(data), cut):
        buffer += data[start : start + cut]
        while message := wire.unframe(buffer, 100):
            messages.append(message)
    assert messages == [{"a": 1}, {"b": 2}] and not buffer


@pytest.mark.parametrize(
    ("text", "error"), [("x" * 200, "bytes"), ("[1]", "not an object"), ("[" * 99, "not JSON"), ("{", "not JSON")]
)
def test_bad_frame_is_refused(text: str, error: str) -> None:
    with pytest.raises(WireError, match=error):
        wire.unframe(bytearray(len(text).to_bytes(4, "big") + text.encode()), 100)


PEERS: list[FromPeer] = [
    Joined(("10.0.0.1", 5), (1, 2)),
    Report((1, 2), 3, done=True, unfetched=4),
    Complaint(1, 2, True, (1, 2)),
]
TRACKERS: list[FromTracker] = [
    Routes(2, (0, 1), True, (Link(1, 2, ("10.0.0.1", 5), (1,)), Link(0, 3, ("fe80::1", 6)))),
    FetchBlobs((1,)),
    Released(),
]


@pytest.mark.parametrize("message", PEERS)
def test_message_of_a_peer_survives_the_wire(message: FromPeer) -> None:
    unframed = wire.unframe(bytearray(wire.frame(wire.encode(message))), wire.MAX_PEER_BYTES)
    assert unframed is not None
    assert wire.decode_from_peer(unframed, "10.0.0.1") == message


@pytest.mark.parametrize("message", TRACKERS)
def test_message_of_the_tracker_survives_the_wire(message: FromTracker) -> None:
    unframed = wire.unframe(bytearray(wire.frame(wire.encode(message))), wire.MAX_TRACKER_BYTES)
    assert unframed is not None
    assert wire.decode_from_tracker(unframed) == message


OTHERS: list[Message] = [
    Hello(3),
    Come(True),
    Documents("sha256:0", "amd64", b"{}", b"{}", b"", "t"),
    File("sha256:0", 1),
    Refused("why", "hint", False),
    Take(1, 2, ((0, 1), (2, 3))),
    Failed((1,), True, "why", "hint"),
    Hopeless(True, "why", "hint"),
]


def as_json(message: Message) -> dict[str, object]:
    return dict(json.loads(wire.frame(wire.encode(message))[4:]))


@pytest.mark.parametrize("message", OTHERS)
def test_other_message_survives_the_wire(message: Message) -> None:
    assert wire.decode(as_json(message), type(message)) == message


@pytest.mark.parametrize(
    ("message", "field", "value"),
    [
        (File("sha256:0", 1), "size", 0),
        (File("sha256:0", 1), "size", (1 << 50) + 1),
        (Take(1, 2, ()), "wanted", [[0, 1 << 32]]),
        (Take(1, 2, ()), "trees", 33),
        (Joined(("", 5), ()), "address", ["", 0]),
        (Joined(("", 5), ()), "name", "x" * 65),
        (Joined(("", 5), ()), "lacks", [True]),
        (Routes(1, (), True, ()), "links", [[0, 1, ["somewhere", 5], []]]),
        (Documents("", "", b"", b"", b"", ""), "manifest", "!"),
    ],
)
def test_value_out_of_bounds_is_refused(message: Message, field: str, value: object) -> None:
    with pytest.raises(WireError):
        wire.decode({**as_json(message), field: value}, type(message))


@pytest.mark.security("N2")
@pytest.mark.soak
def test_random_message_is_refused_or_unchanged(rng: random.Random, soak: bool) -> None:
    """Messages have values of other types or out of bounds, at any depth. An accepted message is unchanged."""
    odd: list[object] = [None, -1, 0, 1 << 32, 1 << 70, 1.5, "", "x", "é" * 70, "::1", [], [-1], {}, True, [[1, 2]]]
    messages = [*PEERS, *TRACKERS, *OTHERS]
    kinds = [type(each) for each in messages]

    def changed(value: object) -> object:
        if isinstance(value, list) and value and rng.random() < 0.7:
            at = rng.randrange(len(value))
            return [*value[:at], *([] if rng.random() < 0.2 else [changed(value[at])]), *value[at + 1 :]]
        return rng.choice(odd)

    for _ in range(100_000 if soak else 3000):
        message = as_json(rng.choice(messages))
        name = rng.choice(list(message))
        message[name] = changed(message[name])
        try:
            decoded = wire.decode(json.loads(json.dumps(message)), *kinds)
        except WireError:
            continue
        assert as_json(decoded) == message
