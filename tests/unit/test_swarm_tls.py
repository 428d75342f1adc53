"""TLS connections of a swarm through a host that reads all bytes and can change them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import selectors
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from enroot_py.features.swarm.invitation import Swarm
from enroot_py.features.swarm.loop import Connection, Loop
from enroot_py.features.swarm.ports import listener
from enroot_py.features.swarm.tls import Identity
from tests.swarm_tls import CONTEXT, KEY, End

WORDS = b"what nobody else may read " * 40_000


class Wire:
    """A host between two ends. It applies ``change`` to the bytes for the end that has connected."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.seen = bytearray()
        self.change: Callable[[bytes], bytes] = bytes
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()

    def _carry(self) -> None:
        one, _ = self._listener.accept()
        other = socket.create_connection(("127.0.0.1", self._port))
        with one, other, selectors.DefaultSelector() as ready, contextlib.suppress(OSError):
            ready.register(one, selectors.EVENT_READ, other)
            ready.register(other, selectors.EVENT_READ, one)
            while True:
                for key, _ in ready.select():
                    assert isinstance(key.fileobj, socket.socket)
                    data = key.fileobj.recv(1 << 16)
                    if not data:
                        return
                    self.seen += data
                    key.data.sendall(self.change(data) if key.fileobj is other else data)


class Ends:
    """Two connected ends. The accepting end sends the file when it gets a message."""

    def __init__(self, file: int, node: int = 1) -> None:
        self.loop = Loop(Swarm(KEY, CONTEXT, 2), 0)
        self._other = Loop(Swarm(KEY, CONTEXT, 2), node)
        self._file = file
        self.wire = Wire(self.loop.listen("p", listener(), self._greet))
        self.received = bytearray()
        self.lost: list[str] = []
        self._one = self._other.connect("p", ("127.0.0.1", self.wire.port))
        self._one.on_ready = lambda: self._one.send({"is": "Wish"})
        self._one.on_bytes = self._take
        self._one.on_close = self.lost.append

    def _greet(self, connection: Connection) -> None:
        def on_message(message: object) -> None:
            assert message == {"is": "Wish"}
            connection.send_more = more
            connection.wake()

        def more() -> bool:
            connection.send_more = lambda: False
            connection.send_file(b"head", self._file, 0, len(WORDS))
            return True

        connection.on_message = on_message

    def _take(self, data: bytearray) -> int:
        self.received += data
        self._one.expect(len(WORDS) + 4 - len(self.received))
        return len(data)

    def run(self) -> None:
        """Serve both ends until the whole file has arrived or the connection has ended."""
        deadline = time.monotonic() + 60
        while len(self.received) < len(WORDS) + 4 and not self.lost:
            assert time.monotonic() < deadline
            for loop in (self.loop, self._other):
                loop.running = True
                loop.tick = lambda now, loop=loop: setattr(loop, "running", False)
                loop.run()


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "words").write_bytes(WORDS)
    fd = os.open(tmp_path / "words", os.O_RDONLY)
    yield fd
    os.close(fd)


def test_blobs_and_messages_cannot_be_read(file: int) -> None:
    ends = Ends(file)
    ends.run()
    assert ends.received == b"head" + WORDS
    assert b"nobody else" not in ends.wire.seen and b"Wish" not in ends.wire.seen


def test_changed_bytes_end_the_connection(file: int) -> None:
    ends = Ends(file)

    def flip(data: bytes) -> bytes:
        return data if len(ends.wire.seen) < 300_000 else bytes([data[0] ^ 1]) + data[1:]

    ends.wire.change = flip
    ends.run()
    assert ends.lost
    assert (b"head" + WORDS).startswith(ends.received)


def test_certificate_is_the_same_everywhere() -> None:
    """Nodes may have different libraries, but must derive the same bytes from this key."""
    certificate = Identity(KEY, CONTEXT).certificate
    assert hashlib.sha256(certificate).hexdigest() == "ab77e2d9b30615eb35c238094e595cf08f1750734cc2dcb6f704279daf0564ff"
    assert certificate != Identity(KEY, "7.1").certificate != Identity(b"x" * 32, CONTEXT).certificate


def test_refusing_openssl_is_reported(tmp_path: Path) -> None:
    """OpenSSL may refuse algorithms in FIPS mode. Here, it refuses all: no provider has the property fips=yes."""
    (tmp_path / "conf").write_text("openssl_conf = init\n[init]\nalg_section = a\n[a]\ndefault_properties = fips=yes\n")
    words = "from enroot_py.features.swarm.tls import Identity\nIdentity(b'k' * 32, '7.0')"
    command = [sys.executable, "-c", words]
    environ = {**os.environ, "OPENSSL_CONF": str(tmp_path / "conf")}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert "ConfigError: OpenSSL refuses HKDF or Ed25519, which a swarm needs" in done.stderr


@pytest.mark.security("N1")
def test_false_server_gets_no_message(tmp_path: Path) -> None:
    """The server accepts every client and has another certificate."""
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=penroot -keyout key -out own"
    subprocess.run(["openssl", *words.split()], cwd=tmp_path, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "own", tmp_path / "key")
    received, out = ssl.MemoryBIO(), ssl.MemoryBIO()
    stranger = context.wrap_bio(received, out, server_side=True)
    member = End("p", 1)
    received.write(member.pending())
    with pytest.raises(ssl.SSLWantReadError):
        stranger.do_handshake()
    with pytest.raises(ssl.SSLCertVerificationError):
        member.receive(out.read())


@pytest.mark.security("N1")
def test_connection_to_itself_is_refused(file: int) -> None:
    """Both ends have the same certificate, so TLS alone does not notice such a connection."""
    ends = Ends(file, node=0)
    ends.run()
    assert ends.lost and not ends.received
