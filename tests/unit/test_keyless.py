"""Signatures with certificates of Fulcio and log entries of Rekor: the tests make valid signatures and forgeries."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable
from typing import Any

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from enroot_py.base.errors import ConfigError
from enroot_py.features.trust import identities, signatures, verify
from enroot_py.features.trust.policy import Fulcio, KeySource, Requirement
from enroot_py.features.trust.signatures import Evidence, Signature
from tests.signing import EMAIL, OIDC, Authority, Signer, bundle, hashedrekord, logged, payload, statement

START = 1_700_000_000
ROOT = Authority("root", START - 1000)
MIDDLE = Authority("middle", START - 1000, ROOT)
REKOR, OTHER, SIGNER = Signer(), Signer(), Signer()
DIGEST = "sha256:" + 64 * "1"
DATA = payload("reg.site/box:1", DIGEST)
IMAGE = identities.read("reg.site/box:1")
CRITICAL = x509.UnrecognizedExtension(x509.ObjectIdentifier("1.2.3.4"), b"x")
NAMES = x509.NameConstraints([x509.RFC822Name("site.example")], None)


def sign(
    *,
    authority: Authority = MIDDLE,
    chain: bytes = MIDDLE.pem + ROOT.pem,
    time: int = START + 60,
    rekor: Signer = REKOR,
    body: Callable[[dict[str, Any]], object] = lambda body: None,
    entry: dict[str, Any] | None = None,
    data: bytes = DATA,
    signer: Signer = SIGNER,
    **changes: Any,
) -> Signature:
    certificate = authority.certify(SIGNER, START, **changes)
    signed = signer.sign(data)
    record = hashedrekord(data, signed, certificate)
    body(record)
    logs = logged(rekor, time, record, **(entry or {}))
    return Signature(data, signed, certificate, chain, json.dumps(logs).encode())


def requirement(**changes: Any) -> Requirement:
    ca = KeySource("P: fulcio", data=changes.pop("ca", ROOT.pem))
    fulcio = Fulcio(ca, changes.pop("issuer", OIDC), changes.pop("email", EMAIL))
    rekor = (KeySource("P: rekor", data=REKOR.public),)
    return Requirement("sigstoreSigned", "P", fulcio=fulcio, rekor=rekor, **changes)


def refusal(signature: Signature, required: Requirement | None = None) -> str:
    return verify.refusal(required or requirement(), IMAGE, {DIGEST}, [signature])


def replaced(signature: Signature, **parts: Any) -> Signature:
    names = ("payload", "signature", "certificate", "chain", "entry")
    return Signature(**{**dict(zip(names, signature.parts(), strict=True)), **parts})


@pytest.mark.parity("cosign's keyless signatures")
@pytest.mark.parametrize(
    "signature",
    [
        sign(),
        sign(time=START),
        sign(time=START + 600),
        sign(authority=ROOT, chain=b""),
        sign(chain=ROOT.pem + MIDDLE.pem),
        sign(issuers={1: OIDC}),
        sign(issuers={8: OIDC}),
    ],
    ids=["intermediate", "first second", "last second", "root", "order", "old issuer", "new issuer"],
)
def test_signature_of_a_certified_identity_counts(signature: Signature) -> None:
    assert refusal(signature) == ""
    assert signatures.loads(Evidence((signature,)).dumps()).signatures == (signature,)


def change(*path: str, to: object) -> Callable[[dict[str, Any]], None]:
    def act(body: dict[str, Any]) -> None:
        for name in path[:-1]:
            body = body[name]
        body[path[-1]] = to

    return act


GOOD = sign()
ENTRY = json.loads(GOOD.entry)
# Situation -> (forged signature, part of the error)
FORGERIES: dict[str, tuple[Signature, str]] = {
    "too early": (sign(time=START - 1), "was not valid at the time"),
    "too late": (sign(time=START + 601), "was not valid at the time"),
    "other e-mail": (sign(email="you@site.example"), "certificate is you@site.example"),
    "e-mail in capitals": (sign(email=EMAIL.upper()), "certificate is ME@SITE.EXAMPLE"),
    "other issuer": (sign(issuers={1: "https://evil.example"}), "certificate is https://evil.example"),
    "two issuers": (sign(issuers={1: OIDC, 8: "https://evil.example"}), "is https://evil.example and"),
    "issuers in doubt": (sign(issuers={1: "https://evil.example", 8: OIDC}), "is https://evil.example and"),
    "no issuer": (sign(issuers={}), "the issuer in its certificate is missing"),
    "for servers": (sign(purpose=ExtendedKeyUsageOID.SERVER_AUTH), "is not for signing"),
    "critical extension": (sign(extra=CRITICAL), "not by the authorities"),
    "no chain": (sign(chain=b""), "not by the authorities"),
    "other root": (sign(authority=Authority("root", START - 1000), chain=b""), "not by the authorities"),
    "own root in the chain": (
        sign(authority=(own := Authority("own", START - 1000)), chain=own.pem),
        "not by the authorities",
    ),
    "long chain": (sign(chain=6 * MIDDLE.pem), "not by the authorities"),
    "other log": (sign(rekor=OTHER), "not signed by the transparency log"),
    "other time": (
        replaced(GOOD, entry=json.dumps({**ENTRY, "Payload": {**ENTRY["Payload"], "integratedTime": START}}).encode()),
        "not signed by the transparency log",
    ),
    "more in the entry": (sign(entry={"more": 1}), "log entry is malformed"),
    "time as text": (sign(entry={"integratedTime": str(START)}), "log entry is malformed"),
    "time of a fraction": (sign(entry={"integratedTime": START + 0.5}), "log entry is malformed"),
    "time that is true": (sign(entry={"integratedTime": True}), "log entry is malformed"),
    "huge time": (sign(time=1 << 60), "log entry is malformed"),
    "other content": (
        sign(body=change("spec", "data", "hash", "value", to=64 * "0")),
        "is about other content",
    ),
    "other hash": (sign(body=change("spec", "data", "hash", "algorithm", to="sha512")), "is about other content"),
    "other kind": (sign(body=change("kind", to="rekord")), "unknown kind: rekord"),
    "other version": (sign(body=change("apiVersion", to="0.0.2")), "unknown kind: hashedrekord 0.0.2"),
    "other signature": (
        sign(body=change("spec", "signature", "content", to=base64.b64encode(SIGNER.sign(DATA)).decode())),
        "another signature or key",
    ),
    "other certificate": (
        sign(
            body=change(
                "spec", "signature", "publicKey", "content", to=base64.b64encode(MIDDLE.certify(SIGNER, START)).decode()
            )
        ),
        "another signature or key",
    ),
    "no spec": (sign(body=change("spec", to=None)), "log entry is malformed"),
    "other key": (sign(signer=OTHER), "not by the key in its certificate"),
    "no entry": (replaced(GOOD, entry=b""), "has no entry of a transparency log"),
    "entry that is none": (replaced(GOOD, entry=b"[" * 100_000), "log entry is malformed"),
    "entry twice": (
        replaced(GOOD, entry=GOOD.entry[:-1] + b"," + GOOD.entry[1:]),
        "log entry is malformed",
    ),
    "no certificate": (replaced(GOOD, certificate=b""), "it has no certificate"),
    "two certificates": (replaced(GOOD, certificate=GOOD.certificate + GOOD.certificate), "certificate is malformed"),
    "certificate that is none": (replaced(GOOD, certificate=b"x"), "certificate is malformed"),
    "chain that is none": (replaced(GOOD, chain=b"x"), "certificate is malformed"),
    "other payload": (replaced(GOOD, payload=payload("reg.site/box:1", "sha256:" + 64 * "2")), "about other content"),
}


@pytest.mark.parity("cosign's keyless signatures")
@pytest.mark.security("S1")
@pytest.mark.parametrize("situation", FORGERIES)
def test_signature_that_is_not_proved_is_refused(situation: str) -> None:
    signature, why = FORGERIES[situation]
    refusal_text = refusal(signature)
    assert (
        refusal_text.startswith(f"none of 1 signature is by {EMAIL} of {OIDC}: ")
        and why in refusal_text
        and "\n" not in refusal_text
    )


AUTHORITIES = {
    "no authority": Authority("bad", START - 1000, ROOT, ca=False),
    "not for certificates": Authority("bad", START - 1000, ROOT, signs=False),
    "expired": Authority("bad", START - 2 * 86400, ROOT, days=1),
    "not yet": Authority("bad", START + 3600, ROOT),
    "for servers": Authority("bad", START - 1000, ROOT, extra=x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])),
    "critical extension": Authority("bad", START - 1000, ROOT, extra=CRITICAL),
    "names": Authority("bad", START - 1000, ROOT, extra=NAMES),
    "by a leaf of length 0": Authority("bad", START - 1000, Authority("short", START - 1000, ROOT, length=0)),
}


@pytest.mark.security("S1")
@pytest.mark.parametrize("situation", AUTHORITIES)
def test_authority_that_may_not_certify_is_refused(situation: str) -> None:
    bad = AUTHORITIES[situation]
    refusal_text = refusal(sign(authority=bad, chain=bad.pem + ROOT.pem))
    assert "its certificate is not by the authorities of the policy" in refusal_text


def test_length_of_a_chain_is_limited_by_its_authorities() -> None:
    for length, accepted in ((0, False), (1, True)):
        root = Authority("top", START - 1000, length=length)
        middle = Authority("middle", START - 1000, root)
        refusal_text = refusal(sign(authority=middle, chain=middle.pem), requirement(ca=root.pem))
        assert (refusal_text == "") == accepted, refusal_text


def test_authorities_that_are_none_are_an_error() -> None:
    with pytest.raises(ConfigError, match="P: fulcio: the key in P: fulcio has no certificate"):
        refusal(GOOD, requirement(ca=b"none"))
    with pytest.raises(ConfigError, match="not a public key"):
        refusal(GOOD, Requirement("x", "P", fulcio=requirement().fulcio, rekor=(KeySource("P: rekor", data=ROOT.pem),)))


@pytest.mark.parity("cosign's keyless signatures")
def test_key_with_a_log_needs_both() -> None:
    signed = SIGNER.sign(DATA)
    log = (KeySource("P: rekor", data=REKOR.public),)
    required = Requirement("sigstoreSigned", "P", (KeySource("P: key", data=SIGNER.public),), rekor=log)
    record = hashedrekord(DATA, signed, SIGNER.public)
    entry = json.dumps(logged(REKOR, START, record)).encode()
    assert refusal(Signature(DATA, signed, entry=entry), required) == ""
    assert "has no entry" in refusal(Signature(DATA, signed), required)
    wrong = json.dumps(logged(OTHER, START, record)).encode()
    assert "not signed by the transparency log" in refusal(Signature(DATA, signed, entry=wrong), required)
    other = OTHER.sign(DATA)
    entry = json.dumps(logged(REKOR, START, hashedrekord(DATA, other, OTHER.public))).encode()
    assert refusal(Signature(DATA, other, entry=entry), required) == "none of 1 signature is by the key in P: key"


def test_bundle_has_certificate_and_entry() -> None:
    """cosign 3 writes bundles with a certificate and a log entry. The log entry has the type dsse."""
    certificate = MIDDLE.certify(SIGNER, START)
    body = statement(DIGEST)
    plain = json.loads(bundle(SIGNER, body))
    signed = plain["dsseEnvelope"]["signatures"][0]["sig"]
    verifier = base64.b64encode(certificate).decode()
    spec = {
        "payloadHash": {"algorithm": "sha256", "value": hashlib.sha256(body).hexdigest()},
        "signatures": [{"signature": signed, "verifier": verifier}],
    }
    entry = logged(REKOR, START + 1, {"apiVersion": "0.0.1", "kind": "dsse", "spec": spec})
    promised = entry["Payload"]
    tlog = {
        "logIndex": str(promised["logIndex"]),
        "logId": {"keyId": base64.b64encode(bytes.fromhex(promised["logID"])).decode()},
        "integratedTime": str(promised["integratedTime"]),
        "inclusionPromise": {"signedEntryTimestamp": entry["SignedEntryTimestamp"]},
        "canonicalizedBody": promised["body"],
    }

    def der(pem: bytes) -> dict[str, str]:
        return {"rawBytes": "".join(pem.decode().splitlines()[1:-1])}

    chain = {"x509CertificateChain": {"certificates": [der(certificate), der(MIDDLE.pem)]}}
    plain["verificationMaterial"] = {**chain, "tlogEntries": [tlog]}
    (signature,) = signatures._in_bundle(json.dumps(plain).encode())
    required = requirement(identity=identities.Identity("digestOnly"))
    assert refusal(signature, required) == ""
    plain["verificationMaterial"] = {"certificate": der(certificate), "tlogEntries": [tlog]}
    (signature,) = signatures._in_bundle(json.dumps(plain).encode())
    assert refusal(signature, requirement(ca=MIDDLE.pem, identity=identities.Identity("digestOnly"))) == ""
    plain["verificationMaterial"]["tlogEntries"] = [{**tlog, "inclusionPromise": None}]
    (signature,) = signatures._in_bundle(json.dumps(plain).encode())
    refusal_text = refusal(signature, required)
    assert "has no entry" in refusal_text and "Rekor 2 does not" in refusal_text


def test_keyless_signer_is_named_by_identity_and_issuer() -> None:
    assert [str(signer) for signer in verify.signers_of(requirement())] == [f"{EMAIL} of {OIDC}"]
