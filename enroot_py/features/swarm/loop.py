"""The connections of one process of a swarm: sockets, deadlines and data that waits to be sent."""

from __future__ import annotations

import _socket
import errno
import os
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from ipaddress import ip_address
from ssl import SSLContext, SSLSocket, SSLWantReadError, SSLWantWriteError

from enroot_py.base import log
from enroot_py.features.swarm import wire
from enroot_py.features.swarm.invitation import Swarm
from enroot_py.features.swarm.messages import REPORT_INTERVAL_S, SEED, Address, Hello, report_interval
from enroot_py.features.swarm.tls import Identity
from enroot_py.features.swarm.wire import MAX_PEER_BYTES, WireError

ACCEPT_TIMEOUT_S = 2.0  # for the handshake of an accepted connection
CONNECT_TIMEOUT_S = 10.0  # for the handshake of an outgoing connection: the other end may have many handshakes to do
MAX_STRANGERS = 256  # connections whose other end has not sent the first message of a member
MAX_UNFINISHED = 2  # connections of one node in the middle of a handshake
MAX_ACCEPTS = 64  # connections to accept before other sockets are served
# TCP keepalive, tcp(7): idle seconds before the first probe, seconds between two probes, and seconds until the
# connection ends. A connection to the tracker multiplies all three by the report interval. With fixed times, the
# probes of ten thousand connections arrive together, and so many probes are dropped that connections end.
_KEEPALIVE_IDLE_S, _KEEPALIVE_INTERVAL_S, _KEEPALIVE_TIMEOUT_S = 3, 2, 9
TO_TRACKER, TO_PEER = "t", "p"  # the role of a connection

# The group of an accepted connection: a stage and a key. A stranger has not sent its first message yet; its key is its
# neighbourhood(). The first message claims and proves a node number, which is the key from then on. A connection is
# unfinished until its handshake completes; then its other end is a member.
_STRANGER, _UNFINISHED, _MEMBER = range(3)
_Group = tuple[int, str | int]

_RECORD_BYTES = 16 << 10  # OpenSSL decrypts one record at a time, RFC 8446
_FILE_BYTES = 64 << 10  # bytes of a file to encrypt at a time
_BATCH_BYTES = 48 << 10  # while a piece arrives, wait for this many bytes at once
_MAX_READS = 16  # records to read before other connections are served
_MAX_PIECES = 4  # pieces to send before other connections are served
_MAX_UNSENT_BYTES = 64 << 20


class Loop:
    """All sockets of a process. run() calls ``tick`` TICKS times a second, and ends when ``running`` is False."""

    TICKS = 10

    def __init__(self, swarm: Swarm, node: int, ports: range = range(1)) -> None:
        """The process may listen at ``ports``. Raises ConfigError, see tls.Identity."""
        self.swarm, self.node, self.ports = swarm, node, ports
        self.identity = Identity(swarm.key, swarm.context)
        self.running = True
        self.tick: Callable[[float], None] = lambda now: None
        self._selector = selectors.DefaultSelector()
        # By stage and key: the connections of a group, the oldest first.
        self._accepted: list[dict[str | int, dict[Connection, None]]] = [{}, {}, {}]
        self._hosts: dict[int, str] = {}  # by node: the host of its first handshake
        self._deadlines: dict[Connection, float] = {}  # of handshakes, in seconds of ``_served``
        self._served = 0.0  # seconds of service: excludes time in which this process was busy or stopped
        self._paused: list[tuple[int, Callable[[int], None]]] = []  # listeners that accept nothing until the next tick

    def run(self) -> None:
        """Serve until ``running`` is False."""
        ticked = time.monotonic()
        while self.running:
            for key, events in self._selector.select(max(0.0, ticked + 1 / self.TICKS - time.monotonic())):
                current = self._selector.get_map().get(key.fd)
                # When an earlier event has closed a connection, its descriptor may belong to a new connection.
                if current is not None and current.data == key.data:
                    key.data(events)
            now = time.monotonic()
            if now >= ticked + 1 / self.TICKS:
                self._served += min(now - ticked, 2 / self.TICKS)
                ticked = now
                while self._paused:
                    descriptor, serve = self._paused.pop()
                    self.watch(descriptor, selectors.EVENT_READ, serve)
                late = [connection for connection, deadline in self._deadlines.items() if self._served > deadline]
                for connection in late:
                    connection.fail("the handshake takes too long")
                self.tick(now)

    def fileno(self) -> int:
        return self._selector.fileno()

    def abandon(self) -> None:
        """Close the selector. See Connection.abandon()."""
        self._selector.close()

    def watch(self, descriptor: int, events: int, serve: Callable[[int], None]) -> None:
        """Call ``serve`` for events of a descriptor. Without ``events``, stop calling it."""
        if descriptor not in self._selector.get_map():
            if events:
                self._selector.register(descriptor, events, serve)
        elif events:
            self._selector.modify(descriptor, events, serve)
        else:
            self._selector.unregister(descriptor)

    def listen(
        self, role: str, listener: _socket.socket, accept: Callable[[Connection], None], max_connections: int = 1
    ) -> int:
        """Accept at most ``max_connections`` from each node. Call ``accept`` after each handshake. Return the port."""
        sock = socket.socket(fileno=listener.detach())
        sock.setblocking(False)
        context = self.identity.listening(role)

        def serve(events: int) -> None:
            try:
                for _ in range(MAX_ACCEPTS):
                    self._admit(role, context, *sock.accept(), accept, max_connections)
            except OSError as e:
                if e.errno not in (errno.EAGAIN, errno.ECONNABORTED):
                    log.debug(f"swarm: {e}")
                    self.watch(sock.fileno(), 0, serve)
                    self._paused.append((sock.fileno(), serve))

        self.watch(sock.fileno(), selectors.EVENT_READ, serve)
        return int(sock.getsockname()[1])

    def _admit(
        self,
        role: str,
        context: SSLContext,
        sock: socket.socket,
        address: tuple[str, int],
        accept: Callable[[Connection], None],
        max_connections: int,
    ) -> None:
        """Begin the handshake of an accepted connection."""
        sock.setblocking(False)
        host = address[0].removeprefix("::ffff:")
        if not self.swarm.admits(host):
            log.debug(f"swarm: {host}: not in a network of the swarm")
            sock.close()
            return
        try:
            secure = context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        except OSError as e:
            log.debug(f"swarm: {host}: {e}")
            return  # wrap_socket() has closed the socket
        connection = Connection(self, secure, host, role)

        def on_ready() -> None:
            self._add_member(connection, max_connections)
            accept(connection)

        connection.on_ready = on_ready
        connection.on_claim = lambda node: self._claimed(connection, role, node)
        self._move(connection, (_STRANGER, neighbourhood(host)))
        self._deadlines[connection] = self._served + ACCEPT_TIMEOUT_S
        connection.read()  # a member's first message has usually arrived already
        strangers = self._accepted[_STRANGER].values()
        if sum(map(len, strangers)) > MAX_STRANGERS:
            # Close the oldest stranger of the neighbourhood that has the most strangers.
            largest = max(strangers, key=len)
            next(iter(largest)).fail("too many unauthenticated connections")

    def _claimed(self, connection: Connection, role: str, node: int) -> None:
        """Promote a stranger that has claimed ``node`` in a message that only a member can derive. Raises WireError."""
        if node == self.node:
            raise WireError("the other end claims this node's number")
        is_seed = node == SEED and role == TO_TRACKER and ip_address(connection.host).is_loopback
        if not (node < self.swarm.nodes or is_seed):
            raise WireError(f"no such node: {node}")
        self._check_host(connection, node)
        unfinished = self._accepted[_UNFINISHED].get(node, {})
        if len(unfinished) >= MAX_UNFINISHED:  # one of them may be a stranger that repeats the node's first message
            next(iter(unfinished)).fail("replaced by a newer connection of its node")
        self._move(connection, (_UNFINISHED, node))

    def _add_member(self, connection: Connection, max_connections: int) -> None:
        """Add a connection whose handshake is complete, and bind its node's number to its host. Raises WireError."""
        node = connection.node
        self._check_host(connection, node)
        self._hosts[node] = connection.host
        if len(self._accepted[_MEMBER].get(node, ())) >= max_connections:
            raise WireError(f"node {node} is already connected")
        self._move(connection, (_MEMBER, node))

    def _check_host(self, connection: Connection, node: int) -> None:
        host = self._hosts.get(node, connection.host)
        if host != connection.host:
            raise WireError(f"node {node} is at {host}")

    def connect(self, role: str, address: Address) -> Connection:
        """Begin to connect. If this fails, the connection later calls its ``on_close``."""
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setblocking(False)
        if self.swarm.admits(address[0]):  # otherwise the handshake fails, as the socket is not connected
            sock.connect_ex(address)
        connection = Connection(self, sock, address[0], role, as_node=self.node)
        self._deadlines[connection] = self._served + CONNECT_TIMEOUT_S
        return connection

    def end_handshake(self, connection: Connection) -> None:
        self._deadlines.pop(connection, None)

    def _move(self, connection: Connection, group: _Group | None) -> None:
        """Move an accepted connection into another group, or out of all groups."""
        if connection.group is not None:
            stage, key = connection.group
            del self._accepted[stage][key][connection]
            if not self._accepted[stage][key]:
                del self._accepted[stage][key]
        connection.group = group
        if group is not None:
            self._accepted[group[0]].setdefault(group[1], {})[connection] = None

    def remove(self, connection: Connection) -> None:
        self.end_handshake(connection)
        self._move(connection, None)


def neighbourhood(host: str) -> str:
    """Return a name for all addresses that one user may hold: loopback, an IPv4 address, or a /64 of IPv6."""
    address = ip_address(host)
    if address.is_loopback:
        return "loopback"
    return host if address.version == 4 else str(int(address) >> 64)


def _ignore(*_: object) -> None:
    pass


def _nothing_to_send() -> bool:
    return False


class Connection:
    """A socket with a stream of messages or pieces. Its user sets the callbacks."""

    def __init__(self, loop: Loop, sock: socket.socket, host: str, role: str, *, as_node: int | None = None) -> None:
        """With ``as_node``, the number of this node, TLS begins when the socket is connected."""
        self.host = host
        self.max_bytes = MAX_PEER_BYTES  # of a message
        self.on_ready: Callable[[], None] = _ignore
        self.on_message: Callable[[Mapping[str, object]], None] = _ignore
        self.on_close: Callable[[str], None] = _ignore  # called with the reason
        self.on_claim: Callable[[int], None] = _ignore  # called with ``claimed`` when it is known
        self.claimed = -1  # the node number in the other end's first message
        self.group: _Group | None = None  # set by the loop if this end has accepted the connection
        self.send_more: Callable[[], bool] = _nothing_to_send  # returns True if it has called send_file()
        self.on_bytes: Callable[[bytearray], int] | None = None  # replaces on_message; returns the bytes that it used
        self.node = -1  # node number of the other end, after the handshake
        self._loop = loop
        self._socket = sock
        self._role, self._as_node = role, as_node
        self._is_secure = False  # the handshake is complete
        self._is_blocked = as_node is not None  # wait until the socket can be written to
        self._in, self._out = bytearray(), bytearray()
        self._file: tuple[int, int, int] | None = None  # descriptor, offset and count, to be sent after _out
        self._low_water = 1  # SO_RCVLOWAT, socket(7)
        self._closed = False
        if self._is_blocked:
            self._set_options()
        self._watch()

    def _set_options(self) -> None:
        """Set TCP_NODELAY and keepalive, tcp(7). Strangers do not get these options, which cost six system calls."""
        factor = report_interval(self._loop.swarm.nodes) / REPORT_INTERVAL_S if self._role == TO_TRACKER else 1
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in {
            socket.TCP_NODELAY: 1,
            socket.TCP_KEEPIDLE: int(_KEEPALIVE_IDLE_S * factor),
            socket.TCP_KEEPINTVL: int(_KEEPALIVE_INTERVAL_S * factor),
            socket.TCP_KEEPCNT: (_KEEPALIVE_TIMEOUT_S - _KEEPALIVE_IDLE_S) // _KEEPALIVE_INTERVAL_S,
            socket.TCP_USER_TIMEOUT: int(_KEEPALIVE_TIMEOUT_S * factor * 1000),
        }.items():
            self._socket.setsockopt(socket.IPPROTO_TCP, option, value)

    def fileno(self) -> int:
        return self._socket.fileno()

    def read(self) -> None:
        """Handle the data that has arrived already."""
        self._serve(selectors.EVENT_READ)

    def send(self, message: Mapping[str, object]) -> None:
        """Send a message, unless the connection has ended."""
        if self._closed:
            return
        self._out += wire.frame(message)
        if len(self._out) > _MAX_UNSENT_BYTES:
            self.fail("too much unread data")
            return
        self._watch()

    def send_file(self, header: bytes, descriptor: int, offset: int, count: int) -> None:
        """Send a header and a part of a file. Only send_more() may call this."""
        self._out += header
        self._file = (descriptor, offset, count)

    def expect(self, count: int) -> None:
        """While ``count`` bytes are still to come, wait for a batch of bytes instead of each packet.

        On a slow network, an event for each packet would cost more CPU time than the bytes cost. Near the end, wait for
        each packet: OpenSSL may already hold a part of a record, so the socket may get less than ``count`` bytes.
        """
        low_water = _BATCH_BYTES if count > _BATCH_BYTES + _RECORD_BYTES else 1
        if low_water != self._low_water and not self._closed:
            self._low_water = low_water
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low_water)

    def wake(self) -> None:
        """Call send_more() soon."""
        if not self._closed:
            self._watch(writes=True)

    def fail(self, why: str) -> None:
        """Close the connection and report the reason."""
        if self._closed:
            return
        log.debug(f"swarm: {self.host}: {why}")
        on_close = self.on_close
        self.close()
        on_close(why)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._loop.remove(self)
            self._loop.watch(self._socket.fileno(), 0, self._serve)
            self._socket.close()
            # Break the reference cycles.
            self.on_ready = self.on_message = self.on_close = self.on_claim = _ignore
            self.send_more, self.on_bytes = _nothing_to_send, None
            self._in, self._out, self._file = bytearray(), bytearray(), None

    def abandon(self) -> None:
        """Close this process's descriptors of the connection and the loop. A forked child goes on with its copies."""
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
                self._handshake()
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
        except Exception as e:  # noqa: BLE001 - a message with nonsense ends this connection only
            self.fail(f"{type(e).__name__}: {e}")

    def _block(self, *, until_writable: bool) -> None:
        """Wait until the socket can be written to if ``until_writable``, otherwise until it can be read."""
        if until_writable != self._is_blocked:
            self._is_blocked = until_writable
            self._watch()

    def _handshake(self) -> None:
        """Continue the handshake. Raises WireError, OSError, SSLWantReadError and SSLWantWriteError."""
        if self._as_node is not None and not isinstance(self._socket, SSLSocket):
            if error := self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError(error, os.strerror(error))
            self._socket = self._loop.identity.connect(self._socket, self._role, self._as_node)  # same descriptor
        assert isinstance(self._socket, SSLSocket)
        try:
            self._loop.identity.handshake(self._socket)
        except (SSLWantReadError, SSLWantWriteError):
            self._check_claim()
            raise
        self._check_claim()
        self._is_secure, self._is_blocked = True, False
        if self._as_node is None:
            self.send(wire.encode(Hello(self._loop.node)))
            self._begin(self.claimed)
        self._watch()
        self._read()  # data may have arrived with the end of the handshake

    def _check_claim(self) -> None:
        """Report the node that the other end claims to be. Raises WireError."""
        node = getattr(self._socket, "claimed", None)
        if self.claimed < 0 and node is not None:
            self._set_options()
            self.claimed = node
            self.on_claim(node)

    def _read(self) -> None:
        for _ in range(_MAX_READS):
            if self._closed:
                return
            try:
                data = self._socket.recv(_RECORD_BYTES)
            except SSLWantReadError:
                return
            if not data:
                self.fail("the other end has closed the connection")
                return
            self._in += data
            self._handle_data()

    def _begin(self, node: int) -> None:
        """Begin to use the connection: the other end has proved to be the member ``node``."""
        self.node = node
        self._loop.end_handshake(self)
        self.on_ready()

    def _handle_data(self) -> None:
        while self._in and not self._closed:
            if self.on_bytes is not None and self.node >= 0:
                used = self.on_bytes(self._in)
                if not used:
                    return
                del self._in[:used]
                continue
            message = wire.unframe(self._in, self.max_bytes)
            if message is None:
                return
            if self.node < 0:
                self._begin(wire.decode(message, Hello).node)
            else:
                self.on_message(message)

    def _write(self) -> None:
        self._is_blocked = False
        for _ in range(_MAX_PIECES):
            self._send_all()
            if not self.send_more():
                self._watch()
                return

    def _send_all(self) -> None:
        """Send the waiting data. Raises SSLWantWriteError if the socket takes no more data now."""
        while self._out or self._file:
            if self._out:
                del self._out[: self._socket.send(bytes(self._out[:_RECORD_BYTES]))]
            elif self._file:
                descriptor, offset, count = self._file
                data = os.pread(descriptor, min(count, _FILE_BYTES), offset)
                if not data:
                    raise WireError("the file of a blob is short")
                sent = self._socket.send(data)
                self._file = (descriptor, offset + sent, count - sent) if sent < count else None
