"""``penroot inspect --signatures``: show the signatures of a registry image and the decision of each rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from enroot_py.base import log
from enroot_py.base.errors import RegistryError, UsageError
from enroot_py.config.settings import Settings
from enroot_py.features.trust import admission, identities, signatures, verify
from enroot_py.features.trust.keys import Signer
from enroot_py.features.trust.policy import Requirement, Rule
from enroot_py.features.trust.signatures import Evidence
from enroot_py.registry.reference import Reference, of_command_line
from enroot_py.registry.sources import open_registry


def inspect(uri: str, settings: Settings, arch: str | None = None) -> dict[str, Any]:
    """Return the signatures of an image and the decisions of the policies. Raises PenrootError."""
    name = of_command_line(uri)
    if not isinstance(name, Reference):
        raise UsageError(f"{name} has no signatures: it is not a registry image", hint="use docker://IMAGE")
    manifest = open_registry(name, settings).manifest(arch)
    gathered = []
    try:
        for evidence in admission.gather(name, settings, manifest.digest, manifest.named):
            gathered.append(evidence)
    except RegistryError as e:
        if not any(evidence.signatures for evidence in gathered):
            raise
        log.warn(str(e))
    index = next((evidence.index for evidence in gathered if evidence.index), b"")
    evidence = Evidence(tuple(dict.fromkeys(signature for part in gathered for signature in part.signatures)), index)
    rules = admission.rules_for(name, settings)
    known = {str(signer): signer for rule in rules for each in rule.signed for signer in verify.signers_of(each)}
    verdicts = [_verdict(rule, each, name, evidence, manifest.digest) for rule in rules for each in rule.requirements]
    return {
        "name": str(name),
        "digest": manifest.digest,
        **({"index": manifest.named} if manifest.named != manifest.digest else {}),
        "admitted": all(verdict["satisfied"] for verdict in verdicts),
        "rules": verdicts,
        "signatures": [_signature(signature, list(known.values())) for signature in evidence.signatures],
    }


def _verdict(rule: Rule, requirement: Requirement, name: Reference, evidence: Evidence, digest: str) -> dict[str, Any]:
    """Return the decision of one requirement as JSON data."""
    why = ""
    if error := Rule(rule.scope, (requirement,)).refusal(name):
        why = str(error)
    elif requirement.kind == "sigstoreSigned":
        image = identities.of(name)
        why = verify.refusal(requirement, image, evidence.covers(digest), evidence.signatures)
    shown = {"where": requirement.where, "scope": rule.scope, "type": requirement.kind, "satisfied": not why}
    return {**shown, **({"why": why} if why else {})}


def _signature(signature: signatures.Signature, signers: Sequence[Signer]) -> dict[str, Any]:
    """Return the claim of a signature, and the known key that made it. Without a known key, do not trust the claim."""
    claimed = signatures.claim(signature.payload)
    key = next((str(signer) for signer in signers if signer.has_signed(signature)), None)
    name = str(claimed.name) if claimed and claimed.name else None
    return {"for": name, "digest": claimed.digest if claimed else None, "key": key}
