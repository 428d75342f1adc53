"""Connections of a swarm that are served by one process: sockets, deadlines, and what is still to be sent."""

from __future__ import annotations

import errno
import os
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from ipaddress import ip_address, ip_network
from ssl import SSLContext, SSLSocket, SSLWantReadError, SSLWantWriteError
from typing import TypeVar

from enroot_py.base import log
from enroot_py.features.swarm import ports, wire
from enroot_py.features.swarm.invitation import Swarm
from enroot_py.features.swarm.messages import REPORT_INTERVAL_S, SEED, Address, Hello, report_interval
from enroot_py.features.swarm.tls import Identity
from enroot_py.features.swarm.wire import SHORT, WireError

PATIENCE = 2.0  # seconds for a handshake
LONGER = 10.0  # seconds for one that begins here: the other end may have many to answer
STRANGERS = 256  # connections whose first message proves nothing yet
UNFINISHED = 2  # connections of one node in the middle of a handshake
TURN = 64  # connections to accept before other sockets are served
# Of TCP, tcp(7): seconds without a word until the other end is asked whether it is there, from one question to the
# next, and until it is gone. Between a tracker and its peers, who report, all are longer, as reports are rarer: else
# the questions of ten thousand connections come all at once, and so many of them are dropped that many seem to be gone.
_IDLE, _AGAIN, _GONE = 3, 2, 9
TO_TRACKER, TO_PEER = "t", "p"  # what a connection is for
_RECORD_BYTES = 16 << 10  # what OpenSSL decrypts at once, RFC 8446
_FILE_BYTES = 64 << 10  # to encrypt at once
_READS = 16  # records to read until it is the next connection's turn
_TURN = 4  # pieces to send until it is the next one's turn
_UNHEARD = 64 << 20  # bytes that one may be behind with


def listener(at: range = range(1)) -> socket.socket:
    """See ports.listener."""
    return socket.socket(fileno=ports.listener(at).detach())


class Loop:
    """All sockets of a process, until ``running`` is set to False. ``tick`` is called TICKS times in a second."""

    TICKS = 10

    def __init__(self, swarm: Swarm, node: int, at: range = range(1)) -> None:
        """``at``: the ports at which it may listen itself. Raises ConfigError, see tls.Identity."""
        self.swarm, self.node, self.ports = swarm, node, at
        self._networks = [ip_network(network) for network in swarm.networks.split(",") if network]
        self._identity = Identity(swarm.key, swarm.context)
        self.running = True
        self.tick: Callable[[float], None] = lambda now: None
        self._selector = selectors.DefaultSelector()
        self._strangers: dict[str, dict[Connection, None]] = {}  # by neighbourhood
        self._unfinished: dict[
            int, dict[Connection, None]
        ] = {}  # by node, after a first message that only members can derive
        self._members: dict[int, dict[Connection, None]] = {}  # by node, after the handshake
        self._hosts: dict[int, str] = {}  # by node: the host of its first handshake
        self._deadlines: dict[Connection, float] = {}  # of handshakes, those of strangers among them
        self._served = 0.0  # seconds, but those in which others waited for this process
        self._resting: list[tuple[int, Callable[[int], None]]] = []  # listeners, until the next tick

    def run(self) -> None:
        """Serve until ``running`` is False."""
        ticked = time.monotonic()
        while self.running:
            for key, events in self._selector.select(max(0.0, ticked + 1 / self.TICKS - time.monotonic())):
                now_there = self._selector.get_map().get(key.fd)
                if now_there is not None and now_there.data == key.data:  # else it ended a moment ago
                    key.data(events)
            now = time.monotonic()
            if now >= ticked + 1 / self.TICKS:
                self._served += min(now - ticked, 2 / self.TICKS)
                ticked = now
                while self._resting:
                    fd, serve = self._resting.pop()
                    self.watch(fd, selectors.EVENT_READ, serve)
                for other in [other for other, deadline in self._deadlines.items() if self._served > deadline]:
                    other.fail("it does not say who it is")
                self.tick(now)

    def fileno(self) -> int:
        return self._selector.fileno()

    def abandon(self) -> None:
        """See Connection.abandon."""
        self._selector.close()

    def watch(self, fd: int, events: int, serve: Callable[[int], None]) -> None:
        """Have ``serve`` called for events of a descriptor, or, with none, no more."""
        if fd not in self._selector.get_map():
            if events:
                self._selector.register(fd, events, serve)
        elif events:
            self._selector.modify(fd, events, serve)
        else:
            self._selector.unregister(fd)

    def listen(self, role: str, listener: socket.socket, accept: Callable[[Connection], None], most: int = 1) -> None:
        """Let others connect, each node ``most`` times. ``accept`` is told of each that has proved who it is."""
        listener.setblocking(False)
        context = self._identity.listening(role)

        def serve(events: int) -> None:
            try:
                for _ in range(TURN):
                    self._admit(role, context, *listener.accept(), accept, most)
            except OSError as e:
                if e.errno not in (errno.EAGAIN, errno.ECONNABORTED):
                    log.debug(f"swarm: {e}")
                    self.watch(listener.fileno(), 0, serve)
                    self._resting.append((listener.fileno(), serve))

        self.watch(listener.fileno(), selectors.EVENT_READ, serve)

    def _admit(
        self,
        role: str,
        context: SSLContext,
        sock: socket.socket,
        address: tuple[str, int],
        accept: Callable[[Connection], None],
        most: int,
    ) -> None:
        """Listen to one who has connected, for a while."""
        sock.setblocking(False)
        host = address[0].removeprefix("::ffff:")
        if not self.admits(host):
            log.debug(f"swarm: {host}: of no network of the swarm")
            sock.close()
            return
        try:
            end = context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        except OSError as e:
            log.debug(f"swarm: {host}: {e}")
            return  # the socket is closed
        connection = Connection(self, end, host, self._identity, self._patience(role))

        def ready() -> None:
            self._let_in(connection, most)
            accept(connection)

        connection.ready = ready
        connection.claims = lambda node: self._claimed(connection, role, node)
        connection.neighbourhood = neighbourhood(host)
        self._strangers.setdefault(connection.neighbourhood, {})[connection] = None
        self._deadlines[connection] = self._served + PATIENCE
        connection.look()  # a member's first message is mostly there already
        if sum(map(len, self._strangers.values())) > STRANGERS:
            # Close the oldest stranger of the neighbourhood that has the most.
            crowd = max(self._strangers.values(), key=len)
            next(iter(crowd)).fail("too many that do not say who they are")

    def _claimed(self, connection: Connection, role: str, node: int) -> None:
        """Promote a stranger whose first message only a member can derive, as ``node``. Raises WireError."""
        if node == self.node:
            raise WireError("it is this node itself")
        is_seed = node == SEED and role == TO_TRACKER and ip_address(connection.host).is_loopback
        if not (node < self.swarm.nodes or is_seed):
            raise WireError(f"there is no node {node}")
        self._check_host(connection, node)
        _drop(self._strangers, connection.neighbourhood, connection)
        unfinished = self._unfinished.setdefault(node, {})
        if len(unfinished) >= UNFINISHED:  # somebody may repeat what the node has sent
            next(iter(unfinished)).fail("another connection of its node begins")
        self._unfinished.setdefault(node, {})[connection] = None

    def _let_in(self, connection: Connection, most: int) -> None:
        """Let in a member whose handshake is complete, and bind its node's number to its host. Raises WireError."""
        node = connection.node
        self._check_host(connection, node)
        self._hosts[node] = connection.host
        members = self._members.setdefault(node, {})
        if len(members) >= most:
            raise WireError(f"node {node} is there already")
        members[connection] = None

    def _check_host(self, connection: Connection, node: int) -> None:
        host = self._hosts.get(node, connection.host)
        if host != connection.host:
            raise WireError(f"node {node} is at {host}")

    def connect(self, role: str, address: Address) -> Connection:
        """A connection on its way; it fails later, if it does."""
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setblocking(False)
        if self.admits(address[0]):  # else it fails at once, as what is not connected does
            sock.connect_ex(address)
        connection = Connection(self, sock, address[0], self._identity, self._patience(role), role)
        self._deadlines[connection] = self._served + LONGER
        return connection

    def _patience(self, role: str) -> float:
        return report_interval(self.swarm.nodes) / REPORT_INTERVAL_S if role == TO_TRACKER else 1.0

    def admits(self, host: str) -> bool:
        """Whether an address is in a network of the swarm."""
        address = ip_address(host)
        return not self._networks or address.is_loopback or any(address in network for network in self._networks)

    def is_known(self, connection: Connection) -> None:
        """It has proved who it is, or has ended."""
        _drop(self._strangers, connection.neighbourhood, connection)
        _drop(self._unfinished, connection.claimed, connection)
        self._deadlines.pop(connection, None)

    def has_ended(self, connection: Connection) -> None:
        self.is_known(connection)
        _drop(self._members, connection.node, connection)


_Key = TypeVar("_Key")


def _drop(groups: dict[_Key, dict[Connection, None]], key: _Key, connection: Connection) -> None:
    """Take a connection out of its group, if it is there."""
    group = groups.get(key, {})
    group.pop(connection, None)
    if not group:
        groups.pop(key, None)


def neighbourhood(host: str) -> str:
    """Return the name of a group of addresses that one user may hold: loopback, or a /64 of IPv6."""
    address = ip_address(host)
    if address.is_loopback:
        return "loopback"
    return host if address.version == 4 else str(int(address) >> 64)


def _nothing(*_: object) -> None:
    """Nobody is interested."""


def _no_more() -> bool:
    return False


class Connection:
    """One socket. Whoever uses it sets ``ready``, ``heard`` (a message), ``gone``, and the two for pieces."""

    def __init__(
        self, loop: Loop, sock: socket.socket, host: str, identity: Identity, patience: float = 1.0, role: str = ""
    ) -> None:
        """``patience``: how many times longer than usually nothing may come from the other end.

        With a ``role`` this end connects, and TLS begins when the socket is connected.
        """
        self.host = host
        self.most = SHORT
        self.ready: Callable[[], None] = _nothing
        self.heard: Callable[[Mapping[str, object]], None] = _nothing
        self.gone: Callable[[str], None] = _nothing
        self.claims: Callable[[int], None] = _nothing  # called with the node number after its first message
        self.claimed = -1  # that node
        self.neighbourhood = ""  # of a stranger
        self.more: Callable[[], bool] = _no_more  # something else to be sent now, if there is
        self.took: Callable[[bytearray], int] | None = None  # instead of messages: how many bytes of them it has used
        self.node = -1  # at the other end, as it has proved
        self._loop = loop
        self._socket = sock
        self._identity, self._role, self._from = identity, role, loop.node
        self._is_secure = False  # the handshake is complete
        self._is_blocked = bool(role)  # until the socket can be written to
        self._in, self._out = bytearray(), bytearray()
        self._file: tuple[int, int, int] | None = None  # descriptor, offset and count, after what is in _out
        self._closed = False
        self._patience = patience
        if role:
            self._set_options()
        self._watch()

    def _set_options(self) -> None:
        """Have the kernel ask whether the other end is there, tcp(7); not for a stranger, which costs six calls."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in {
            socket.TCP_NODELAY: 1,
            socket.TCP_KEEPIDLE: int(_IDLE * self._patience),
            socket.TCP_KEEPINTVL: int(_AGAIN * self._patience),
            socket.TCP_KEEPCNT: (_GONE - _IDLE) // _AGAIN,
            socket.TCP_USER_TIMEOUT: int(_GONE * self._patience * 1000),
        }.items():
            self._socket.setsockopt(socket.IPPROTO_TCP, option, value)

    def fileno(self) -> int:
        return self._socket.fileno()

    def look(self) -> None:
        """Take what has come already."""
        self._serve(selectors.EVENT_READ)

    def say(self, message: Mapping[str, object]) -> None:
        """Say something, unless the connection has ended."""
        if self._closed:
            return
        self._out += wire.frame(message)
        if len(self._out) > _UNHEARD:
            self.fail("it does not listen")
            return
        self._watch()

    def send(self, head: bytes, fd: int, offset: int, count: int) -> None:
        """Send some bytes and a part of a file, when ``more`` asks for it."""
        self._out += head
        self._file = (fd, offset, count)

    def wake(self) -> None:
        """There may be ``more``."""
        if not self._closed:
            self._watch(writes=True)

    def fail(self, why: str) -> None:
        """End the connection."""
        if self._closed:
            return
        log.debug(f"swarm: {self.host}: {why}")
        gone = self.gone
        self.close()
        gone(why)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._loop.has_ended(self)
            self._loop.watch(self._socket.fileno(), 0, self._serve)
            self._socket.close()
            # They refer to this one.
            self.ready = self.heard = self.gone = self.claims = _nothing
            self.more, self.took = _no_more, None
            self._in, self._out, self._file = bytearray(), bytearray(), None

    def abandon(self) -> None:
        """Do without it in this process, after a fork(2) whose child goes on with it."""
        self._closed = True
        self._socket.close()
        self._loop.abandon()

    def _watch(self, *, writes: bool = False) -> None:
        if self._closed:
            return
        writes = self._is_blocked or self._is_secure and bool(writes or self._out or self._file)
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if writes else 0)
        self._loop.watch(self._socket.fileno(), events, self._serve)

    def _serve(self, events: int) -> None:
        try:
            if not self._is_secure:
                self._shake()
            if events & selectors.EVENT_READ and self._is_secure:
                self._read()
            if events & selectors.EVENT_WRITE and self._is_secure and not self._closed:
                self._write()
        except (BlockingIOError, SSLWantReadError):
            self._block(until_writable=False)
        except SSLWantWriteError:
            self._block(until_writable=True)
        except (OSError, WireError) as e:
            self.fail(str(e))
        except Exception as e:  # noqa: BLE001 - what it says makes no sense here: the others go on
            self.fail(f"{type(e).__name__}: {e}")

    def _block(self, *, until_writable: bool) -> None:
        """Wait for the next event."""
        if until_writable != self._is_blocked:
            self._is_blocked = until_writable
            self._watch()

    def _shake(self) -> None:
        """Go on with the handshake. Raises WireError, OSError, SSLWantReadError and SSLWantWriteError."""
        if self._role and not isinstance(self._socket, SSLSocket):
            if error := self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError(error, os.strerror(error))
            self._socket = self._identity.connect(self._socket, self._role, self._from)  # the same descriptor
        assert isinstance(self._socket, SSLSocket)
        try:
            self._identity.shake(self._socket)
        except (SSLWantReadError, SSLWantWriteError):
            self._claim()
            raise
        self._claim()
        self._is_secure, self._is_blocked = True, False
        if not self._role:
            self.say(wire.encode(Hello(self._loop.node)))
            self._meet(self.claimed)
        self._watch()
        self._read()  # what has come with the end of the handshake

    def _claim(self) -> None:
        """Take notice of the node that the other end says it is. Raises WireError."""
        node = getattr(self._socket, "claimed", None)
        if self.claimed < 0 and node is not None:
            self._set_options()
            self.claimed = node
            self.claims(node)

    def _read(self) -> None:
        for _ in range(_READS):
            if self._closed:
                return
            try:
                data = self._socket.recv(_RECORD_BYTES)
            except SSLWantReadError:
                return
            if not data:
                self.fail("it has closed the connection")
                return
            self._in += data
            self._use()

    def _meet(self, node: int) -> None:
        """The other end is a member, ``node``."""
        self.node = node
        self._loop.is_known(self)
        self.ready()

    def _use(self) -> None:
        while self._in and not self._closed:
            if self.took is not None and self.node >= 0:
                used = self.took(self._in)
                if not used:
                    return
                del self._in[:used]
                continue
            message = wire.unframe(self._in, self.most)
            if message is None:
                return
            if self.node < 0:
                self._meet(wire.decode(message, Hello).node)
            else:
                self.heard(message)

    def _write(self) -> None:
        self._is_blocked = False
        for _ in range(_TURN):
            if not self._send():
                return
            if not self.more():
                self._watch()
                return

    def _send(self) -> bool:
        """Send what there is to be sent; whether that was all, and more may follow. Raises SSLWantWriteError."""
        while True:
            if self._out:
                del self._out[: self._socket.send(bytes(self._out[:_RECORD_BYTES]))]
            elif self._file:
                fd, offset, count = self._file
                data = os.pread(fd, min(count, _FILE_BYTES), offset)
                if not data:
                    raise WireError("a blob on its way is short")
                self._sent(self._socket.send(data))
            else:
                return True

    def _sent(self, count: int) -> None:
        """So much of the part of a file is on its way."""
        assert self._file
        fd, offset, left = self._file
        self._file = (fd, offset + count, left - count) if count < left else None
