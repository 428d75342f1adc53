"""Image signatures in cosign's format, with keys that the tests make.

Source: cosign's specs/SIGNATURE_SPEC.md. This module uses none of the code under test.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from nacl.secret import SecretBox

from tests.images import OCI, Pusher, digest

PAYLOAD = "application/vnd.dev.cosign.simplesigning.v1+json"
ARTIFACT = "application/vnd.dev.cosign.artifact.sig.v1+json"
BUNDLE = "application/vnd.dev.sigstore.bundle.v0.3+json"
IN_TOTO = "application/vnd.in-toto+json"
ANNOTATION = "dev.cosignproject.cosign/signature"


class Signer:
    """A key pair; ``kind`` is p256, p384, p384-sha384, ed25519 or rsa."""

    def __init__(self, kind: str = "p256") -> None:
        self.kind = kind
        self.key: Any
        if kind == "ed25519":
            self.key = ed25519.Ed25519PrivateKey.generate()
        elif kind.startswith("rsa"):
            self.key = rsa.generate_private_key(65537, int(kind[3:] or 2048))
        else:
            self.key = ec.generate_private_key(ec.SECP384R1() if kind.startswith("p384") else ec.SECP256R1())

    @property
    def public(self) -> bytes:
        return bytes(
            self.key.public_key().public_bytes(
                serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
            )
        )

    def sign(self, data: bytes) -> bytes:
        if self.kind == "ed25519":
            return bytes(self.key.sign(data))
        if self.kind.startswith("rsa"):
            return bytes(self.key.sign(data, padding.PKCS1v15(), hashes.SHA256()))
        return bytes(self.key.sign(data, ec.ECDSA(hashes.SHA384() if self.kind == "p384-sha384" else hashes.SHA256())))

    def write(self, path: Path) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self.public)
        return path


def payload(reference: str, of: str, **optional: object) -> bytes:
    """Return the payload to sign. It states that the image with digest ``of`` is ``reference``."""
    return json.dumps(
        {
            "critical": {
                "identity": {"docker-reference": reference},
                "image": {"docker-manifest-digest": of},
                "type": "cosign container image signature",
            },
            "optional": optional or None,
        }
    ).encode()


def push(
    pusher: Pusher,
    repository: str,
    of: str,
    signed: Sequence[tuple[bytes, bytes]],
    *,
    tag: str = "",
    subject: str = "",
    proofs: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Push signatures, each a payload and its signature, under cosign's tag for the image with digest ``of``.

    ``proofs`` are additional annotations. Return digest and size of the signatures' manifest.
    """
    pusher.blob(repository, b"{}")
    for data, _ in signed:
        pusher.blob(repository, data)
    manifest: dict[str, Any] = {
        "schemaVersion": 2,
        "mediaType": OCI["manifest"],
        "config": {"mediaType": OCI["config"], "size": 2, "digest": digest(b"{}")},
        "layers": [
            {
                "mediaType": PAYLOAD,
                "size": len(data),
                "digest": digest(data),
                "annotations": {ANNOTATION: base64.b64encode(signature).decode(), **(proofs or {})},
            }
            for data, signature in signed
        ],
    }
    if subject:
        manifest["subject"] = {"mediaType": OCI["manifest"], "digest": subject, "size": 2}
    written = json.dumps(manifest).encode()
    return {"digest": pusher.manifest(repository, tag or of.replace(":", "-") + ".sig", written), "size": len(written)}


def sign(pusher: Pusher, repository: str, of: str, signer: Signer, reference: str) -> None:
    """Sign an image as ``cosign sign --key`` does, or as skopeo does if the reference has a tag."""
    data = payload(reference, of)
    push(pusher, repository, of, [(data, signer.sign(data))])


def statement(of: str, **changes: object) -> bytes:
    """Return the payload of cosign 3: an in-toto statement with a digest and no image name."""
    subject = [{"digest": {"sha256": of.removeprefix("sha256:")}, "annotations": {}}]
    kinds = {"_type": "https://in-toto.io/Statement/v1", "predicateType": "https://sigstore.dev/cosign/sign/v1"}
    return json.dumps({**kinds, "subject": subject, "predicate": {}, **changes}).encode()


def bundle(signer: Signer, body: bytes, kind: str = IN_TOTO, material: dict[str, Any] | None = None) -> bytes:
    """Return a bundle as cosign 3 makes it with a key.

    Sources: sigstore_bundle.proto of protobuf-specs, and DSSE's protocol.md.
    """
    signed = f"DSSEv1 {len(kind)} {kind} {len(body)} ".encode() + body
    envelope = {
        "payload": base64.b64encode(body).decode(),
        "payloadType": kind,
        "signatures": [{"sig": base64.b64encode(signer.sign(signed)).decode()}],
    }
    material = material or {"publicKey": {"hint": "x"}, "tlogEntries": []}
    return json.dumps({"mediaType": BUNDLE, "verificationMaterial": material, "dsseEnvelope": envelope}).encode()


def push_bundles(pusher: Pusher, repository: str, of: str, bundles: Sequence[bytes]) -> None:
    """Push bundles under cosign's tag for the image's bundles, for a registry without a list of referrers."""
    entries = []
    for number, data in enumerate(bundles):
        pusher.blob(repository, b"{}")
        pusher.blob(repository, data)
        manifest = {
            "schemaVersion": 2,
            "mediaType": OCI["manifest"],
            "artifactType": BUNDLE,
            "config": {"mediaType": "application/vnd.oci.empty.v1+json", "size": 2, "digest": digest(b"{}")},
            "layers": [{"mediaType": BUNDLE, "size": len(data), "digest": digest(data)}],
            "subject": {"mediaType": OCI["manifest"], "digest": of, "size": 2},
        }
        written = json.dumps(manifest).encode()
        named = pusher.manifest(repository, f"bundle{number}", written)
        entry = {"mediaType": OCI["manifest"], "artifactType": BUNDLE, "digest": named, "size": len(written)}
        entries.append(entry)
    listing = {"schemaVersion": 2, "mediaType": OCI["index"], "manifests": entries}
    pusher.manifest(repository, of.replace(":", "-"), json.dumps(listing).encode())


def encrypted(signer: Signer, passphrase: bytes) -> bytes:
    """Return the encrypted private key in the format of cosign and skopeo: go-securesystemslib's ``encrypted``."""
    plain = signer.key.private_bytes(
        serialization.Encoding.DER, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    salt, nonce = os.urandom(32), os.urandom(24)
    key = hashlib.scrypt(passphrase, salt=salt, n=1 << 15, r=8, p=1, maxmem=1 << 26, dklen=32)
    boxed = SecretBox(key).encrypt(plain, nonce).ciphertext
    numbers = {"N": 1 << 15, "r": 8, "p": 1}
    document = {
        "kdf": {"name": "scrypt", "params": numbers, "salt": base64.b64encode(salt).decode()},
        "cipher": {"name": "nacl/secretbox", "nonce": base64.b64encode(nonce).decode()},
        "ciphertext": base64.b64encode(boxed).decode(),
    }
    text = base64.encodebytes(json.dumps(document).encode())
    return b"-----BEGIN ENCRYPTED COSIGN PRIVATE KEY-----\n" + text + b"-----END ENCRYPTED COSIGN PRIVATE KEY-----\n"


# ---------------------------------------------------------------------------
# Signatures without a long-lived key, by a Fulcio and a Rekor for the tests

EMAIL, OIDC = "me@site.example", "https://login.site.example"
_FULCIO = "1.3.6.1.4.1.57264.1."


def _builder(name: str, issuer: str, key: Any, start: int, seconds: int) -> x509.CertificateBuilder:
    def named(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)] if text else [])

    begin = datetime.datetime.fromtimestamp(start, datetime.timezone.utc)
    builder = x509.CertificateBuilder().subject_name(named(name)).issuer_name(named(issuer)).public_key(key)
    builder = builder.serial_number(x509.random_serial_number()).not_valid_before(begin)
    return builder.not_valid_after(begin + datetime.timedelta(seconds=seconds))


class Authority:
    """A certificate authority; without ``parent`` it is a root."""

    def __init__(
        self, name: str, start: int, parent: Authority | None = None, *, days: int = 3650, **wrong: Any
    ) -> None:
        self.name = name
        self.key = ec.generate_private_key(ec.SECP256R1())
        signer = parent or self
        builder = _builder(name, signer.name, self.key.public_key(), start, 86400 * days)
        constraints = x509.BasicConstraints(ca=wrong.get("ca", True), path_length=wrong.get("length"))
        builder = builder.add_extension(constraints, critical=True)
        usage = {name: name == "key_cert_sign" and wrong.get("signs", True) for name in _USAGES}
        builder = builder.add_extension(x509.KeyUsage(**usage), critical=True)
        if extra := wrong.get("extra"):
            builder = builder.add_extension(extra, critical=True)
        self.certificate = builder.sign(signer.key, hashes.SHA256())

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    def certify(self, signer: Signer, start: int, **changes: Any) -> bytes:
        """Return a code-signing certificate for a signer's key, valid for ten minutes, in PEM."""
        builder = _builder("", self.name, signer.key.public_key(), start, 600)
        names: list[x509.GeneralName] = [x509.RFC822Name(changes.get("email", EMAIL))]
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=True)
        purpose = changes.get("purpose", ExtendedKeyUsageOID.CODE_SIGNING)
        builder = builder.add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
        for number, issuer in changes.get("issuers", {1: OIDC, 8: OIDC}).items():
            data = issuer.encode() if number == 1 else b"\x0c" + bytes([len(issuer)]) + issuer.encode()
            oid = x509.ObjectIdentifier(f"{_FULCIO}{number}")
            builder = builder.add_extension(x509.UnrecognizedExtension(oid, data), critical=False)
        if extra := changes.get("extra"):
            builder = builder.add_extension(extra, critical=True)
        return builder.sign(self.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


_USAGES = (
    *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"),
    *("key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
)


def logged(rekor: Signer, time: int, body: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return a log entry with its signed timestamp, in cosign's format."""
    encoded = base64.b64encode(json.dumps(body).encode()).decode()
    entry = {"body": encoded, "integratedTime": time, "logIndex": 7, "logID": hashlib.sha256(rekor.public).hexdigest()}
    entry |= changes
    signed = rekor.sign(json.dumps(entry, sort_keys=True, separators=(",", ":")).encode())
    return {"SignedEntryTimestamp": base64.b64encode(signed).decode(), "Payload": entry}


def hashedrekord(data: bytes, signature: bytes, verifier: bytes) -> dict[str, Any]:
    """Return Rekor's log record of a signature: type hashedrekord."""
    content, key = (base64.b64encode(part).decode() for part in (signature, verifier))
    return {
        "apiVersion": "0.0.1",
        "kind": "hashedrekord",
        "spec": {
            "data": {"hash": {"algorithm": "sha256", "value": hashlib.sha256(data).hexdigest()}},
            "signature": {"content": content, "publicKey": {"content": key}},
        },
    }
