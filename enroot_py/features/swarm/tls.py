"""TLS 1.3 between the members of a swarm, with one certificate that each member derives from the swarm's key.

HKDF-SHA256 (RFC 5869) derives an Ed25519 key from the swarm's key and the step. The certificate contains nothing that
differs between nodes, so all members have the same certificate. Each end presents it and accepts no other.

The connecting end puts its role and node number into the requested server name (RFC 6066). The name contains a
proof that only a member can derive, so a stranger is recognized by its first message, before anything is signed. An
eavesdropper can repeat such a name, but cannot complete the handshake, as the certificate's key signs the messages of
both ends.
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
_SUBJECT = bytes.fromhex("3012 3110 300e 0603 550403 0c07") + b"penroot"
_VALIDITY = bytes.fromhex("3020 170d") + b"000101000000Z" + bytes.fromhex("180f") + b"99991231235959Z"
_PKCS8_HEADER = bytes.fromhex("302e 020100 3005 0603 2b6570 0422 0420")  # of a private Ed25519 key
_PROOF_CHARACTERS = 32


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

        def derive(purpose: str) -> bytes:
            return HKDF(SHA256(), 32, None, b"\0".join((_PROTOCOL, context.encode(), purpose.encode()))).derive(key)

        self._derive = derive
        try:
            self._secret = derive("certificate")
            private = Ed25519PrivateKey.from_private_bytes(self._secret)
            self.certificate = _certificate(private.public_key().public_bytes_raw(), private.sign)
            self.connecting = self._context(PROTOCOL_TLS_CLIENT)
        except (UnsupportedAlgorithm, SSLError) as e:  # such as in FIPS mode
            hint = "set swarm=no in plugstack.conf"
            raise ConfigError(f"OpenSSL refuses HKDF or Ed25519, which a swarm needs: {e}", hint=hint) from e
        self.connecting.check_hostname = False

    def _context(self, protocol: int) -> SSLContext:
        context = SSLContext(protocol)
        context.minimum_version = TLSVersion.TLSv1_3
        context.options |= getattr(ssl, "OP_ENABLE_KTLS", 0)  # Python 3.12: let the kernel encrypt, if it can
        context.verify_mode = CERT_REQUIRED
        context.load_verify_locations(cadata=self.certificate)
        pem = _pem(_PKCS8_HEADER + self._secret) + DER_cert_to_PEM_cert(self.certificate)
        with open(os.memfd_create("swarm"), "wb", buffering=0) as file:
            file.write(pem.encode())
            context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
        return context

    def connect(self, sock: socket, role: str, node: int) -> SSLSocket:
        """Wrap a connected socket as ``node``. ``role`` is that of the connection. Raises OSError."""
        name = self._name(f"{role}{node}")
        return self.connecting.wrap_socket(sock, server_hostname=name, do_handshake_on_connect=False)

    def listening(self, role: str) -> SSLContext:
        """Return the TLS context of a listener for connections of a role. Its sockets are of the class Accepted."""
        context = self._context(PROTOCOL_TLS_SERVER)
        context.num_tickets = 0  # no session is resumed
        context.sslsocket_class = Accepted

        def check_name(secure: SSLObject, name: str | None, context: SSLContext) -> int | None:
            claim = (name or "").partition(".")[0]
            number = claim.removeprefix(role)
            is_valid = claim.startswith(role) and number.isascii() and number.isdecimal() and len(number) <= 10
            if not is_valid or not compare_digest(self._name(claim), name or ""):
                return ALERT_DESCRIPTION_UNRECOGNIZED_NAME
            secure.claimed = int(number)  # type: ignore[attr-defined] # of class Accepted: see sslsocket_class
            return None

        context.sni_callback = check_name
        return context

    def handshake(self, secure: SSLSocket) -> None:
        """Continue a handshake. Raises WireError if the other end is not a member, and SSLWant...Error."""
        try:
            secure.do_handshake()
        except (SSLWantReadError, SSLWantWriteError):
            raise
        except SSLError as e:
            why = (e.reason or str(e)).lower().replace("_", " ")
            why = "the server name is of another swarm" if why == "callback failed" else why
            raise WireError(f"not a member of this swarm: {why}") from e
        if secure.getpeercert(binary_form=True) != self.certificate:
            raise WireError("not a member of this swarm: another certificate")

    def _name(self, claim: str) -> str:
        return f"{claim}.{self._derive(f'name {claim}').hex()[:_PROOF_CHARACTERS]}"


class Accepted(SSLSocket):
    """A socket that a listener has accepted."""

    claimed: int | None = None  # the node number in the first message of the other end


def _certificate(public: bytes, sign: Callable[[bytes], bytes]) -> bytes:
    """Return a version 1 certificate (RFC 5280, section 4.1) that is the same on every node."""
    key = _sequence(_ED25519, b"\x03\x21\0" + public)
    signed = _sequence(b"\x02\x01\x01", _ED25519, _SUBJECT, _VALIDITY, _SUBJECT, key)
    return _sequence(signed, _ED25519, b"\x03\x41\0" + sign(signed))


def _sequence(*parts: bytes) -> bytes:
    content = b"".join(parts)
    length = len(content)
    return b"\x30" + (b"\x81" if length > 127 else b"") + bytes([length]) + content


def _pem(private: bytes) -> str:
    return f"-----BEGIN PRIVATE KEY-----\n{b64encode(private).decode()}\n-----END PRIVATE KEY-----\n"
