"""Verify signatures without a long-lived key by Fulcio's certificates and Rekor's signed timestamps, without a network.

A signer proves an e-mail address to Fulcio, which certifies a key for some minutes. Rekor logs the signature, and signs
the time of the entry. As for podman, the policy names the certificates of Fulcio's authorities and Rekor's public key.
A signature counts if Rekor's entry is about this signature, content and certificate, and if the certificate was valid
at the time of the entry. A signature that cannot be verified is refused. The proof that the certificate was
logged (SCT) is not checked, as in podman.

Sources: containers-policy.json(5), fulcio; oid-info.md of Fulcio; hashedrekord and dsse 0.0.1 of Rekor; RFC 8785;
RFC 5280, 4.2 and 6.1.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from enroot_py.base.errors import ConfigError
from enroot_py.features.trust import keys
from enroot_py.features.trust.keys import Key
from enroot_py.features.trust.signatures import Signature, dsse_body, unique_json

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

    from enroot_py.features.trust.policy import Fulcio, KeySource

_ISSUER, _ISSUER_DER = "1.3.6.1.4.1.57264.1.1", "1.3.6.1.4.1.57264.1.8"
_MAX_CHAIN_CERTIFICATES = 5
_MAX_NUMBER = 1 << 53  # RFC 8785: larger numbers have no exact form
_MALFORMED = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


class Unproved(Exception):
    """The reason why a signature does not count."""


class Log:
    """A transparency log, known by its public keys. Raises ConfigError for a malformed key."""

    def __init__(self, sources: Iterable[KeySource]) -> None:
        self._keys = [Key(source) for source in sources]

    def time(self, signature: Signature, verified_by: bytes) -> int:
        """Return the time, in seconds since the epoch, at which the log has recorded a signature.

        ``verified_by`` is the DER form of the certificate or public key. Raises Unproved.
        """
        if not signature.entry:
            raise Unproved(
                "it has no entry of a transparency log with a signed timestamp (Rekor 1 signs it, Rekor 2 does not)"
            )
        try:
            entry = unique_json(signature.entry)
            payload, timestamp = entry["Payload"], base64.b64decode(entry["SignedEntryTimestamp"], validate=True)
            body = base64.b64decode(payload["body"], validate=True)
            signed = _canonical(payload)
        except _MALFORMED as e:
            raise Unproved("its log entry is malformed") from e
        if not any(key.verify(signed, timestamp) for key in self._keys):
            raise Unproved("its log entry is not signed by the transparency log of the policy")
        try:
            _check_body(unique_json(body), signature, verified_by)
        except _MALFORMED as e:
            raise Unproved("its log entry is malformed") from e
        time: int = payload["integratedTime"]
        return time


def _canonical(payload: dict[str, Any]) -> bytes:
    """Return the JSON text that the log signs: RFC 8785, which here means sorted keys. Raises ValueError."""
    if set(payload) != {"body", "integratedTime", "logID", "logIndex"}:
        raise ValueError("unknown keys")
    for key in ("integratedTime", "logIndex"):
        if type(payload[key]) is not int or not 0 <= payload[key] < _MAX_NUMBER:
            raise ValueError(key)
    bytes.fromhex(payload["logID"])
    return json.dumps(payload, sort_keys=True, separators=(",", ":")).encode()


def _check_body(body: dict[str, Any], signature: Signature, verified_by: bytes) -> None:
    """Check that an entry is about this signature, content and key. Raises Unproved and exceptions in _MALFORMED."""
    kind, spec = (body["kind"], body["apiVersion"]), body["spec"]
    content = dsse_body(signature.payload)
    if kind == ("hashedrekord", "0.0.1"):
        hashed, content = spec["data"]["hash"], signature.payload
        entries = [(spec["signature"]["content"], spec["signature"]["publicKey"]["content"])]
    elif kind == ("dsse", "0.0.1") and content is not None:
        hashed = spec["payloadHash"]
        entries = [(entry["signature"], entry["verifier"]) for entry in spec["signatures"]]
    else:
        raise Unproved(f"its log entry is of an unknown kind: {kind[0]} {kind[1]}"[:80])
    if hashed != {"algorithm": "sha256", "value": hashlib.sha256(content).hexdigest()}:
        raise Unproved("its log entry is about other content")
    for signed, verifier in entries:
        is_same = base64.b64decode(signed, validate=True) == signature.signature
        if is_same and _der(base64.b64decode(verifier, validate=True)) == verified_by:
            return
    raise Unproved("its log entry is about another signature or key")


def _der(pem: bytes) -> bytes:
    """Return the DER form of one certificate or public key. Raises ValueError."""
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization

    if b"CERTIFICATE" in pem:
        (certificate,) = x509.load_pem_x509_certificates(pem)
        return certificate.public_bytes(serialization.Encoding.DER)
    return _spki(serialization.load_pem_public_key(pem))


def _spki(key: Any) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return bytes(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo))


class Logged:
    """A key whose signatures must be in a transparency log."""

    def __init__(self, key: Key, log: Log) -> None:
        self._key = key
        self._log = log

    def __str__(self) -> str:
        return str(self._key)

    def refusal(self, signature: Signature) -> str:
        if refusal := self._key.refusal(signature):
            return refusal
        try:
            self._log.time(signature, _spki(self._key.public))
        except Unproved as e:
            return str(e)
        return ""

    def has_signed(self, signature: Signature) -> bool:
        return not self.refusal(signature)


class Identified:
    """An e-mail address that Fulcio's authorities certify. Raises ConfigError if their certificates are malformed."""

    def __init__(self, fulcio: Fulcio, log: Log) -> None:
        from cryptography import x509

        self._fulcio = fulcio
        self._log = log
        try:
            self._anchors = x509.load_pem_x509_certificates(fulcio.ca.content())
        except ValueError as e:
            hint = "write the certificates of Fulcio's authorities in PEM"
            raise ConfigError(f"{fulcio.ca.where}: {fulcio.ca} has no certificate", hint=hint) from e

    def __str__(self) -> str:
        return f"{self._fulcio.subject_email} of {self._fulcio.oidc_issuer}"

    def has_signed(self, signature: Signature) -> bool:
        return not self.refusal(signature)

    def refusal(self, signature: Signature) -> str:
        from cryptography import exceptions, x509
        from cryptography.hazmat.primitives.serialization import Encoding

        # Exceptions that a hostile certificate can raise, besides _MALFORMED.
        malformed = (
            *(x509.DuplicateExtension, x509.ExtensionNotFound, x509.UnsupportedGeneralNameType, x509.InvalidVersion),
            exceptions.UnsupportedAlgorithm,
        )
        if not signature.certificate:
            return "it has no certificate"
        try:
            (leaf,) = x509.load_pem_x509_certificates(signature.certificate)
            chain = x509.load_pem_x509_certificates(signature.chain) if signature.chain else []
            time = self._log.time(signature, leaf.public_bytes(Encoding.DER))
            self._check(leaf, chain, time)
            verify = keys.verifier(leaf.public_key())
        except Unproved as e:
            return str(e)
        except (*_MALFORMED, *malformed):
            return "its certificate is malformed"
        if verify is None or not verify(signature.payload, signature.signature):
            return "it is not by the key in its certificate"
        return ""

    def _check(self, leaf: Certificate, chain: list[Certificate], time: int) -> None:
        """Check that a certificate, valid at ``time``, proves the identity. Raises Unproved, or errors if malformed."""
        from cryptography.x509 import ExtendedKeyUsage, RFC822Name, SubjectAlternativeName
        from cryptography.x509.oid import ExtendedKeyUsageOID

        if not _is_valid(leaf, time):
            raise Unproved("its certificate was not valid at the time of its log entry")
        if ExtendedKeyUsageOID.CODE_SIGNING not in leaf.extensions.get_extension_for_class(ExtendedKeyUsage).value:
            raise Unproved("its certificate is not for signing")
        if len(chain) > _MAX_CHAIN_CERTIFICATES or not _has_path(leaf, chain, self._anchors, time, 0):
            raise Unproved("its certificate is not by the authorities of the policy")
        issuers = set(_issuers(leaf))
        if issuers != {self._fulcio.oidc_issuer}:
            raise Unproved(f"the issuer in its certificate is {' and '.join(sorted(issuers)) or 'missing'}"[:200])
        names = leaf.extensions.get_extension_for_class(SubjectAlternativeName).value
        emails = names.get_values_for_type(RFC822Name)
        if self._fulcio.subject_email not in emails:
            raise Unproved(f"the e-mail address in its certificate is {', '.join(emails) or 'missing'}"[:200])


def _issuers(leaf: Certificate) -> list[str]:
    """Return the identity providers that a certificate names in Fulcio's two extensions. Raises ValueError."""
    issuers = []
    for extension in leaf.extensions:
        oid = extension.oid.dotted_string
        if oid in (_ISSUER, _ISSUER_DER):
            data: bytes = extension.value.public_bytes()
            if oid == _ISSUER_DER:
                if len(data) < 2 or data[0] != 0x0C or data[1] >= 0x80 or len(data) != 2 + data[1]:  # UTF8String
                    raise ValueError("not a short UTF8String")
                data = data[2:]
            issuers.append(data.decode())
    return issuers


def _has_path(leaf: Certificate, chain: list[Certificate], anchors: list[Certificate], time: int, depth: int) -> bool:
    """Return whether an anchor has issued a certificate, directly or through other certificates of the chain.

    ``depth`` is the number of authorities below the issuer of the certificate.
    """
    if not _is_understood(leaf):
        return False
    if any(_has_issued(anchor, leaf, time, depth) for anchor in anchors):
        return True
    rest = [certificate for certificate in chain if certificate != leaf]
    return any(
        _has_issued(issuer, leaf, time, depth)
        and _has_path(issuer, [other for other in rest if other != issuer], anchors, time, depth + 1)
        for issuer in rest
    )


def _has_issued(issuer: Certificate, certificate: Certificate, time: int, depth: int) -> bool:
    """Return whether an authority that was valid at ``time`` has issued a certificate for signing.

    ``depth`` is the number of authorities below the issuer.
    """
    from cryptography.exceptions import InvalidSignature
    from cryptography.x509 import BasicConstraints, ExtendedKeyUsage, KeyUsage
    from cryptography.x509.oid import ExtendedKeyUsageOID

    try:
        certificate.verify_directly_issued_by(issuer)
    except (InvalidSignature, ValueError, TypeError):
        return False
    values = {type(extension.value): extension.value for extension in issuer.extensions}
    basic, usage, extended = (values.get(kind) for kind in (BasicConstraints, KeyUsage, ExtendedKeyUsage))
    if not isinstance(basic, BasicConstraints) or not basic.ca:
        return False
    if isinstance(usage, KeyUsage) and not usage.key_cert_sign:
        return False
    purposes = (ExtendedKeyUsageOID.CODE_SIGNING, ExtendedKeyUsageOID.ANY_EXTENDED_KEY_USAGE)
    if isinstance(extended, ExtendedKeyUsage) and not any(purpose in extended for purpose in purposes):
        return False
    is_short_enough = basic.path_length is None or depth <= basic.path_length
    return is_short_enough and _is_valid(issuer, time) and _is_understood(issuer)


def _is_valid(certificate: Certificate, time: int) -> bool:
    return certificate.not_valid_before_utc.timestamp() <= time <= certificate.not_valid_after_utc.timestamp()


def _is_understood(certificate: Certificate) -> bool:
    """Return whether this module checks all critical extensions (RFC 5280, 4.2). It never accepts name constraints."""
    from cryptography.x509 import BasicConstraints, ExtendedKeyUsage, KeyUsage, NameConstraints, SubjectAlternativeName

    known = (BasicConstraints, ExtendedKeyUsage, KeyUsage, SubjectAlternativeName)
    for extension in certificate.extensions:
        if (
            isinstance(extension.value, NameConstraints)
            or extension.critical
            and not isinstance(extension.value, known)
        ):
            return False
    return True
