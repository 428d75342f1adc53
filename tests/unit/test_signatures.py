"""Verify signatures with keys of each kind, and read signatures from hostile replies of a registry."""

from __future__ import annotations

import base64
import io
import json
import pathlib
import random
import subprocess
import sys
from typing import Any

import pytest

from enroot_py.base.errors import ConfigError, ImageError, PenrootError
from enroot_py.features.trust import identities, signatures, verify
from enroot_py.features.trust.keys import Key
from enroot_py.features.trust.policy import KeySource, Requirement
from enroot_py.features.trust.signatures import MAX_SIGNATURES, Evidence, Signature
from enroot_py.registry.manifests import Descriptor
from tests import images
from tests.images import OCI, digest
from tests.signing import ANNOTATION, ARTIFACT, BUNDLE, IN_TOTO, PAYLOAD, Signer, bundle, payload, statement
from tests.unit.test_fuzz import mutate, retyped

IMAGE = identities.read("reg.site/box:1")
D, OTHER = "sha256:" + "a" * 64, "sha256:" + "b" * 64
KINDS = ["p256", "p384", "p384-sha384", "ed25519", "rsa2048", "rsa3072"]


def source(signer: Signer) -> KeySource:
    return KeySource("P:1", data=signer.public)


def signed(signer: Signer, reference: str = "reg.site/box:1", signed_digest: str = D) -> Signature:
    data = payload(reference, signed_digest)
    return Signature(data, signer.sign(data))


def refusal(*candidates: Signature, keys: list[Signer], identity: str = "matchRepoDigestOrExact") -> str:
    identity_ = identities.Identity(identity)
    requirement = Requirement("sigstoreSigned", "P:1", tuple(source(key) for key in keys), identity_)
    return verify.refusal(requirement, IMAGE, {D}, candidates)


@pytest.mark.parity("signatures of cosign and skopeo by key")
@pytest.mark.parametrize("kind", KINDS)
def test_keys_of_each_kind(kind: str) -> None:
    signer, other = Signer(kind), Signer(kind)
    good = signed(signer)
    assert refusal(good, keys=[signer]) == refusal(good, keys=[other, signer]) == ""
    assert refusal(good, keys=[other]) == "none of 1 signature is by the key in P:1"
    assert refusal(keys=[signer]) == "it has no signature"
    for bad in (
        Signature(good.payload + b" ", good.signature),
        Signature(good.payload, good.signature[:-1] + bytes([good.signature[-1] ^ 1])),
    ):
        assert refusal(bad, keys=[signer]) == "none of 1 signature is by the key in P:1"
    for empty in (b"", b"\0" * len(good.signature)):
        assert refusal(Signature(good.payload, empty), keys=[signer])


@pytest.mark.parametrize(
    ("build", "hint"),
    [
        ("0123456789ab 2026-11-26 deb\n", "install the package penroot-signatures"),
        ("0123456789ab 2026-11-26 make install\n", "make install EXTRAS=signatures"),
        ("0123456789ab 2026-11-26 wheel\n", "pip install 'penroot[signatures]'"),
        (None, "make dev"),
    ],
)
def test_missing_library_is_named_with_its_package(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, build: str | None, hint: str
) -> None:
    if build:
        (tmp_path / "BUILD").write_text(build)
    monkeypatch.setattr("enroot_py.base.build.FILE", str(tmp_path / "BUILD"))
    signer = Signer("p256")
    signature = signed(signer)
    monkeypatch.setitem(sys.modules, "cryptography.exceptions", None)
    with pytest.raises(ConfigError, match="signatures needs the Python library cryptography") as raised:
        refusal(signature, keys=[signer])
    assert raised.value.hint == hint


def test_why_a_signature_is_not_good() -> None:
    signer = Signer()
    assert refusal(signed(signer, "reg.site/box:2"), keys=[signer]).startswith("its signature is for reg.site/box:2")
    assert refusal(signed(signer, signed_digest=OTHER), keys=[signer]) == f"its signature is for {OTHER}"
    assert refusal(signed(signer, signed_digest=OTHER), signed(Signer()), signed(signer), keys=[signer]) == ""


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["critical"].update(type="atomic container signature"),
        lambda d: d["critical"].update(more=1),
        lambda d: d["critical"].pop("identity"),
        lambda d: d["critical"]["image"].update({"docker-manifest-digest": "sha256:x"}),
        lambda d: d["critical"]["identity"].update({"docker-reference": 7}),
        lambda d: d.update(critical=[]),
    ],
)
def test_signed_data_of_another_kind_is_no_signature(change: Any) -> None:
    signer = Signer()
    document = json.loads(payload("reg.site/box:1", D))
    change(document)
    data = json.dumps(document).encode()
    reason = refusal(Signature(data, signer.sign(data)), keys=[signer])
    assert reason == "the signed content is not an image signature"


@pytest.mark.parity("typos in a policy")
@pytest.mark.parametrize(
    "make, error, hint",
    [
        ("genpkey -algorithm ed25519", "a private key, not a public key", "keep the private key secret"),
        ("req -x509 -newkey ed25519 -nodes -days 1 -subj /CN=x -keyout /dev/null", "a certificate", "x509 -pubkey"),
        ("version", "not a public key", "cosign public-key"),
        ("genpkey -algorithm RSA -pkeyopt rsa_keygen_bits:1024 | openssl pkey -pubout", "RSA of 1024", "RSA of 2048"),
        ("ecparam -name secp256k1 -genkey -noout | openssl pkey -pubout", "is not a supported key", "P-256"),
        ("genpkey -algorithm x25519 | openssl pkey -pubout", "is not a supported key", "Ed25519"),
    ],
)
def test_invalid_key_is_reported(make: str, error: str, hint: str) -> None:
    data = subprocess.run(f"openssl {make}", shell=True, capture_output=True, check=True).stdout
    with pytest.raises(ConfigError) as caught:
        Key(KeySource("P:3", "", data))
    assert error in str(caught.value) and str(caught.value).startswith("P:3: ") and hint in caught.value.hint


@pytest.mark.parity("signatures of cosign and skopeo by key")
def test_keys_and_signatures_of_openssl(tmp_path: pathlib.Path) -> None:
    """openssl(1) makes the key and the signature."""
    data = payload("reg.site/box:1", D)
    (tmp_path / "payload").write_bytes(data)
    script = """
        openssl ecparam -name prime256v1 -genkey -noout -out key
        openssl dgst -sha256 -sign key -out signature payload
        openssl pkey -in key -pubout -out key.pub
    """
    subprocess.run(["sh", "-ec", script], cwd=tmp_path, check=True, capture_output=True)
    key = Key(KeySource("P:1", data=(tmp_path / "key.pub").read_bytes()))
    assert key.has_signed(Signature(data, (tmp_path / "signature").read_bytes()))


def test_signed_index_covers_the_images_that_it_lists() -> None:
    one, two = images.busybox(), images.busybox(architecture="arm64")
    index = images.index([(one, {"os": "linux", "architecture": "amd64"})])
    assert Evidence((), index).covers(one.digest()) == {one.digest(), digest(index)}
    assert Evidence((), index).covers(two.digest()) == {two.digest()}
    # Other readers accept this document as an image.
    both = b'{"manifests": [{"digest": "%s"}], "layers": []}' % D.encode()
    for wrong in (b"", b"[]", b"{", b'{"manifests": 1}', b'{"manifests": [1, {"digest": 1}]}', both):
        assert Evidence((), wrong).covers(D) == {D}


def test_stored_evidence_is_read_back(rng: random.Random) -> None:
    evidence = Evidence((signed(Signer()), signed(Signer("ed25519"))), b'{"manifests": []}')
    written = evidence.dumps()
    assert signatures.loads(written) == evidence
    for _ in range(300):
        try:
            signatures.loads(mutate(written.decode(), rng).encode("utf-8", "surrogateescape")).covers(D)
        except ValueError:
            continue


class Registry:
    """A repository with ``blobs`` by digest and ``tags`` by name. ``requests`` lists the blobs that were requested."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.tags: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.at = 0

    def named(self, digest: str) -> bytes:
        return self.blobs[digest]

    def tagged(self, tag: str) -> bytes | None:
        return self.tags.get(tag)

    def referrers(self, digest: str) -> bytes | None:
        return self.tags.get("referrers")

    def blob(self, descriptor: Descriptor) -> Any:
        self.requests.append(descriptor.digest)
        return io.BytesIO(self.blobs[descriptor.digest])

    def layer(self, signature: Signature, **changes: object) -> dict[str, Any]:
        name = digest(signature.payload)
        self.blobs[name] = signature.payload
        annotations = {ANNOTATION: base64.b64encode(signature.signature).decode()}
        layer = {"mediaType": PAYLOAD, "size": len(signature.payload), "digest": name, "annotations": annotations}
        return {**layer, **changes}

    def manifest(self, *layers: dict[str, Any], **more: object) -> bytes:
        return json.dumps({"schemaVersion": 2, "mediaType": OCI["manifest"], "layers": layers, **more}).encode()


def found_in(registry: Registry) -> list[Signature]:
    return [signature for more in signatures.of(registry, D) for signature in more]


SIG = D.replace(":", "-") + ".sig"


@pytest.mark.security("S4")
def test_only_the_last_signatures_are_read() -> None:
    registry, good = Registry(), signed(Signer())
    layers = [registry.layer(good)] * (3 * MAX_SIGNATURES)
    layers[-1] = registry.layer(signed(Signer(), signed_digest=OTHER))
    registry.tags[SIG] = registry.manifest(*layers)
    read_signatures = found_in(registry)
    assert len(read_signatures) == MAX_SIGNATURES and read_signatures[1:] == [good] * (MAX_SIGNATURES - 1)
    assert len(registry.requests) == 2  # equal payloads are read once


@pytest.mark.parametrize(
    "changes",
    [
        {"size": 1 << 40},
        {"mediaType": "text/plain"},
        {"annotations": {}},
        {"annotations": {ANNOTATION: "?"}},
        {"annotations": {ANNOTATION: "A" * 8000}},
        {"annotations": 7},
        {"digest": "sha256:x"},
    ],
)
def test_invalid_signature_is_skipped(changes: dict[str, object]) -> None:
    registry, good = Registry(), signed(Signer())
    registry.tags[SIG] = registry.manifest(registry.layer(good), registry.layer(good, **changes), 7)  # type: ignore[arg-type]
    assert found_in(registry) == [good]


def bundled(*bundles: bytes, **more: object) -> list[Signature]:
    """Return the signatures in ``bundles``, which refer to the image."""
    registry = Registry()
    entries = []
    for data in bundles:
        registry.blobs[digest(data)] = data
        layer = {"mediaType": BUNDLE, "size": len(data), "digest": digest(data)}
        manifest = registry.manifest(layer, subject={"digest": D}, artifactType=BUNDLE)
        registry.blobs[digest(manifest)] = manifest
        entries.append({"digest": digest(manifest), "artifactType": BUNDLE, **more})
    registry.tags["referrers"] = json.dumps({"manifests": entries}).encode()
    return found_in(registry)


@pytest.mark.parity("sigstore bundles of cosign 3 with a key")
@pytest.mark.parametrize("kind", KINDS)
def test_bundles_of_cosign_3(kind: str) -> None:
    """Bundles name no image, so the rule must allow this. The errors for another key and another digest differ."""
    signer, other = Signer(kind), Signer(kind)
    (good,) = bundled(bundle(signer, statement(D)))
    assert refusal(good, keys=[other, signer], identity="digestOnly") == ""
    assert refusal(good, keys=[other], identity="digestOnly") == "none of 1 signature is by the key in P:1"
    (bad,) = bundled(bundle(signer, statement(OTHER)))
    assert refusal(bad, keys=[signer], identity="digestOnly") == f"its signature is for {OTHER}"
    for identity in ("matchRepoDigestOrExact", "matchRepository", "matchExact"):
        assert "names no image" in refusal(good, keys=[signer], identity=identity)
    assert refusal(signed(signer, "any.name/at/all:7"), keys=[signer], identity="digestOnly") == ""
    assert signatures.loads(Evidence((good,)).dumps()).signatures == (good,)


@pytest.mark.parity("sigstore bundles of cosign 3 with a key")
@pytest.mark.parametrize(
    "body, kind",
    [
        (statement(D, predicateType="https://slsa.dev/provenance/v1"), IN_TOTO),
        (statement(D, _type="https://in-toto.io/Statement/v0.1"), IN_TOTO),
        (statement(D, subject=[{"digest": {"sha256": D[7:]}}, {"digest": {"sha256": OTHER[7:]}}]), IN_TOTO),
        (statement(D, subject=[{"digest": {"sha512": D[7:]}}]), IN_TOTO),
        (statement(D, subject=[{"digest": {"sha256": "../x"}}]), IN_TOTO),
        (statement(D, subject=[]), IN_TOTO),
        (statement(D, subject=7), IN_TOTO),
        (statement(D), "text/plain"),
        (payload("reg.site/box:1", D), IN_TOTO),
        (b"[" * 40_000, IN_TOTO),
        (b"", IN_TOTO),
    ],
)
def test_other_statements_are_no_signature(body: bytes, kind: str) -> None:
    signer = Signer()
    (signature,) = bundled(bundle(signer, body, kind))
    reason = refusal(signature, keys=[signer], identity="digestOnly")
    assert reason == "the signed content is not an image signature"


def test_wrong_length_in_the_signed_data_is_refused() -> None:
    signer = Signer()
    signed = f"DSSEv1 28 {IN_TOTO} 7 ".encode() + statement(D)
    assert signatures.claim(signed) is None
    assert "not an image signature" in refusal(Signature(signed, signer.sign(signed)), keys=[signer])


def test_invalid_bundles_are_skipped(rng: random.Random) -> None:
    signer = Signer()
    good = bundle(signer, statement(D))
    for bad in (b"", b"[]", b"{}", b"[" * 50_000, b'{"dsseEnvelope": 7}', b'{"messageSignature": {}}', b"x" * 70_000):
        assert len(bundled(bad, good)) == 1
    assert bundled(good, annotations={"dev.sigstore.bundle.predicateType": "https://slsa.dev/provenance/v1"}) == []
    for _ in range(300):
        for signature in bundled(mutate(good.decode(), rng).encode("utf-8", "surrogateescape")):
            if signature.payload != bundled(good)[0].payload:
                assert refusal(signature, keys=[signer], identity="digestOnly") != ""


def test_payload_with_another_digest_is_an_error() -> None:
    registry, good = Registry(), signed(Signer())
    registry.tags[SIG] = registry.manifest(registry.layer(good))
    registry.blobs[digest(good.payload)] = b"other"
    with pytest.raises(ImageError, match="has the digest"):
        list(signatures.of(registry, D))


def test_only_referrers_of_this_image_count() -> None:
    registry, good = Registry(), signed(Signer())
    entries = []
    for subject in (D, OTHER, None):
        more = {"subject": {"digest": subject}} if subject else {}
        manifest = registry.manifest(registry.layer(good), **more)
        registry.blobs[digest(manifest)] = manifest
        entries.append({"digest": digest(manifest), "artifactType": ARTIFACT})
    entries.append({"digest": "sha256:none", "artifactType": "application/spdx+json"})
    registry.tags["referrers"] = json.dumps({"manifests": [7, *entries]}).encode()
    assert found_in(registry) == [good]
    registry.tags["referrers"] = json.dumps({"manifests": entries[:1] * 1000}).encode()
    assert 1 < len(found_in(registry)) < 100


def documents() -> dict[str, Any]:
    """Return the JSON of each document that carries signatures in a registry, by kind."""
    good, registry = signed(SIGNER), Registry()
    return {
        "manifest": json.loads(registry.manifest(registry.layer(good), subject={"digest": D})),
        "listing": {"manifests": [{"digest": D, "artifactType": ARTIFACT, "annotations": {"a": "b"}}]},
        "bundle": json.loads(bundle(SIGNER, statement(D))),
        "payload": json.loads(good.payload),
        "statement": json.loads(statement(D)),
    }


SIGNER = Signer()


@pytest.mark.parametrize("kind", documents())
def test_field_of_another_type_is_no_signature(kind: str) -> None:
    for data in retyped(documents()[kind]):
        registry = Registry()
        good = signed(SIGNER)
        registry.tags[SIG] = registry.manifest(registry.layer(good))
        if kind == "manifest":
            registry.tags[SIG] = data
        elif kind == "listing":
            registry.tags["referrers"] = data
            registry.named = lambda digest, blobs=registry.blobs: blobs.get(digest, b"{}")  # type: ignore[method-assign,misc]
        elif kind == "payload":
            registry.tags[SIG] = registry.manifest(registry.layer(Signature(data, SIGNER.sign(data))))
        try:
            if kind in ("bundle", "statement"):
                read_signatures = bundled(data if kind == "bundle" else bundle(SIGNER, data))
            else:
                read_signatures = found_in(registry)
        except PenrootError as e:
            assert str(e)
            continue
        for signature in read_signatures:
            refusal(signature, keys=[SIGNER])  # returns a message, and raises no exception


@pytest.mark.parametrize(
    "name, duplicate",
    [
        ("docker-manifest-digest", f'"docker-manifest-digest": "{OTHER}", '),
        ("docker-reference", '"docker-reference": "other.site/x", '),
        ("critical", '"critical": {}, '),
        ("type", '"type": "x", '),
        ("optional", '"optional": {"a": 1, "a": 2}, "optional": '),
    ],
)
def test_key_twice_in_a_payload_is_no_signature(name: str, duplicate: str) -> None:
    """Of two values for one key, one reader could use the first, and another reader the second."""
    data = signed(SIGNER).payload
    assert signatures.claim(data) is not None
    twice = data.replace(
        f'"{name}": '.encode(), f'{duplicate}"{name}": '.encode() if name != "optional" else duplicate.encode()
    )
    assert twice != data
    assert signatures.claim(twice) is None
    assert "not an image signature" in refusal(Signature(twice, SIGNER.sign(twice)), keys=[SIGNER])


def test_key_twice_in_a_statement_is_no_signature() -> None:
    body = statement(D)
    twice = body.replace(b'"predicateType": ', b'"predicateType": "x", "predicateType": ')
    assert twice != body
    (signature,) = bundled(bundle(SIGNER, twice))
    assert "not an image signature" in refusal(signature, keys=[SIGNER], identity="digestOnly")
    again = bundle(SIGNER, body).replace(b'"payloadType": ', b'"payloadType": "x", "payloadType": ')
    assert bundled(again) == []
