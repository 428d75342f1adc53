"""TLS 1.3 between members of a swarm who have proved to each other that they have its key. Without sockets.

The key of a connection takes the place of certificates: RFC 8446, section 2.2; Python has that since 3.13.
"""

from __future__ import annotations

import sys
from typing import Any

_CHUNK = 256 << 10
_IDENTITY = "penroot"


def is_here() -> bool:
    """Whether this Python and its OpenSSL have it."""
    if sys.hexversion < 0x30D0000:
        return False
    import ssl

    return getattr(ssl, "HAS_PSK", False) and ssl.HAS_TLSv1_3


class Tls:
    """One end of a connection. ``feed`` takes what has come, ``write`` what is to be said once it ``is_ready``.

    ``out`` is to be sent. Methods raise OSError, as ssl.SSLError, where the other end breaks the protocol.
    """

    def __init__(self, key: bytes, *, connects: bool) -> None:
        import ssl

        context: Any = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT if connects else ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        if connects:
            # The key proves who is there. One without it may offer a certificate instead: no authority is trusted.
            context.check_hostname, context.verify_mode = False, ssl.CERT_REQUIRED
            context.set_psk_client_callback(lambda hint: (_IDENTITY, key))
        else:
            context.num_tickets = 0  # no connection is taken up again
            context.set_psk_server_callback(lambda identity: key)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._end = context.wrap_bio(self._incoming, self._outgoing, server_side=not connects)
        self.is_ready = False
        self.out = bytearray()
        self.feed(b"")

    def feed(self, data: bytes) -> bytes:
        """What the other end says."""
        from ssl import SSLWantReadError

        self._incoming.write(data)
        said = []
        try:
            if not self.is_ready:
                self._end.do_handshake()
                self.is_ready = True
            while piece := self._end.read(_CHUNK):
                said.append(piece)
        except SSLWantReadError:
            pass  # more has to come
        self.out += self._outgoing.read()
        return b"".join(said)

    def write(self, data: bytes) -> None:
        self._end.write(data)
        self.out += self._outgoing.read()
