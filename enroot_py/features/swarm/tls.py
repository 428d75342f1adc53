"""TLS 1.3 between the members of a swarm, with one certificate that each member derives from the swarm's key.

HKDF-SHA256 (RFC 5869) derives an Ed25519 key from the swarm's key and the step. The certificate contains nothing that
differs between nodes, so all members have the same certificate. Each end presents this certificate and accepts no
other.

The connecting end puts its role and node number into the requested server name (RFC 6066). The name contains a
proof that only a member can derive, so a stranger is recognized by its first message, before anything is signed. An
eavesdropper can repeat such a name, but cannot complete the handshake, as the certificate's key signs the messages of
both ends.
"""

from __future__ import annotations

import os
import ssl
from datetime import datetime, timezone
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

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

_PROTOCOL = b"penroot swarm 6"
_VALIDITY = datetime(2000, 1, 1, tzinfo=timezone.utc), datetime(9999, 12, 31, tzinfo=timezone.utc)
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
            self._private = Ed25519PrivateKey.from_private_bytes(derive("certificate"))
            self.certificate = _certificate(self._private)
            self.connecting = self._context(PROTOCOL_TLS_CLIENT)
        except (UnsupportedAlgorithm, SSLError) as e:  # for example in FIPS mode
            hint = "set swarm=no in plugstack.conf"
            raise ConfigError(f"OpenSSL refuses HKDF or Ed25519, which a swarm needs: {e}", hint=hint) from e
        self.connecting.check_hostname = False

    def _context(self, protocol: int) -> SSLContext:
        context = SSLContext(protocol)
        context.minimum_version = TLSVersion.TLSv1_3
        context.options |= getattr(ssl, "OP_ENABLE_KTLS", 0)  # Python 3.12: let the kernel encrypt, if it can
        context.verify_mode = CERT_REQUIRED
        context.load_verify_locations(cadata=self.certificate)
        with open(os.memfd_create("swarm"), "wb", buffering=0) as file:
            file.write(_pem(self._private) + DER_cert_to_PEM_cert(self.certificate).encode())
            context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
        return context

    def connect(self, sock: socket, role: str, node: int) -> SSLSocket:
        """Wrap a connected socket of this ``node``. ``role`` is TO_TRACKER or TO_PEER. Raises OSError."""
        name = self._name(f"{role}{node}")
        return self.connecting.wrap_socket(sock, server_hostname=name, do_handshake_on_connect=False)

    def listening(self, role: str) -> SSLContext:
        """Return the TLS context of a listener for connections of a role. It makes sockets of the class Accepted."""
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


def _certificate(key: Ed25519PrivateKey) -> bytes:
    """Return a certificate that is the same on every node: the signatures of Ed25519 are deterministic (RFC 8032)."""
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding

    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "penroot")])
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, *_VALIDITY)
    return builder.sign(key, None).public_bytes(Encoding.DER)


def _pem(key: Ed25519PrivateKey) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
