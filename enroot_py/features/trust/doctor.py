"""Check the policies for ``penroot doctor`` and ``pyxis-py check``."""

from __future__ import annotations

from collections.abc import Iterator

from enroot_py.base import log
from enroot_py.base.errors import PenrootError
from enroot_py.cli.doctor import Finding
from enroot_py.config.settings import Settings


def findings(settings: Settings) -> Iterator[Finding]:
    """Check that policies and keys are readable. An error in a policy rejects every image.

    An error in a key rejects every image whose rule needs the key.
    """
    for path in settings.policies:
        from enroot_py.features.trust import policy, verify

        rejected = "every image is rejected"
        try:
            loaded = policy.load(path)
            rejected = "images of this rule are rejected"
            signers = [signer for required in loaded.signed for signer in verify.signers_of(required)] if loaded else []
            yield Finding("ok", f"{path} controls image admission with {log.many(len(signers), 'key')}")
        except PenrootError as e:
            yield Finding("bad", f"{rejected}: {e}", e.hint)
