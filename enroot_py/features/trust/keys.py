"""The public keys of a policy.

Only functions that need a key import ``cryptography``, since the import is slow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from enroot_py.base import build
from enroot_py.base.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from enroot_py.features.trust.policy import KeySource
    from enroot_py.features.trust.signatures import Signature

_MIN_RSA_BITS = 2048
BY_ANOTHER_KEY = "it is by another key"


class Signer(Protocol):
    """A key or identity. ``str`` names it for messages."""

    def refusal(self, signature: Signature) -> str:
        """Return "" if this signer has made the signature, otherwise the reason why that is not proved."""

    def has_signed(self, signature: Signature) -> bool: ...


class Key:
    """A public key. Raises ConfigError if the source is not a supported key."""

    def __init__(self, source: KeySource) -> None:
        try:
            from cryptography.exceptions import UnsupportedAlgorithm
            from cryptography.hazmat.primitives import serialization
        except ModuleNotFoundError as e:
            raise build.missing("signatures", e) from e

        self.source = source
        data = source.content()
        try:
            self.public: Any = serialization.load_pem_public_key(data)
        except (ValueError, UnsupportedAlgorithm) as e:
            raise _no_key(source, data) from e
        verify = verifier(self.public)
        if verify is None:
            size = getattr(self.public, "key_size", 0)
            what = f"RSA of {size} bits" if "RSA" in type(self.public).__name__ else type(self.public).__name__
            raise ConfigError(
                f"{source.where}: {source} is not a supported key: {what}",
                hint=f"use ECDSA P-256 or P-384, Ed25519, or RSA of {_MIN_RSA_BITS} bits or more",
            )
        self._verify = verify

    def __str__(self) -> str:
        return str(self.source)

    def refusal(self, signature: Signature) -> str:
        return "" if self.has_signed(signature) else BY_ANOTHER_KEY

    def has_signed(self, signature: Signature) -> bool:
        return self.verify(signature.payload, signature.signature)

    def verify(self, payload: bytes, signature: bytes) -> bool:
        return self._verify(payload, signature)


def verifier(key: Any) -> Callable[[bytes, bytes], bool] | None:
    """Return a function that verifies the signature of a payload by a public key, or None for an unsupported key."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa

    schemes: list[tuple[Any, ...]]
    if isinstance(key, ed25519.Ed25519PublicKey):
        schemes = [()]
    elif isinstance(key, rsa.RSAPublicKey) and key.key_size >= _MIN_RSA_BITS:
        schemes = [(padding.PKCS1v15(), hashes.SHA256())]
    elif isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, (ec.SECP256R1, ec.SECP384R1)):
        # Old versions of cosign use SHA-256 for every curve; new versions use the hash of the curve's size.
        schemes = [(ec.ECDSA(hashes.SHA256()),)]
        schemes += [(ec.ECDSA(hashes.SHA384()),)] if isinstance(key.curve, ec.SECP384R1) else []
    else:
        return None

    def verify(payload: bytes, signature: bytes) -> bool:
        for scheme in schemes:
            try:
                key.verify(signature, payload, *scheme)
                return True
            except InvalidSignature:
                continue
        return False

    return verify


def _no_key(source: KeySource, data: bytes) -> ConfigError:
    """Return an error for a file without a public key. The message names what the file has instead."""
    head = data.partition(b"-----BEGIN ")[2].partition(b"-----")[0].decode("ascii", "replace")
    hint = "convert it to PEM: cosign public-key --key cosign.key"
    if "PRIVATE" in head:
        hint = "keep the private key secret; " + hint
    elif "CERTIFICATE" in head:
        hint = "extract its public key, whose expiry is not checked: openssl x509 -pubkey -noout"
    what = f"a {head.lower()}, " if head and head != "PUBLIC KEY" else ""
    return ConfigError(f"{source.where}: {source} is {what}not a public key", hint=hint)
