"""Verify signatures against the requirements of a policy."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from enroot_py.base import log
from enroot_py.features.trust import keys, signatures
from enroot_py.features.trust.keys import Key, Signer
from enroot_py.features.trust.signatures import Signature

if TYPE_CHECKING:
    from enroot_py.features.trust.identities import DockerName
    from enroot_py.features.trust.policy import Requirement


def signers_of(requirement: Requirement) -> list[Signer]:
    """Return the signers for a requirement: one of these must have signed. Raises ConfigError for a malformed key."""
    if not requirement.rekor:
        return [Key(source) for source in requirement.keys]
    from enroot_py.features.trust import keyless

    transparency = keyless.Log(requirement.rekor)
    if requirement.fulcio:
        return [keyless.Identified(requirement.fulcio, transparency)]
    return [keyless.Logged(Key(source), transparency) for source in requirement.keys]


def by_signers(candidates: Iterable[Signature], signers: Iterable[Signer]) -> tuple[Signature, ...]:
    """Return the signatures that at least one of the signers has made."""
    known = list(signers)
    return tuple(signature for signature in candidates if any(signer.has_signed(signature) for signer in known))


def refusal(
    requirement: Requirement, image: DockerName, covered: Collection[str], candidates: Iterable[Signature]
) -> str:
    """Return "" if a signature satisfies a requirement, otherwise the reason why none does.

    ``covered`` are the accepted digests. Raises ConfigError for a malformed key.
    """
    signers = signers_of(requirement)
    count, why, unproved = 0, "", ""
    for signature in candidates:
        count += 1
        reasons = [signer.refusal(signature) for signer in signers]
        if "" not in reasons:
            unproved = next((reason for reason in reasons if reason != keys.BY_ANOTHER_KEY), unproved)
            continue
        claimed = signatures.claim(signature.payload)
        if claimed is None:
            why = why or "the signed content is not an image signature"
        elif not requirement.identity.matches(image, claimed.name):
            why = f"its signature is for {claimed.name}, not for {requirement.identity.describe(image)}"
            if claimed.name is None:
                why = "the signature names no image, as with cosign 3: use signedIdentity digestOnly"
        elif claimed.digest not in covered:
            why = f"its signature is for {claimed.digest}"
        else:
            return ""
    if why:
        return why
    shown = " or ".join(map(str, signers))
    unproved = unproved and f": {unproved}"
    return f"none of {log.many(count, 'signature')} is by {shown}{unproved}" if count else "it has no signature"
