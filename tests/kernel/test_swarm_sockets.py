"""A swarm over real sockets: nodes send an image to each other, as the tracker, a process of srun, arranges.

The tracker, the nodes and the attackers are processes of this host.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import random
import resource
import select
import signal
import socket
import ssl
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pyroute2 import IPRoute

from enroot_py.base import linux, log
from enroot_py.base.errors import RefusedError, RegistryError
from enroot_py.features.swarm import fetchers, tracker, wire
from enroot_py.features.swarm import loop as loops
from enroot_py.features.swarm.invitation import Swarm
from enroot_py.features.swarm.loop import Connection, Loop
from enroot_py.features.swarm.messages import SEED, Documents, Joined, Progress, Routes
from enroot_py.features.swarm.peer_process import PeerProcess, close_others
from enroot_py.features.swarm.ports import listener
from enroot_py.features.swarm.spool import Spool
from enroot_py.features.swarm.tls import Identity
from enroot_py.features.swarm.tracker_process import TRACKER, TrackerProcess
from tests.swarm_tls import CONTEXT, KEY, End

_TIME = 60.0


def blobs(sizes: Sequence[int]) -> list[bytes]:
    return [random.Random(number).randbytes(size) for number, size in enumerate(sizes)]


def readable(fd: int, seconds: float) -> bool:
    """Wait up to ``seconds`` for data. poll(2), unlike select(2), accepts descriptors above 1023."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


class Host:
    """The owner of a tracker gives it the image's documents. Without ``layers``, the registry refuses the image."""

    def __init__(self, layers: Sequence[bytes]) -> None:
        self.layers = layers

    def documents(self) -> tuple[Documents, Sequence[int]]:
        if not self.layers:
            raise RefusedError("no such image", hint="look at its name")
        sizes = [len(blob) for blob in self.layers]
        return Documents("sha256:" + "0" * 64, "amd64", b"{}", b"{}", b"", ""), sizes

    def show(self, size: int, progress: Callable[[], Progress], *, ended: bool) -> None:
        """The tests show no progress."""

    seed_descriptors = ()

    def seed(self) -> None:
        """The tests need no seed."""


class Lab:
    """A tracker and nodes, each in a process."""

    def __init__(
        self,
        directory: Path,
        layers: Sequence[bytes],
        nodes: int,
        host: str = "127.0.0.1",
        has: Callable[[Sequence[bytes]], Host] = Host,
    ) -> None:
        """Start the tracker, to which nodes connect at the address ``host``. ``has`` creates its Host."""
        self.directory, self.layers, self.nodes, self.host = directory, layers, nodes, host
        self.swarm = Swarm(KEY, CONTEXT, nodes)
        self.processes: dict[int, int] = {}
        self.results: dict[int, int] = {}
        sock = listener()
        self.port = sock.getsockname()[1]
        lifeline, self.life = os.pipe()
        self.tracker_process = os.fork()
        if self.tracker_process == 0:
            with ending():
                os.close(self.life)
                TrackerProcess(self.swarm, has(layers), sock).serve(lifeline)
        os.close(lifeline)
        sock.close()

    def start(self, *nodes: int, lacks: Sequence[int] | None = None, reaches: bool = True) -> None:
        for node in nodes:
            self.results[node], result_writer = os.pipe()
            self.processes[node] = os.fork()
            if self.processes[node] == 0:
                with ending():
                    self._be(node, range(len(self.layers)) if lacks is None else lacks, result_writer, reaches)
            os.close(result_writer)

    def _be(self, node: int, lacks: Sequence[int], result_writer: int, reaches: bool) -> None:
        spool = Spool([len(blob) for blob in self.layers], list(lacks), str(self.directory))

        def fetch(blob: int, start: int) -> Iterator[bytes]:
            if not reaches:
                raise RegistryError("no route")
            (self.directory / f"{blob}.{node}.{os.getpid()}").touch()
            for at in range(start, len(self.layers[blob]), 1 << 20):
                time.sleep(0.01)
                yield self.layers[blob][at : at + (1 << 20)]

        os.setpgid(0, 0)
        if os.fork() == 0:
            loop = Loop(self.swarm, node)
            PeerProcess(loop, answered(loop, self.port, self.host), spool, fetch).run()
            return
        while any(spool.available(blob) < spool.sizes[blob] for blob in lacks):
            time.sleep(0.02)
        whole = [spool.read(blob, spool.sizes[blob], 0) for blob in lacks]
        os.write(result_writer, json.dumps([hashlib.sha256(blob).hexdigest() for blob in whole]).encode())
        os.wait()

    def kill(self, node: int, sign: int) -> None:
        """Send a signal to all processes of a node."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.processes[node], sign)

    def result(self, node: int) -> list[str]:
        """Wait until a node has every blob, and return the digests."""
        assert readable(self.results[node], _TIME), f"node {node} does not get the blobs that it lacks"
        return list(json.loads(os.read(self.results[node], 65536) or b"[]"))

    def all_get_the_image(self, *nodes: int) -> bool:
        return [self.result(node) for node in nodes] == [image_digests(self)] * len(nodes)

    @property
    def requests(self) -> list[int]:
        """Return the number of the requested blob, for each request to the registry."""
        return sorted(int(path.name.split(".")[0]) for path in self.directory.iterdir())

    def close(self) -> None:
        os.close(self.life)
        for node, process in self.processes.items():
            self.kill(node, signal.SIGKILL)
            os.waitpid(process, 0)
        os.kill(self.tracker_process, signal.SIGKILL)
        os.waitpid(self.tracker_process, 0)
        for result in self.results.values():
            os.close(result)


@contextlib.contextmanager
def ending() -> Iterator[None]:
    """Exit the process after the block, also after an exception."""
    try:
        yield
    finally:
        os._exit(0)


@contextlib.contextmanager
def forked(work: Callable[[], object]) -> Iterator[None]:
    """Call ``work`` in a process, and kill the process at the end of the block."""
    if (process := os.fork()) == 0:
        with ending():
            work()
    try:
        yield
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


def answered(loop: Loop, port: int, host: str = "127.0.0.1") -> Connection:
    """Connect to the tracker, wait for its answer, and return the connection."""

    def stop(*_: object) -> None:
        loop.running = False

    connection = connect_to_tracker(loop, port, stop, host=host)
    connection.on_close = stop
    loop.run()
    loop.running = True
    return connection


def connect_to_tracker(
    loop: Loop,
    port: int,
    on_message: Callable[[Mapping[str, object]], None],
    *,
    lacks: bool = True,
    host: str = "127.0.0.1",
) -> Connection:
    """Return a connection to the tracker. When the connection is ready, the node announces itself on it."""
    connection = loop.connect("t", (host, port))
    connection.max_bytes = wire.MAX_TRACKER_BYTES
    connection.on_message = on_message
    connection.on_ready = lambda: connection.send({"is": "Come", "lacks": lacks})
    return connection


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Lab]]:
    labs: list[Lab] = []

    def lab(sizes: Sequence[int], nodes: int, host: str = "127.0.0.1") -> Lab:
        labs.append(Lab(tmp_path, blobs(sizes), nodes, host))
        return labs[-1]

    yield lab
    for created in labs:
        created.close()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevent the tracker from treating a node as slow or stalled, because this host may be busy."""
    monkeypatch.setattr(fetchers, "COMPARE_AFTER_S", 1e9)
    monkeypatch.setattr(tracker, "STALLED_AFTER_S", 1e9)


SIZES = (9_000_000, 3_000_001, 1, 300_000)


def image_digests(lab: Lab, lacks: Sequence[int] | None = None) -> list[str]:
    return [hashlib.sha256(lab.layers[blob]).hexdigest() for blob in lacks or range(len(lab.layers))]


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("nodes", [1, 2, 3, 6])
def test_each_blob_is_fetched_once_for_all_nodes(make: Callable[..., Lab], nodes: int) -> None:
    lab = make(SIZES, nodes)
    lab.start(*range(nodes))
    assert lab.all_get_the_image(*range(nodes))
    assert lab.requests == [0, 1, 2, 3]


@pytest.mark.usefixtures("patient")
@pytest.mark.skipif(not os.path.exists("/proc/net/if_inet6"), reason="this kernel has no IPv6")
def test_nodes_share_blobs_by_ipv6(make: Callable[..., Lab]) -> None:
    """A node connects to another node at the address that the tracker sees, which is an IPv6 address here."""
    lab = make(SIZES, 3, "::1")
    lab.start(*range(3))
    assert lab.all_get_the_image(*range(3))
    assert lab.requests == [0, 1, 2, 3]


@pytest.mark.usefixtures("patient")
def test_nodes_download_only_what_they_lack(make: Callable[..., Lab]) -> None:
    lab = make(SIZES, 4)
    wants = [[0, 1, 2, 3], [3], [2, 3], [0, 1, 2, 3]]
    for node, lacks in enumerate(wants):
        lab.start(node, lacks=lacks)
    assert [lab.result(node) for node in range(4)] == [image_digests(lab, lacks) for lacks in wants]
    assert lab.requests == [0, 1, 2, 3]


@pytest.mark.security("N2")
@pytest.mark.soak
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
def test_dead_or_stopped_nodes_do_not_stop_the_others(
    tmp_path: Path, rng: random.Random, soak: bool, sign: int
) -> None:
    """Kill or stop two of six nodes at a random moment of the transfer."""
    for _ in range(50 if soak else 2):
        with contextlib.closing(Lab(tmp_path, blobs((30_000_000, 5_000_000)), 6)) as lab:
            lab.start(*range(6))
            time.sleep(rng.random() * 0.4)
            ended = rng.sample(range(6), 2)
            for node in ended:
                lab.kill(node, sign)
            assert lab.all_get_the_image(*set(range(6)) - set(ended))


def test_late_node_gets_the_image(make: Callable[..., Lab]) -> None:
    lab = make(SIZES, 3)
    lab.start(*range(2))
    time.sleep(1.0)
    lab.start(2)
    assert lab.all_get_the_image(*range(3))


def test_node_with_a_route_fetches_for_all(make: Callable[..., Lab]) -> None:
    """Only one of three nodes reaches the registry."""
    lab = make(SIZES, 3)
    lab.start(0, 1, reaches=False)
    lab.start(2)
    assert lab.all_get_the_image(*range(3))


def test_nodes_go_on_without_a_tracker(make: Callable[..., Lab]) -> None:
    lab = make((30_000_000,), 3)
    lab.start(*range(3))
    time.sleep(0.7)
    os.kill(lab.tracker_process, signal.SIGKILL)
    assert lab.all_get_the_image(*range(3))


# -- attacks; a stranger is a connection that has not proved to be a member of the swarm


def stranger(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=_TIME)


class Talk:
    """A TLS connection as a member of the swarm, which can send arbitrary messages."""

    def __init__(
        self, sock: socket.socket, node: int = 1, role: str = "t", swarm: tuple[bytes, str] = (KEY, CONTEXT)
    ) -> None:
        self._sock, self._in = sock, bytearray()
        self._end = End(role, node, swarm)
        self.sent: list[bytes] = []

    def send(self) -> None:
        """Send the bytes that TLS wants to send."""
        self.sent.append(self._end.pending())
        self._sock.sendall(self.sent[-1])

    def is_admitted(self) -> bool:
        try:
            self.send()
            return self.receive()["is"] == "Hello"
        except (EOFError, ConnectionError):
            return False

    def send_message(self, message: Mapping[str, object]) -> None:
        self.send_plain(wire.frame(message))

    def send_plain(self, data: bytes) -> None:
        self._end.send(data)
        self.send()

    def read(self) -> bytes:
        """Read from the socket once. Return all bytes that receive() has not yet consumed. Raises EOFError."""
        data = self._sock.recv(65536)
        if not data:
            raise EOFError
        self._in += self._end.receive(data)
        self.send()
        return bytes(self._in)

    def receive(self) -> Mapping[str, object]:
        """Return the next message. Raises EOFError."""
        while (message := wire.unframe(self._in, wire.MAX_TRACKER_BYTES)) is None:
            self.read()
        return message


@contextlib.contextmanager
def admitted(port: int, role: str = "t") -> Iterator[tuple[socket.socket, Talk]]:
    """Connect as a member, and check that the other end admits the member."""
    with stranger(port) as sock:
        talk = Talk(sock, role=role)
        assert talk.is_admitted()
        yield sock, talk


def is_closed(sock: socket.socket) -> bool:
    """Read until the other end has closed the connection, and return True."""
    with contextlib.suppress(ConnectionError):
        while sock.recv(65536):
            pass
    return True


@pytest.mark.security("N1")
def test_silent_connection_is_closed(make: Callable[..., Lab]) -> None:
    lab = make(SIZES, 2)
    began = time.monotonic()
    with stranger(lab.port) as silent, stranger(lab.port) as slow:
        slow.sendall(b"\x16\x03\x01\x02")  # the first bytes of a ClientHello
        assert is_closed(silent)
        assert is_closed(slow)
        assert time.monotonic() - began >= loops.ACCEPT_TIMEOUT_S - 0.2


@pytest.mark.security("N1")
def test_many_strangers_do_not_keep_members_out(make: Callable[..., Lab]) -> None:
    lab = make(SIZES, 2)
    with contextlib.ExitStack() as crowd:
        strangers = [crowd.enter_context(stranger(lab.port)) for _ in range(loops.MAX_STRANGERS + 40)]
        lab.start(*range(2))
        assert lab.all_get_the_image(*range(2))
        assert all(map(is_closed, strangers))


# The ClientHello of an attacker with another key
HELLO = End("t", 1, (b"x" * 32, CONTEXT)).pending()


def flood(port: int, network: str, address: str) -> None:
    """Connect from thousands of addresses, send nothing or nonsense, and hold as many connections as possible."""
    _, max_descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max_descriptors, max_descriptors))
    held: deque[socket.socket] = deque()
    for number in itertools.count():
        source = f"{network}.{number // 250 % 250}.{1 + number % 250}"
        sock = socket.socket()
        sock.setblocking(False)
        with contextlib.suppress(OSError):  # the kernel's queue may be full
            sock.bind((source, 0))
            sock.connect_ex((address, port))
            if number % 3:
                sock.send(HELLO if number % 2 else b"GET / HTTP/1.1\r\n\r\n")
        held.append(sock)
        if len(held) > 2000:
            held.popleft().close()


@contextlib.contextmanager
def flooded(port: int, network: str, address: str) -> Iterator[None]:
    """Flood a port with two processes during the block."""
    attack = partial(flood, port, network, address)
    with forked(attack), forked(attack):
        time.sleep(1)
        yield


def admits_member(port: int, address: str, role: str = "t", node: int = 1) -> bool:
    """Return whether a member is admitted within the number of tries that a node makes."""
    for _ in range(3):
        with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=20) as sock:
            if Talk(sock, node, role).is_admitted():
                sock.settimeout(0.2)
                with contextlib.suppress(TimeoutError):
                    if not sock.recv(1):
                        continue  # the connection was closed
                return True
    return False


def alone(act: Callable[[str], bool]) -> bool:
    """Call ``act`` with an address of a network namespace that has only 10.0.0.0/8, on lo. Return the result."""
    child = os.fork()
    if child == 0:
        try:
            linux.unshare(linux.CLONE_NEWUSER | linux.CLONE_NEWNET)
            with IPRoute() as kernel:
                kernel.link("set", index=1, state="up")
                kernel.route("add", dst="10.0.0.0/8", oif=1, type="local", table=255, scope=254)
            os._exit(0 if act("10.0.0.1") else 1)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(2)
    return os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("127.0.0.1", "127.200.3.4", True),
        ("127.0.0.1", "::1", True),
        ("fd00::1", "fd00::ffff:ffff:ffff:ffff", True),
        ("fd00::1", "fd00:0:0:1::1", False),
        ("10.0.0.1", "10.0.0.2", False),
    ],
)
def test_addresses_of_one_user_are_one_neighbourhood(one: str, other: str, same: bool) -> None:
    """All loopback addresses count as one address, and so does an IPv6 network of 64 bits: one user may hold them."""
    assert (loops.neighbourhood(one) == loops.neighbourhood(other)) is same


@pytest.mark.security("N1")
@pytest.mark.parametrize(("role", "network"), [("t", "127.9"), ("p", "10.9")], ids=["tracker", "node"])
def test_flood_from_many_addresses_keeps_no_member_out(role: str, network: str) -> None:
    def attack(address: str) -> bool:
        loop = Loop(Swarm(KEY, CONTEXT, 40), TRACKER)
        port = loop.listen(role, listener(), lambda member: None)
        with forked(loop.run), flooded(port, network, address):
            return all(admits_member(port, address, role, node) for node in range(3))

    assert attack("127.0.0.1") if network == "127.9" else alone(attack)


@pytest.mark.security("N1")
@pytest.mark.parametrize("wrong", [{"swarm": (b"x" * 32, CONTEXT)}, {"swarm": (KEY, "7.1")}, {"role": "p"}])
def test_member_of_another_swarm_learns_nothing(make: Callable[..., Lab], wrong: dict[str, Any]) -> None:
    """The answer is a TLS alert without a certificate, not even an encrypted one."""
    lab = make(SIZES, 2)
    with stranger(lab.port) as sock:
        Talk(sock, **wrong).send()
        received = b""
        with contextlib.suppress(ConnectionError):
            while data := sock.recv(65536):
                received += data
        assert received[:1] in (b"", b"\x15") and len(received) < 8  # an alert, RFC 8446
    lab.start(*range(2))
    assert lab.result(0) == image_digests(lab)


@pytest.mark.security("N1")
def test_replayed_bytes_of_a_member_are_refused(make: Callable[..., Lab]) -> None:
    lab = make(SIZES, 2)
    with admitted(lab.port) as (_, first):
        first.send_message({"is": "Come", "lacks": True})
        assert first.receive()["is"] == "Documents"
    with stranger(lab.port) as sock:
        for each in first.sent:
            with contextlib.suppress(ConnectionError):
                sock.sendall(each)
        assert is_closed(sock)


@pytest.mark.security("N2")
@pytest.mark.parametrize(
    "message",
    [
        {"is": "Come"},
        {"is": "Report", "got": [1], "fetched": 0, "done": False},
        {"is": "Come", "lacks": "x"},
        {},
        {"is": "Come", "lacks": True, "fill": "x" * wire.MAX_PEER_BYTES},
    ],
)
def test_bad_message_ends_only_its_connection(make: Callable[..., Lab], message: dict[str, object]) -> None:
    lab = make(SIZES, 3)
    with admitted(lab.port) as (sock, talk):
        talk.send_message(message)
        assert is_closed(sock)
    lab.start(0, 2)
    assert lab.all_get_the_image(0, 2)


@pytest.mark.security("N2")
@pytest.mark.parametrize(
    "message",
    [
        {"is": "Joined", "address": ["", 0], "lacks": [0], "has": [], "name": ""},
        {"is": "Joined", "address": ["", 9], "lacks": [99], "has": [], "name": ""},
        {"is": "Joined", "address": ["", 9], "lacks": [0], "has": [4], "name": ""},
        {"is": "Joined", "address": ["", 9], "lacks": list(range(100000)), "has": [], "name": ""},
        {"is": "Complaint", "tree": 1 << 40, "parent": 1 << 40, "reached": True, "got": [0]},
        {"is": "Report", "got": [], "fetched": -1, "done": True},
        {"is": "Failed", "blobs": [7], "refused": False, "reason": "", "hint": ""},
    ],
)
def test_false_message_harms_only_its_sender(make: Callable[..., Lab], message: dict[str, object]) -> None:
    lab = make(SIZES, 3)
    lab.start(0)
    with admitted(lab.port) as (_, talk):
        talk.send_message({"is": "Come", "lacks": True})
        assert talk.receive()
        with contextlib.suppress(ConnectionError):  # a long message ends the connection before all of it is sent
            talk.send_message(message)
        lab.start(2)
        assert lab.all_get_the_image(0, 2)


def test_one_node_that_lacks_the_image_gets_the_reason(make: Callable[..., Lab]) -> None:
    """Only a node that lacks the image fails and prints the reason, so the tracker sends the reason to one of these."""
    lab = make((), 3)
    messages: dict[int, Mapping[str, object]] = {}
    announced: list[int] = []
    loops = [Loop(lab.swarm, node) for node in range(3)]
    for node, loop in enumerate(loops):
        connection = connect_to_tracker(loop, lab.port, partial(messages.__setitem__, node), lacks=node > 0)
        announce = connection.on_ready
        connection.on_ready = lambda announce=announce, node=node: (announce(), announced.append(node))
        until(loop, lambda node=node: node in announced)
    for node, loop in enumerate(loops):
        until(loop, lambda node=node: node in messages)
    assert messages[0]["reason"] == ""
    assert sorted((messages[1]["reason"], messages[2]["reason"])) == ["", "no such image"]


@pytest.mark.security("N2")
def test_peer_that_does_not_read_is_closed() -> None:
    """If more data waits for a peer than a limit allows, the connection to this peer is closed."""
    loop = Loop(Swarm(KEY, CONTEXT, 2), TRACKER)
    accepted: list[Connection] = []
    reasons: list[str] = []
    with stranger(loop.listen("t", listener(), accepted.append)) as deaf:
        with attacking(Talk(deaf).is_admitted):
            until(loop, lambda: accepted)
        accepted[0].on_close = reasons.append
        for _ in range(200):
            accepted[0].send({"fill": "x" * (1 << 20)})
            if reasons:
                break
        assert reasons == ["too much unread data"]


@pytest.mark.security("N2")
def test_peer_that_does_not_read_costs_no_memory(tmp_path: Path) -> None:
    size, piece = 1 << 30, 1 << 20
    uploaded = 0
    with open(tmp_path / "blob", "wb+") as blob:
        blob.truncate(size)
        loop = Loop(Swarm(KEY, CONTEXT, 2), 0)

        def serve(connection: Connection) -> None:
            def more() -> bool:
                nonlocal uploaded
                uploaded += piece
                connection.send_file(b"", blob.fileno(), uploaded - piece, piece)
                return uploaded <= size

            connection.send_more = more
            connection.wake()

        port = loop.listen("p", listener(), serve)
        with stranger(port) as deaf, attacking(Talk(deaf, role="p").is_admitted) as attack:
            until(loop, lambda: not attack.is_alive() and uploaded)
            before = -1
            while uploaded != before:  # repeat until all buffers are full
                before = uploaded
                until_later(loop)
            assert uploaded < size / 4


@pytest.fixture
def members() -> Iterator[Callable[..., Members]]:
    """Return a function that creates Members."""
    with contextlib.ExitStack() as stack:
        yield lambda role, max_connections: stack.enter_context(contextlib.closing(Members(role, max_connections)))


class Members:
    """A listening tracker or peer in a swarm of three nodes. It serves connections only during connect()."""

    def __init__(self, role: str, max_connections: int) -> None:
        self.role, self.loop = role, Loop(Swarm(KEY, CONTEXT, 3), TRACKER)
        self.connections: list[Connection] = []
        self.port = self.loop.listen(role, listener(), self.connections.append, max_connections)
        self._clients: list[socket.socket] = []

    def connect(self, node: int, source: str = "127.0.0.1", *, ends: bool = True) -> socket.socket:
        """Connect as a member. Complete the handshake only if ``ends`` is true."""
        client = socket.create_connection(("127.0.0.1", self.port), _TIME, (source, 0))
        self._clients.append(client)
        talk = Talk(client, node, self.role)
        if ends:
            with attacking(talk.is_admitted) as thread:
                until(self.loop, lambda: not thread.is_alive())
        else:
            talk.send()
            until(self.loop, lambda: readable(client.fileno(), 0))
            with contextlib.suppress(ConnectionError):
                client.recv(65536)
        return client

    @property
    def open(self) -> list[int]:
        """Return the number of the node of each open connection."""
        return [member.node for member in self.connections if not member._closed]

    def close(self) -> None:
        for client in self._clients:
            client.close()


@pytest.mark.parametrize(("role", "max_connections"), [("t", 1), ("p", 2)])
def test_node_has_no_more_connections_than_it_needs(
    members: Callable[..., Members], role: str, max_connections: int
) -> None:
    lobby = members(role, max_connections)
    first = lobby.connect(1)
    for _ in range(9):
        lobby.connect(1)
    lobby.connect(2)
    assert sorted(lobby.open) == [1] * max_connections + [2]
    assert not readable(first.fileno(), 0)  # later connections have not closed the first one
    first.close()
    until(lobby.loop, lambda: len(lobby.open) == max_connections)
    lobby.connect(1)
    assert sorted(lobby.open) == [1] * max_connections + [2]


@pytest.mark.security("N1")
@pytest.mark.parametrize("role", ["t", "p"])
def test_number_of_a_node_belongs_to_its_host(members: Callable[..., Members], role: str) -> None:
    """A connection of node 1 from another address is closed, even after the first connection has ended."""
    lobby = members(role, 2)
    first = lobby.connect(1)
    assert is_closed(lobby.connect(1, "127.0.0.2"))
    first.close()
    until(lobby.loop, lambda: not lobby.open)
    assert is_closed(lobby.connect(1, "127.0.0.2"))
    lobby.connect(1)
    lobby.connect(2, "127.0.0.2")
    assert sorted(lobby.open) == [1, 2]


@pytest.mark.parametrize(("role", "node"), [("t", 3), ("t", TRACKER), ("p", 3), ("p", SEED), ("p", TRACKER)])
def test_unknown_node_number_is_refused(members: Callable[..., Members], role: str, node: int) -> None:
    lobby = members(role, 1)
    assert is_closed(lobby.connect(node)) and not lobby.connections


@pytest.mark.parametrize("role", ["t", "p"])
def test_repeated_first_message_holds_little(members: Callable[..., Members], role: str) -> None:
    """An eavesdropper can repeat a node's first message many times. The node itself is still admitted."""
    lobby = members(role, 1)
    repeated = [lobby.connect(1, ends=False) for _ in range(20)]
    assert sum(readable(sock.fileno(), 0) for sock in repeated) >= 20 - loops.MAX_UNFINISHED
    assert len(lobby.loop._deadlines) == loops.MAX_UNFINISHED
    lobby.connect(1)
    assert lobby.open == [1]


@contextlib.contextmanager
def attacking(attack: Callable[[], object]) -> Iterator[threading.Thread]:
    """Run an attack in a thread, and wait for its end after the block."""
    thread = threading.Thread(target=attack)
    thread.start()
    yield thread
    thread.join(_TIME)


def until_later(loop: Loop) -> None:
    """Serve for half a second."""
    end = time.monotonic() + 0.5
    until(loop, lambda: time.monotonic() > end)


def endless(sock: socket.socket) -> None:
    talk = Talk(sock)
    assert talk.is_admitted()
    talk.send_plain((1 << 31).to_bytes(4, "big"))
    while True:
        talk.send_plain(bytes(1 << 16))


def sends(data: bytes) -> Callable[[socket.socket], None]:
    return lambda sock: sock.sendall(data)


def has_another(**wrong: Any) -> Callable[[socket.socket], None]:
    return lambda sock: Talk(sock, **wrong).send()


def knows_the_name(
    identity: Identity | None = None, version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3
) -> Callable[[socket.socket], None]:
    """Return an attack with a member's server name, which eavesdroppers see, and the certificate of ``identity``."""

    def attack(sock: socket.socket) -> None:
        context = (
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if identity is None else identity._context(ssl.PROTOCOL_TLS_CLIENT)
        )
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.minimum_version = context.maximum_version = version
        name = Identity(KEY, CONTEXT)._name("t1")
        with contextlib.suppress(OSError), context.wrap_socket(sock.dup(), server_hostname=name) as wrapped:
            wrapped.recv(1)

    return attack


ATTACKS = {
    "a wrong key": (has_another(swarm=(b"x" * 32, CONTEXT)), "the server name is of another swarm"),
    "a wrong step": (has_another(swarm=(KEY, "7.1")), "the server name is of another swarm"),
    "a wrong role": (has_another(role="p"), "the server name is of another swarm"),
    "another step's certificate": (knows_the_name(Identity(KEY, "7.1")), "certificate verify failed"),
    "no certificate": (knows_the_name(), "peer did not return a certificate"),
    "an older TLS": (knows_the_name(version=ssl.TLSVersion.TLSv1_2), "unsupported protocol"),
    "its own node": (has_another(node=0), "the other end claims this node's number"),
    "a stranger": (sends(b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n" + bytes(64)), "not a member of this swarm"),
    "an endless message": (endless, "a message of 2147483648 bytes"),
    "silence": (sends(b""), "the handshake takes too long"),
}


@pytest.mark.security("N1")
@pytest.mark.parametrize("name", ATTACKS)
def test_attack_is_one_debug_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attack, why = ATTACKS[name]
    lines: list[tuple[str, str]] = []
    monkeypatch.setattr(log, "_debug", True)
    monkeypatch.setattr(log, "sink", lambda level, text: lines.append((level, text)))
    loop = Loop(Swarm(KEY, CONTEXT, 2), 0)
    with stranger(loop.listen("t", listener(), lambda member: None)) as attacker:

        def attempt() -> None:
            with contextlib.suppress(ConnectionError):
                attack(attacker)
            is_closed(attacker)

        with attacking(attempt) as thread:
            until(loop, lambda: not thread.is_alive())
    assert [level for level, _ in lines] == ["DEBUG"], lines
    assert lines[0][1].startswith("swarm: 127.0.0.1: ")
    assert why in lines[0][1]


class Member:
    """A hostile node of three, which has the key. It lacks the last blob, and can send any request to its parent."""

    def __init__(self, lab: Lab) -> None:
        self._sock = stranger(lab.port)
        self._talk = Talk(self._sock)
        assert self._talk.is_admitted()
        self._talk.send_message({"is": "Come", "lacks": True})
        assert self._talk.receive()["is"] == "Documents"
        self._talk.send_message(wire.encode(Joined(("", 9), (3,))))
        links: list[list[object]] = []
        while not links:
            message = self._talk.receive()
            self.trees, links = message.get("trees"), message.get("links", [])  # type: ignore[assignment]
        _, self.parent, (host, self.port), _ = links[0]
        assert host == "127.0.0.1"

    def connect(self) -> tuple[socket.socket, Talk]:
        """Connect to the parent, the node that sends blobs to this one."""
        sock = stranger(int(str(self.port)))
        return sock, Talk(sock, role="p")

    def ask(self, message: Mapping[str, object]) -> tuple[socket.socket, Talk]:
        """Connect to the parent and send a request."""
        sock, talk = self.connect()
        assert talk.is_admitted()
        talk.send_message(message)
        return sock, talk

    def close(self) -> None:
        self._sock.close()


@pytest.mark.security("N2")
def test_bad_request_before_the_plan_ends_only_the_child(tmp_path: Path) -> None:
    """A peer keeps a request until it knows the tracker's plan (who sends to whom). Then it refuses a bad request."""
    loop, messages = Loop(Swarm(KEY, CONTEXT, 3), TRACKER), list[Mapping[str, object]]()
    peers: list[Connection] = []
    reasons: list[str] = []

    def accept(peer: Connection) -> None:
        peers.append(peer)
        peer.on_message = messages.append
        peer.on_close = reasons.append

    tracker_port = loop.listen("t", listener(), accept)

    def be_peer() -> None:
        loop = Loop(Swarm(KEY, CONTEXT, 3), 0)
        tracker = answered(loop, tracker_port)
        PeerProcess(loop, tracker, Spool([1000], [0], str(tmp_path)), lambda blob, start: iter(())).run()

    with forked(be_peer):
        until(loop, lambda: messages)
        peers[0].send({"is": "Documents"})
        until(loop, lambda: len(messages) > 1)
        with admitted(messages[1]["address"][1], "p") as (member, talk):  # type: ignore[index]
            for message in ({"is": "Take", "tree": 99, "trees": 9, "wanted": [[0, 0]]},) * 2:
                talk.send_message(message)
            until_later(loop)
            peers[0].send(wire.encode(Routes(1, (0,), False, ())))
            until(loop, lambda: readable(member.fileno(), 0) or reasons)
            assert is_closed(member)
        before = len(messages)
        until(loop, lambda: len(messages) > before or reasons)
        assert messages[-1]["is"] == "Report" and not reasons


@pytest.mark.security("N2")
@pytest.mark.usefixtures("patient")  # without it, the silence of this node would finally make the others leave
@pytest.mark.parametrize(
    "message",
    [
        {"is": "Take", "tree": 99, "trees": 1, "wanted": []},
        {"is": "Take", "tree": 0, "trees": 99, "wanted": [[0, 0]]},
        {"is": "Take", "tree": 0, "trees": 1, "wanted": "all"},
        {"is": "Take", "tree": 0, "trees": 1, "wanted": [["sha256:" + "0" * 64, 0]]},
        {"is": "Take", "tree": 0, "trees": 1, "wanted": [[0, -1]]},
        {"is": "Give"},
        {"is": "Take", "tree": 0, "trees": 1, "wanted": [], "fill": "x" * wire.MAX_PEER_BYTES},
    ],
)
def test_bad_request_of_a_child_ends_its_connection(make: Callable[..., Lab], message: dict[str, object]) -> None:
    lab = make(SIZES, 3)
    lab.start(0, 2)
    with contextlib.closing(Member(lab)) as member, member.ask(message)[0] as sock:
        assert is_closed(sock)
        assert lab.all_get_the_image(0, 2)


@pytest.mark.security("N2")
def test_request_for_an_unknown_blob_is_ignored(make: Callable[..., Lab]) -> None:
    """If a request names an unknown and a known blob, the parent sends the known one."""
    lab = make(SIZES, 3)
    lab.start(0, 2)
    with contextlib.closing(Member(lab)) as member:
        take = {"is": "Take", "tree": 0, "trees": member.trees, "wanted": [[99, 0], [3, 0]]}
        sock, talk = member.ask(take)
        with sock:
            while len(head := talk.read()) < 12:
                pass
            assert head[:4] == bytes((0, 3, 0, 0))  # blob and tree
        assert lab.all_get_the_image(0, 2)


def test_child_that_does_not_read_delays_no_node(make: Callable[..., Lab]) -> None:
    lab = make((40_000_000, 9_000_000, 1, 300_000), 3)
    lab.start(0, 2)
    with contextlib.closing(Member(lab)) as member:
        wanted = [[blob, 0] for blob in range(4)]
        take = {"is": "Take", "tree": 0, "trees": member.trees, "wanted": wanted}
        with contextlib.ExitStack() as deaf:
            for number in range(20):
                sock, talk = member.connect()
                deaf.enter_context(sock)
                assert talk.is_admitted() == (number < 2)
                if number < 2:
                    talk.send_message(take)
            assert lab.all_get_the_image(0, 2)


@pytest.mark.parametrize(("nodes", "idle_s"), [(2, 3), (10_000, 30)])
def test_ten_thousand_nodes_get_few_pings(nodes: int, idle_s: int) -> None:
    """In a large swarm, TCP keepalive to the tracker is less frequent than in a small one."""
    loop = Loop(Swarm(KEY, CONTEXT, nodes), 0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        for role, seconds in ((loops.TO_TRACKER, idle_s), (loops.TO_PEER, 3)):
            connection = loop.connect(role, server.getsockname())
            with socket.socket(fileno=os.dup(connection.fileno())) as sock:
                assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == seconds
                assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 3000 * seconds
            connection.close()


def test_connection_to_a_silent_host_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "CONNECT_TIMEOUT_S", 0.3)
    loop, reasons = Loop(Swarm(KEY, CONTEXT, 2), 0), list[str]()
    with socket.create_server(("127.0.0.1", 0)) as mute:
        connection = loop.connect("p", mute.getsockname())
        connection.on_close = reasons.append
        until(loop, lambda: reasons)
    assert reasons == ["the handshake takes too long"]


def until(loop: Loop, happens: Callable[[], object]) -> None:
    """Serve until a condition holds."""
    deadline = time.monotonic() + _TIME

    def tick(now: float) -> None:
        assert now < deadline
        loop.running = not happens()

    loop.tick, loop.running = tick, True
    loop.run()


def test_unknown_node_is_refused_beside_the_seed(make: Callable[..., Lab]) -> None:
    """The seed, a peer on srun's host, and the tracker have different numbers. An unknown number is refused."""
    assert SEED != TRACKER
    lab = make(SIZES, 2)
    with stranger(lab.port) as sock:
        assert not Talk(sock, 77).is_admitted(), "no such node: 77"


def test_objects_of_a_parent_close_no_later_file() -> None:
    """In a child, the parent's socket objects still have descriptor numbers, which other files may have by then."""
    ours, other = socket.socketpair()
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            close_others({0, 1, 2, write})
            later = os.open("/proc/self/stat", os.O_RDONLY)
            ours.close()
            other.close()
            os.write(write, b"whole" if os.read(later, 1) else b"")
        finally:
            os._exit(0)
    os.close(write)
    ours.close()
    assert other.recv(1) == b"", "the child still has the socket open"
    other.close()
    with open(read, "rb") as reader:
        assert reader.read() == b"whole"
    os.waitpid(child, 0)
