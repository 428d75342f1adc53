"""Digests of content: ``sha256:`` and 64 hex digits.

Source: OCI image specification, "Digests", which calls the hex digits the encoded part. Other algorithms are
optional, and no registry is known to use them. On the start path.
"""

from __future__ import annotations

from enroot_py.base.errors import ImageError
from enroot_py.base.frozen import Frozen

_ALGORITHM = "sha256:"


class Pin(Frozen):
    """The digest that a tag must have. In an error message, ``origin`` precedes the digest. ``hint`` ends the hint."""

    digest: str
    origin: str = "the step resolved it to"
    hint: str = "start the step again"


def is_digest(text: str) -> bool:
    encoded = text.removeprefix(_ALGORITHM)
    return encoded != text and len(encoded) == 64 and not encoded.strip("0123456789abcdef")


def encoded(digest: str) -> str:
    """Return the hex digits of ``digest``, which are safe as a file name. Raises ImageError if it is no digest."""
    if not is_digest(digest):
        raise ImageError(f"{digest!r} is not a sha256 digest")
    return digest.removeprefix(_ALGORITHM)


def of_encoded(encoded: str) -> str:
    """Return the digest with the hex digits ``encoded``."""
    return _ALGORITHM + encoded


def of(data: bytes) -> str:
    """Return the digest of ``data``."""
    from hashlib import sha256

    return of_encoded(sha256(data).hexdigest())
