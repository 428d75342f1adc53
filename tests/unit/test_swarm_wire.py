"""What goes over the wire of a swarm: messages, and what is none."""

from __future__ import annotations

import random

import pytest

from enroot_py.swarm import wire
from enroot_py.swarm.messages import (
    Complaint,
    FetchBlobs,
    FromPeer,
    FromTracker,
    Joined,
    Link,
    Released,
    Report,
    Routes,
)
from enroot_py.swarm.wire import WireError


@pytest.mark.parametrize("cut", [1, 7, 1 << 20])
def test_messages_come_in_parts(cut: int) -> None:
    data, buffer = wire.frame({"a": 1}) + wire.frame({"b": 2}), bytearray()
    said = []
    for start in range(0, len(data), cut):
        buffer += data[start : start + cut]
        while message := wire.unframe(buffer, 100):
            said.append(message)
    assert said == [{"a": 1}, {"b": 2}] and not buffer


@pytest.mark.parametrize(
    ("text", "says"), [("x" * 200, "bytes"), ("[1]", "no object"), ("[" * 99, "no JSON"), ("{", "no JSON")]
)
def test_messages_have_limits(text: str, says: str) -> None:
    with pytest.raises(WireError, match=says):
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
def test_what_peers_say(message: FromPeer) -> None:
    said = wire.unframe(bytearray(wire.frame(wire.encode(message))), wire.SHORT)
    assert said is not None
    assert wire.decode_from_peer(said, "10.0.0.1") == message


@pytest.mark.parametrize("message", TRACKERS)
def test_what_the_tracker_says(message: FromTracker) -> None:
    said = wire.unframe(bytearray(wire.frame(wire.encode(message))), wire.LONG)
    assert said is not None
    assert wire.decode_from_tracker(said) == message


@pytest.mark.parametrize("seed", range(20))
def test_any_other_message_is_refused_or_whole(seed: int) -> None:
    """Fields of other types, values beyond all limits, and what nobody says."""
    rng = random.Random(seed)
    values = [None, -1, 1 << 70, 1.5, "x", [], [-1], [True], {}, True, [[1, 2, "x", 70000, []]], [[9, 2, "x", 7, []]]]
    for original in (*PEERS, *TRACKERS):
        message = wire.encode(original)
        name = rng.choice(list(message))
        message[name] = rng.choice(values)
        decode = wire.decode_from_tracker if original in TRACKERS else lambda m: wire.decode_from_peer(m, "10.0.0.1")
        try:
            decoded = decode(message)  # type: ignore[arg-type]
        except WireError:
            continue
        assert type(decoded) in [type(each) for each in (*PEERS, *TRACKERS)]
