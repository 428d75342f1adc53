"""What goes over the wire of a swarm: who has not its key, or says something at another time, is heard no further."""

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
from enroot_py.swarm.wire import End, Handshake, Session, WireError

KEY = bytes(range(32))


def pair(*, key: bytes = KEY, context: str = "1.0", role: str = "t") -> tuple[Handshake, Handshake]:
    """Who connects, with what is given, and who is connected to."""
    return Handshake(key, context, End(3, role), connects=True), Handshake(KEY, "1.0", End(7, "t"), connects=False)


def shake(one: Handshake, other: Handshake, cut: int = 1 << 20) -> tuple[Session, Session]:
    """Let both talk, in parts of ``cut`` bytes."""
    for _ in range(4):
        for sender, receiver in ((one, other), (other, one)):
            data, sender.out = sender.out, b""
            for start in range(0, len(data), cut):
                receiver.feed(data[start : start + cut])
    assert one.session and other.session
    return one.session, other.session


@pytest.mark.parametrize("cut", [1, 7, 1 << 20])
def test_both_know_each_other_then(cut: int) -> None:
    one, other = pair()
    mine, theirs = shake(one, other, cut)
    assert (one.other, other.other) == (7, 3)
    buffer = bytearray(mine.seal({"a": 1}) + mine.seal({"b": 2}))
    assert theirs.open(buffer, 100) == {"a": 1}
    assert theirs.open(buffer, 100) == {"b": 2}
    assert theirs.open(buffer, 100) is None
    assert mine.open(bytearray(theirs.seal({"c": 3})), 100) == {"c": 3}


@pytest.mark.parametrize("wrong", [{"key": b"k" * 32}, {"context": "1.1"}, {"role": "p"}])
def test_stranger_is_refused_before_anything_else(wrong: dict[str, object]) -> None:
    """A stranger has another key, step or role."""
    with pytest.raises(WireError):
        shake(*pair(**wrong))  # type: ignore[arg-type]


def test_who_connects_believes_nobody_without_the_key() -> None:
    one, _ = pair()
    with pytest.raises(WireError, match="another swarm"):
        one.feed(bytes(wire.ANSWER))


@pytest.mark.parametrize(("one", "other"), [(True, True), (True, False), (False, True), (False, False)])
def test_both_have_the_key_for_tls_if_both_have_tls(one: bool, other: bool) -> None:
    ends = (
        Handshake(KEY, "1.0", End(3, "t", one), connects=True),
        Handshake(KEY, "1.0", End(7, "t", other), connects=False),
    )
    shake(*ends)
    assert ends[0].secret == ends[1].secret
    assert bool(ends[0].secret) == (one and other)


@pytest.mark.parametrize("sender", [0, 1])
def test_nobody_in_between_turns_tls_off(sender: int) -> None:
    one, other = (
        Handshake(KEY, "1.0", End(3, "t", True), connects=True),
        Handshake(KEY, "1.0", End(7, "t", True), connects=False),
    )
    hello = bytearray(one.out)
    if sender == 0:
        hello[len(wire.MAGIC) + 1 + 4] = 0
        with pytest.raises(WireError, match="another swarm"):
            other.feed(bytes(hello))
        return
    other.feed(bytes(hello))
    answer = bytearray(other.out)
    if sender == 1:
        answer[4] = 0
    with pytest.raises(WireError, match="another swarm"):
        one.feed(bytes(answer))


def test_a_hello_that_was_heard_serves_nobody_else() -> None:
    one, other = pair()
    hello = one.out
    shake(one, other)
    again = Handshake(KEY, "1.0", End(7, "t"), connects=False)
    again.feed(hello)
    with pytest.raises(WireError):
        again.feed(bytes(wire.PROOF))


def test_a_stranger_gets_no_further_than_a_hello() -> None:
    other = pair()[1]
    with pytest.raises(WireError, match="no member"):
        other.feed(b"GET / HTTP/1.1\r\nHost: x\r\nAccept: everything there is\r\n\r\n")


def test_messages_count_once_and_in_order() -> None:
    mine, theirs = shake(*pair())
    first, second = mine.seal({"a": 1}), mine.seal({"b": 2})
    with pytest.raises(WireError, match="somebody else"):
        theirs.open(bytearray(second), 100)
    mine, theirs = shake(*pair())
    first = mine.seal({"a": 1})
    theirs.open(bytearray(first), 100)
    with pytest.raises(WireError, match="somebody else"):
        theirs.open(bytearray(first), 100)
    with pytest.raises(WireError, match="somebody else"):  # nor is it what the other one has said
        mine.open(bytearray(first), 100)


@pytest.mark.security("N1")
@pytest.mark.parametrize(("at", "bit"), [(len(wire.MAGIC) + 1, 1), (len(wire.MAGIC) + 10, 128), (wire.HELLO - 1, 1)])
def test_first_message_proves_the_key(at: int, bit: int) -> None:
    """A stranger is known by it, before anything is answered."""
    one, other = pair()
    hello = bytearray(one.out)
    hello[at] ^= bit
    with pytest.raises(WireError, match="another swarm"):
        other.feed(bytes(hello))
    assert other.claimed is None and not other.out


def test_stranger_is_known_by_its_first_bytes() -> None:
    with pytest.raises(WireError, match="no member"):
        pair()[1].feed(b"GET ")


@pytest.mark.parametrize(
    ("message", "says"), [({"a": "x" * 200}, "bytes"), ("[1]", "no object"), ("[" * 20000, "no JSON"), ("{", "no JSON")]
)
def test_messages_have_limits(message: object, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, theirs = shake(*pair())
    if isinstance(message, str):
        monkeypatch.setattr(wire.json, "dumps", lambda *_, **__: message)
    with pytest.raises(WireError, match=says):
        theirs.open(bytearray(mine.seal(message)), 100 if isinstance(message, dict) else 1 << 16)  # type: ignore[arg-type]


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
    mine, theirs = shake(*pair())
    said = theirs.open(bytearray(mine.seal(wire.encode(message))), wire.SHORT)
    assert said is not None
    assert wire.decode_from_peer(said, "10.0.0.1") == message


@pytest.mark.parametrize("message", TRACKERS)
def test_what_the_tracker_says(message: FromTracker) -> None:
    mine, theirs = shake(*pair())
    said = theirs.open(bytearray(mine.seal(wire.encode(message))), wire.LONG)
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


def test_a_secret_is_for_the_other_end_alone() -> None:
    mine, theirs = shake(*pair())
    secret = "Bearer " + "x" * 3000
    assert theirs.reveal(mine.hide(secret)) == secret
    assert theirs.reveal(mine.hide("")) == ""
    assert mine.hide(secret) != mine.hide(secret)
    with pytest.raises(WireError):
        theirs.reveal("zz")
