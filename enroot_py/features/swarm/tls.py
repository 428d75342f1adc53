"""TLS 1.3 between members of a swarm, with one certificate that each derives from the swarm's key.

HKDF-SHA256 (RFC 5869) makes an Ed25519 key of the swarm's key and of what that is for. Nothing in its certificate
differs from node to node, so all members have the same one: each end presents it, and accepts no other.
Who connects says which node it is and for what it comes: in the name of the server that it asks for (RFC 6066), with a
part that only a member can derive: a stranger is known by its first message, before anything is signed. Whoever hears
such a name can repeat it, and gets no further, as the certificate's key signs what both ends have said.
"""

from __future__ import annotations

import os
import ssl
from base64 import b64encode
from collections.abc import Callable
from hmac import compare_digest
from socket import socket
from ssl import (
    ALERT_DESCRIPTION_UNRECOGNIZED_NAME,
    CERT_REQUIRED,
    PROTOCOL_TLS_CLIENT,
    PROTOCOL_TLS_SERVER,
    DER_cert_to_PEM_cert,
    SSLContext,
    SSLError,
    SSLObject,
    SSLSocket,
    SSLWantReadError,
    SSLWantWriteError,
    TLSVersion,
)

from enroot_py.base import build
from enroot_py.base.errors import ConfigError
from enroot_py.features.swarm.wire import WireError

_PROTOCOL = b"penroot swarm 5"
_ED25519 = bytes.fromhex("3005 0603 2b6570")  # RFC 8410
_NAME = bytes.fromhex("3012 3110 300e 0603 550403 0c07") + b"penroot"
_VALID = bytes.fromhex("3020 170d") + b"000101000000Z" + bytes.fromhex("180f") + b"99991231235959Z"
_PRIVATE = bytes.fromhex("302e 020100 3005 0603 2b6570 0422 0420")  # what comes before such a key, PKCS #8
_PROOF = 32  # characters that only a member can derive


class Identity:
    """The key and the certificate of a swarm. Raises ConfigError if a library or an algorithm is missing."""

    def __init__(self, key: bytes, context: str) -> None:
        try:
            from cryptography.exceptions import UnsupportedAlgorithm
            from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
            from cryptography.hazmat.primitives.hashes import SHA256
            from cryptography.hazmat.primitives.kdf.hkdf import HKDF
        except ModuleNotFoundError as e:
            raise build.missing("swarm", e) from e

        def derive(what: str) -> bytes:
            return HKDF(SHA256(), 32, None, b"\0".join((_PROTOCOL, context.encode(), what.encode()))).derive(key)

        self._derive = derive
        try:
            self._secret = derive("certificate")
            private = Ed25519PrivateKey.from_private_bytes(self._secret)
            self.certificate = _certificate(private.public_key().public_bytes_raw(), private.sign)
            self.connecting = self._context(PROTOCOL_TLS_CLIENT)
        except (UnsupportedAlgorithm, SSLError) as e:  # as in FIPS mode
            hint = "set swarm=no in plugstack.conf"
            raise ConfigError(f"OpenSSL refuses HKDF or Ed25519, which a swarm needs: {e}", hint=hint) from e
        self.connecting.check_hostname = False

    def _context(self, protocol: int) -> SSLContext:
        context = SSLContext(protocol)
        context.minimum_version = TLSVersion.TLSv1_3
        context.options |= getattr(ssl, "OP_ENABLE_KTLS", 0)  # Python 3.12: the kernel encrypts, if it can
        context.verify_mode = CERT_REQUIRED
        context.load_verify_locations(cadata=self.certificate)
        pem = _pem(_PRIVATE + self._secret) + DER_cert_to_PEM_cert(self.certificate)
        fd = os.memfd_create("swarm")
        try:
            os.write(fd, pem.encode())
            context.load_cert_chain(f"/proc/self/fd/{fd}")
        finally:
            os.close(fd)
        return context

    def connect(self, sock: socket, role: str, node: int) -> SSLSocket:
        """Return the end of ``node`` on a connected socket. ``role`` is what the connection is for. Raises OSError."""
        name = self._name(f"{role}{node}")
        return self.connecting.wrap_socket(sock, server_hostname=name, do_handshake_on_connect=False)

    def listening(self, role: str) -> SSLContext:
        """Return the context of a listener for connections of a role, which makes sockets of the class Accepted."""
        context = self._context(PROTOCOL_TLS_SERVER)
        context.num_tickets = 0  # no connection is taken up again
        context.sslsocket_class = Accepted

        def named(end: SSLObject, name: str | None, context: SSLContext) -> int | None:
            who = (name or "").partition(".")[0]
            number = who.removeprefix(role)
            is_one = who.startswith(role) and number.isascii() and number.isdecimal() and len(number) <= 10
            if not is_one or not compare_digest(self._name(who), name or ""):
                return ALERT_DESCRIPTION_UNRECOGNIZED_NAME
            end.claimed = int(number)  # type: ignore[attr-defined] # it is an Accepted: see sslsocket_class
            return None

        context.sni_callback = named
        return context

    def shake(self, end: SSLSocket) -> None:
        """Go on with a handshake. Raises WireError if the other end is no member, and ssl.SSLWantReadError."""
        try:
            end.do_handshake()
        except (SSLWantReadError, SSLWantWriteError):
            raise
        except SSLError as e:
            why = (e.reason or str(e)).lower().replace("_", " ")
            why = "the name of another swarm" if why == "callback failed" else why
            raise WireError(f"no member of this swarm: {why}") from e
        if end.getpeercert(binary_form=True) != self.certificate:
            raise WireError("no member of this swarm: another certificate")

    def _name(self, who: str) -> str:
        return f"{who}.{self._derive(f'name {who}').hex()[:_PROOF]}"


class Accepted(SSLSocket):
    """An end to which another node has connected."""

    claimed: int | None = None  # the number of that node, as its first message says


def _certificate(public: bytes, sign: Callable[[bytes], bytes]) -> bytes:
    """A certificate of version 1 (RFC 5280, section 4.1) that is the same wherever it is made."""
    key = _sequence(_ED25519, b"\x03\x21\0" + public)
    signed = _sequence(b"\x02\x01\x01", _ED25519, _NAME, _VALID, _NAME, key)
    return _sequence(signed, _ED25519, b"\x03\x41\0" + sign(signed))


def _sequence(*parts: bytes) -> bytes:
    content = b"".join(parts)
    length = len(content)
    return b"\x30" + (b"\x81" if length > 127 else b"") + bytes([length]) + content


def _pem(private: bytes) -> str:
    return f"-----BEGIN PRIVATE KEY-----\n{b64encode(private).decode()}\n-----END PRIVATE KEY-----\n"
