"""Find and read image signatures that cosign makes, with a key or a certificate.

cosign signs a payload, which has the name and digest of an image. In a signature manifest, each layer is a payload, and
an annotation of the layer is the signature. A signature manifest has the tag ``sha256-HEX.sig``, or refers to the image
and is in the registry's list of referrers (older registries: in the index with the tag ``sha256-HEX``). cosign 3 makes
sigstore bundles, in which the payload is an in-toto statement after a type prefix. A statement names only a digest.

Sources: cosign's specs/SIGNATURE_SPEC.md and BUNDLE_SPEC.md; DSSE's protocol.md, "PAE"; containers-signature(5); OCI
distribution specification, "Listing Referrers" and "Referrers Tag Schema". verify.py verifies the signatures.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from enroot_py.base import digests, log
from enroot_py.base.errors import ImageError
from enroot_py.features.trust import identities
from enroot_py.features.trust.identities import DockerName
from enroot_py.registry import manifests

if TYPE_CHECKING:
    from enroot_py.registry.manifests import Descriptor
    from enroot_py.registry.sources import Blob

_TYPE = "cosign container image signature"
_PAYLOAD = "application/vnd.dev.cosign.simplesigning.v1+json"
_ANNOTATION = "dev.cosignproject.cosign/signature"
# More annotations, for a signature by a certificate: certificate and chain in PEM, log entry in JSON.
_PROOFS = ("dev.sigstore.cosign/certificate", "dev.sigstore.cosign/chain", "dev.sigstore.cosign/bundle")
_BUNDLE = "application/vnd.dev.sigstore.bundle.v0.3+json"
_ARTIFACTS = (
    *("application/vnd.dev.cosign.artifact.sig.v1+json", "application/vnd.oci.image.config.v1+json", ""),
    _BUNDLE,
)
# Types of the statement in a bundle. Statements of other types by the same key are not image signatures.
_STATEMENT, _SIGNED = "https://in-toto.io/Statement/v1", "https://sigstore.dev/cosign/sign/v1"
_PREDICATE = "dev.sigstore.bundle.predicateType"  # an optional annotation
_IN_TOTO = b"DSSEv1 28 application/vnd.in-toto+json "
_BEGIN, _END = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
# Limits against a hostile registry.
MAX_SIGNATURES = 50  # per manifest; cosign appends new signatures
_MAX_REFERRERS = 8
_MAX_STORED_SIGNATURES = 2 * (1 + _MAX_REFERRERS) * MAX_SIGNATURES
_MAX_PAYLOAD_BYTES = 64 << 10
_MAX_SIGNATURE_BYTES = 4 << 10  # in base64
_MAX_PROOF_BYTES = 64 << 10  # of a certificate, chain or log entry


@dataclass(frozen=True, slots=True)
class Signature:
    """A payload and its signature, not trusted until verified.

    A signature without a long-lived key also has the signer's ``certificate`` and a ``chain`` of authorities, both in
    PEM, and the ``entry`` of a transparency log: JSON with SignedEntryTimestamp and Payload.
    """

    payload: bytes
    signature: bytes
    certificate: bytes = b""
    chain: bytes = b""
    entry: bytes = b""

    def parts(self) -> tuple[bytes, ...]:
        return self.payload, self.signature, self.certificate, self.chain, self.entry


@dataclass(frozen=True, slots=True)
class Evidence:
    """Evidence for an image: signatures of its manifest or index, and the index."""

    signatures: tuple[Signature, ...] = ()
    index: bytes = b""

    def covers(self, digest: str) -> set[str]:
        """Return the digests by which a signature can cover a manifest.

        These are the digest of the manifest, and the digest of the index if the index lists the manifest.
        """
        return {digest, digests.of(self.index)} if self.index and digest in _listed(self.index) else {digest}

    def dumps(self) -> bytes:
        pairs = [[base64.b64encode(part).decode() for part in s.parts()] for s in self.signatures]
        return json.dumps({"signatures": pairs, "index": base64.b64encode(self.index).decode()}).encode()


def loads(data: bytes) -> Evidence:
    """Parse the output of Evidence.dumps(). Verify the result: ``data`` may be forged. Raises ValueError."""
    try:
        document = json.loads(data)
        pairs = [
            Signature(*(base64.b64decode(part) for part in pair))
            for pair in document["signatures"][:_MAX_STORED_SIGNATURES]
        ]
        return Evidence(tuple(pairs), base64.b64decode(document["index"]))
    except (KeyError, TypeError, AttributeError, RecursionError) as e:
        raise ValueError(str(e)) from None


def _listed(index: bytes) -> set[str]:
    """Return the digests that an index lists, or none for another document."""
    try:
        document = manifests.parse(index, "the index")
    except ImageError:
        return set()
    entries = None if "layers" in document else document.get("manifests")  # CVE-2021-41190: an image can have both
    listed = [manifests.fields(entry).get("digest") for entry in entries] if isinstance(entries, list) else []
    return {digest for digest in listed if isinstance(digest, str)}


# ---------------------------------------------------------------------------
# Finding signatures


class SignatureSource(Protocol):
    """A repository of images and signatures. Methods raise RegistryError and ImageError."""

    def named(self, digest: str) -> bytes: ...
    def blob(self, descriptor: Descriptor) -> Blob: ...

    def tagged(self, tag: str) -> bytes | None:
        """Return the manifest of a tag, or None if the tag does not exist."""

    def referrers(self, digest: str) -> bytes | None:
        """Return the list of a manifest's referrers, or None if the registry does not support the request."""


def of(repository: SignatureSource, digest: str) -> Iterator[list[Signature]]:
    """Yield the signatures of a manifest or index, first from the signature tag, then from each referrer."""
    tag = digest.replace(":", "-")
    seen: dict[str, bytes] = {}
    data = repository.tagged(tag + ".sig")
    yield list(_in_manifest(repository, data, seen)) if data else []
    listing = repository.referrers(digest) or repository.tagged(tag)
    for number, referrer in enumerate(_signing(listing) if listing else ()):
        if number == _MAX_REFERRERS:
            log.warn(f"{digest} has more than {_MAX_REFERRERS} signature manifests: ignoring the others")
            return
        data = repository.named(referrer)
        subject = manifests.fields(manifests.parse(data, "a signature").get("subject"))
        if subject.get("digest") == digest:
            yield list(_in_manifest(repository, data, seen))


def _signing(listing: bytes) -> Iterator[str]:
    """Yield the digests of referrers that may contain signatures."""
    entries = manifests.parse(listing, "the list of referrers").get("manifests")
    for entry in entries if isinstance(entries, list) else ():
        fields = manifests.fields(entry)
        predicate = manifests.fields(fields.get("annotations")).get(_PREDICATE, _SIGNED)
        kind = str(fields.get("artifactType") or "")
        if kind in _ARTIFACTS and predicate == _SIGNED and isinstance(fields.get("digest"), str):
            yield fields["digest"]


def _in_manifest(repository: SignatureSource, data: bytes, seen: dict[str, bytes]) -> Iterator[Signature]:
    """Yield the signatures in a signature manifest. ``seen`` caches payloads by digest: many are equal."""
    layers = manifests.parse(data, "a signature").get("layers")
    if not isinstance(layers, list):
        return
    if len(layers) > MAX_SIGNATURES:
        log.warn(f"ignoring all but the last {MAX_SIGNATURES} of {len(layers)} signatures")
    for layer in reversed(layers[-MAX_SIGNATURES:]):
        fields = manifests.fields(layer)
        media_type = fields.get("mediaType")
        annotations = manifests.fields(fields.get("annotations"))
        encoded = annotations.get(_ANNOTATION)
        try:
            if media_type == _BUNDLE:
                yield from _in_bundle(_fetched(repository, fields, seen))
            elif media_type == _PAYLOAD and isinstance(encoded, str) and len(encoded) <= _MAX_SIGNATURE_BYTES:
                signature = base64.b64decode(encoded, validate=True)
                yield Signature(_fetched(repository, fields, seen), signature, *_proofs(annotations))
        except (KeyError, TypeError, ValueError, RecursionError) as e:
            log.debug(f"malformed signature: {e}")


def _fetched(repository: SignatureSource, layer: dict[str, Any], seen: dict[str, bytes]) -> bytes:
    """Fetch a payload or bundle. Raises ImageError for a wrong digest, ValueError for a malformed descriptor."""
    descriptor = manifests.descriptor(layer)
    if descriptor.size > _MAX_PAYLOAD_BYTES:
        raise ValueError(f"the payload has {descriptor.size} bytes")
    if descriptor.digest not in seen:
        with repository.blob(descriptor) as stream:
            payload = b"".join(iter(lambda: stream.read(_MAX_PAYLOAD_BYTES), b""))
        if digests.of(payload) != descriptor.digest:
            raise ImageError(
                f"the payload {descriptor.digest} has the digest {digests.of(payload)}",
                hint="the registry or a proxy returned wrong data: sign the image again",
            )
        seen[descriptor.digest] = payload
    return seen[descriptor.digest]


def _proofs(annotations: dict[str, Any]) -> list[bytes]:
    """Return certificate, chain and log entry, each b"" if it is missing. Raises ValueError."""
    proofs = [str(annotations.get(name) or "").encode() for name in _PROOFS]
    if any(len(proof) > _MAX_PROOF_BYTES for proof in proofs):
        raise ValueError("a certificate or log entry is too large")
    return proofs


def _in_bundle(data: bytes) -> Iterator[Signature]:
    """Yield the signatures in a bundle. Raises ValueError, KeyError, TypeError."""
    document = unique_json(data)
    envelope, proofs = document["dsseEnvelope"], _bundled_proofs(document.get("verificationMaterial"))
    kind, body = envelope["payloadType"], base64.b64decode(envelope["payload"], validate=True)
    if not isinstance(kind, str):
        raise TypeError("payloadType is not a string")
    kind = kind.encode()
    signed = b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(body), body)
    for entry in envelope["signatures"][:_MAX_REFERRERS]:
        yield Signature(signed, base64.b64decode(entry["sig"], validate=True), *proofs)


def _bundled_proofs(material: object) -> list[bytes]:
    """Return certificate, chain and log entry of a bundle in the form of annotations. A missing part is b""."""
    fields = manifests.fields(material)
    chain = manifests.fields(fields.get("x509CertificateChain")).get("certificates") or [fields.get("certificate")]
    encoded = [str(manifests.fields(certificate).get("rawBytes") or "") for certificate in chain]
    leaf, *rest = [f"{_BEGIN}\n{text}\n{_END}\n" if text else "" for text in encoded]
    entries = fields.get("tlogEntries") or [None]
    try:
        entry, promise = entries[0], entries[0]["inclusionPromise"]["signedEntryTimestamp"]
        payload = {
            "body": entry["canonicalizedBody"],
            "integratedTime": int(entry["integratedTime"]),
            "logIndex": int(entry["logIndex"]),
            "logID": base64.b64decode(entry["logId"]["keyId"], validate=True).hex(),
        }
        logged = json.dumps({"SignedEntryTimestamp": promise, "Payload": payload})
    except (KeyError, TypeError, ValueError):  # a signature by a key, or a log without signed timestamps
        logged = ""
    return [leaf.encode(), "".join(rest).encode(), logged.encode()]


def dsse_body(payload: bytes) -> bytes | None:
    """Return the statement in the payload of a bundle, or None for another payload."""
    return payload.removeprefix(_IN_TOTO).partition(b" ")[2] if payload.startswith(_IN_TOTO) else None


def unique_json(data: bytes) -> Any:
    """Parse JSON. Refuse duplicate keys, in which two parsers could see different claims. Raises ValueError."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(document := dict(pairs)) != len(pairs):
            raise ValueError("duplicate key")
        return document

    return json.loads(data, object_pairs_hook=unique)


# ---------------------------------------------------------------------------
# Reading signatures


@dataclass(frozen=True, slots=True)
class SignedClaim:
    """The name and digest in a payload. The payload of a bundle has no name."""

    name: DockerName | None
    digest: str


def claim(payload: bytes) -> SignedClaim | None:
    """Parse a payload; return None for other content that the key may have signed."""
    if payload.startswith(_IN_TOTO):
        return _statement(payload.removeprefix(_IN_TOTO))
    try:
        document = unique_json(payload)
        critical = document["critical"]
        name, digest = critical["identity"]["docker-reference"], critical["image"]["docker-manifest-digest"]
        if (
            critical["type"] != _TYPE
            or len(critical) != 3
            or not isinstance(name, str)
            or not digests.is_digest(digest)
        ):
            return None
        return SignedClaim(identities.read(name), digest)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _statement(counted: bytes) -> SignedClaim | None:
    """Parse the payload of a bundle: a length and an in-toto statement."""
    size, _, body = counted.partition(b" ")
    try:
        document = unique_json(body)
        (subject,) = document["subject"]
        digest = f"sha256:{subject['digest']['sha256']}"
        if (document["_type"], document["predicateType"]) != (_STATEMENT, _SIGNED) or not digests.is_digest(digest):
            return None
        return SignedClaim(None, digest) if size == b"%d" % len(body) else None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
