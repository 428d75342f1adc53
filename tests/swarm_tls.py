"""One end of a swarm's TLS connection, in memory. A test sends, repeats or drops the end's bytes."""

from __future__ import annotations

import ssl
from contextlib import suppress

from enroot_py.features.swarm.tls import Identity

KEY, CONTEXT = b"k" * 32, "7.0"


class End:
    """The end of a member that connects as ``node``."""

    def __init__(self, role: str, node: int, swarm: tuple[bytes, str] = (KEY, CONTEXT)) -> None:
        identity = Identity(*swarm)
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        name = identity._name(f"{role}{node}")
        self._end = identity.connecting.wrap_bio(self._in, self._out, server_hostname=name)
        self._is_ready = False
        self.receive(b"")

    def pending(self) -> bytes:
        """Return the bytes to send now."""
        return self._out.read()

    def receive(self, data: bytes) -> bytes:
        """Handle received bytes. Return the plain text."""
        self._in.write(data)
        messages = []
        with suppress(ssl.SSLWantReadError):
            if not self._is_ready:
                self._end.do_handshake()
                self._is_ready = True
            while message := self._end.read(1 << 18):
                messages.append(message)
        return b"".join(messages)

    def send(self, data: bytes) -> None:
        self._end.write(data)
