"""Manifests and indexes, wherever they come from.

Sources: OCI image specification, "Image Manifest", "Image Index" and "Content
Descriptors"; Docker's "Image Manifest V 2, Schema 2".
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from enroot_py.errors import ImageError
from enroot_py.reference import MANIFEST_TYPES
from enroot_py.store import architecture

_MAX_NESTED = 4  # indexes in indexes
_MAX_LAYERS = 1000  # engines make 127 at most; beyond what overlayfs stacks, the lowest are merged


@dataclass(frozen=True, slots=True)
class Descriptor:
    """What a manifest says of a blob: OCI image specification, "Content Descriptors". ``size`` is bytes."""

    media_type: str
    digest: str
    size: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """An image manifest as it came; ``named`` is the digest of what the name led to first."""

    digest: str
    named: str
    data: bytes
    config: Descriptor
    layers: tuple[Descriptor, ...]


def digest(data: bytes) -> str:
    return "sha256:" + sha256(data).hexdigest()


def parse(data: bytes, name: object) -> dict[str, Any]:
    """A manifest or index of the image ``name``. Raises ImageError."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as e:
        raise ImageError(f"{name}: the manifest is not JSON: {e}") from e
    if not isinstance(document, dict):
        raise ImageError(f"{name}: the manifest is not a JSON object")
    if document.get("schemaVersion") == 1:
        raise ImageError(
            f"{name}: the image is in Docker's old format (schema 1)",
            hint="push it again with a current docker or skopeo",
        )
    return document


def image_of(named: str, data: bytes, get: Callable[[str], bytes], arch: str | None, name: object) -> Manifest:
    """The image manifest that ``data``, with the digest ``named``, is or leads to; ``get`` has others by digest.

    Raises ImageError.
    """
    digest = named
    for _ in range(_MAX_NESTED):
        document = parse(data, name)
        if "manifests" in document and "layers" in document:  # CVE-2021-41190: two readers would see two images
            raise ImageError(f"{name}: {digest} says that it is an index and an image")
        if "manifests" not in document:
            return manifest(digest, named, data, document, name)
        digest = choose(document["manifests"], arch, name)
        data = get(digest)
    raise ImageError(f"{name}: more than {_MAX_NESTED} indexes in indexes")


def fields(document: object) -> dict[str, Any]:
    """An object of a document; what is none has no fields."""
    return document if isinstance(document, dict) else {}


def choose(manifests: object, arch: str | None, name: object) -> str:
    """The digest in an index whose platform fits: os, architecture and variant. Raises ImageError."""
    wanted, _, variant = (arch or "").partition("/")
    wanted = architecture(wanted or None)
    variant = variant or _variant(arch)
    there = []
    best: tuple[int, str] | None = None
    anybody = ""
    for entry in manifests if isinstance(manifests, list) else ():
        if not isinstance(entry, dict) or not isinstance(entry.get("digest"), str):
            continue
        if entry.get("mediaType") not in (None, *MANIFEST_TYPES) or entry.get("artifactType"):
            continue  # a signature, say
        platform = fields(entry.get("platform"))
        if not platform:
            anybody = anybody or entry["digest"]  # optional in OCI
            there.append("linux")
            continue
        names = [str(platform.get(key) or "") for key in ("os", "architecture", "variant")]
        if "unknown" in names[:2]:
            continue  # attestations (BuildKit) are no images
        there.append("/".join(name for name in names if name))
        if names[0] == "linux" and names[1] == wanted:
            rank = _rank(wanted, variant, names[2])
            if rank > (best[0] if best else -1):
                best = rank, entry["digest"]
    if best is None and anybody:
        return anybody
    if best is None:
        platform_wanted = "/".join(name for name in ("linux", wanted, variant) if name)
        raise ImageError(
            f"{name}: no image for {platform_wanted}",
            hint=f"there is: {', '.join(there) or 'none'}; choose with --arch",
        )
    return best[1]


def manifest(digest: str, named: str, data: bytes, document: dict[str, Any], name: object) -> Manifest:
    """An image manifest from its parsed ``document``. Raises ImageError for what is none, or not of layers."""
    try:
        config = descriptor(document["config"])
        layers = tuple(descriptor(layer) for layer in document["layers"])
    except (KeyError, TypeError, ValueError) as e:
        raise ImageError(f"{name}: not an image manifest: {e}") from e
    for layer in layers:
        kind = layer.media_type
        if "tar" not in kind or kind.endswith(("+encrypted", ".encrypted")):
            raise ImageError(
                f"{name}: the layer {layer.digest} is of type {kind!r}",
                hint="a container image has tar layers, not encrypted; this may be another kind of artifact",
            )
    if len(layers) > _MAX_LAYERS:
        raise ImageError(
            f"{name}: {len(layers)} layers, of at most {_MAX_LAYERS}", hint="build it with fewer: --squash"
        )
    return Manifest(digest, named, data, config, layers)


def descriptor(document: Any) -> Descriptor:
    """A content descriptor. Raises KeyError, TypeError, ValueError."""
    digest, size = document["digest"], document["size"]
    value = digest.removeprefix("sha256:") if isinstance(digest, str) else ""
    if len(value) != 64 or value.strip("0123456789abcdef"):
        raise ValueError(f"bad digest {digest!r}")
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise ValueError(f"bad size {size!r}")
    return Descriptor(str(document.get("mediaType", "")), digest, size)


_ARM_VARIANTS = ("", "v5", "v6", "v7", "v8")


def _variant(arch: str | None) -> str:
    name = arch or os.uname().machine
    return {"armv7l": "v7", "armv6l": "v6", "arm": "v7", "aarch64": "v8", "arm64": "v8"}.get(name, "")


def _rank(arch: str, wanted: str, there: str) -> int:
    """How well a variant fits, -1 for not at all. Older 32-bit ARM runs on newer; amd64/v2 and up may not run here."""
    if arch == "arm":
        known = there in _ARM_VARIANTS and wanted in _ARM_VARIANTS
        fits = known and _ARM_VARIANTS.index(there) <= _ARM_VARIANTS.index(wanted)
        return _ARM_VARIANTS.index(there) if fits else -1
    if there == wanted:
        return 2
    plain = {"amd64": ("", "v1"), "arm64": ("", "v8")}.get(arch, ("",))
    return 1 if there in plain and wanted in plain else -1
