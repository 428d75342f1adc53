"""Manifests and indexes, wherever they come from.

Sources: OCI image specification, "Image Manifest", "Image Index" and "Content
Descriptors"; Docker's "Image Manifest V 2, Schema 2".
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any, Protocol

from enroot_py.base import digests
from enroot_py.base.errors import ImageError
from enroot_py.registry.reference import MANIFEST_TYPES, architecture

_MAX_NESTED = 4  # indexes in indexes
_MAX_LOOKS = 16  # images of an index whose platform their config has to say
_MAX_SHOWN = 40  # platforms in a message, and characters of one
_MAX_LAYERS = 1000  # engines make 127 at most; beyond what overlayfs stacks, the lowest are merged


@dataclass(frozen=True, slots=True)
class Descriptor:
    """What a manifest says of a blob: OCI image specification, "Content Descriptors". ``size`` is bytes.

    ``urls`` are other places of it, as of layers that may not be distributed.
    """

    media_type: str
    digest: str
    size: int
    urls: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Manifest:
    """An image manifest as it came; ``named`` is the digest of what the name led to first."""

    digest: str
    named: str
    data: bytes
    config: Descriptor
    layers: tuple[Descriptor, ...]


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


class Reader(Protocol):
    """Who has manifests by their digest, which is checked, and the configs of images. Both raise ImageError."""

    def named(self, digest: str) -> bytes: ...
    def config(self, manifest: Manifest) -> bytes: ...


def image_of(named: str, data: bytes, source: Reader, arch: str | None, name: object) -> Manifest:
    """The image manifest that ``data``, with the digest ``named``, is or leads to. Raises ImageError."""
    document = parse(data, name)
    if not _is_index(document, named, name):
        return manifest(named, named, data, document, name)
    return image_in(document["manifests"], named, source, arch, name)


def image_in(entries: object, named: str, source: Reader, arch: str | None, name: object) -> Manifest:
    """The image manifest for an architecture in an index of ``entries`` and those in it. Raises ImageError."""
    left = _MAX_LOOKS

    def look(entries: object, depth: int) -> Manifest:
        nonlocal left
        for digest, is_said in choose(entries, arch, name):
            left -= 1
            if left < 0 or depth >= _MAX_NESTED:
                break
            data = source.named(digest)
            document = parse(data, name)
            if _is_index(document, digest, name):
                return look(document["manifests"], depth + 1)
            found = manifest(digest, named, data, document, name)
            if is_said or _fits(source.config(found), arch, there):
                return found
        if left < 0 or depth >= _MAX_NESTED:
            raise ImageError(f"{name}: more than {_MAX_NESTED} indexes in indexes, or more than {_MAX_LOOKS} images")
        raise _none_fits(there, arch, name)

    there: list[str] = []
    return look(entries, 0)


def _is_index(document: dict[str, Any], digest: str, name: object) -> bool:
    if "manifests" in document and "layers" in document:  # CVE-2021-41190: two readers would see two images
        raise ImageError(f"{name}: {digest} says that it is an index and an image")
    return "manifests" in document


def _fits(config: bytes, arch: str | None, there: list[str]) -> bool:
    """Whether an image is for an architecture by what its config says; else what that is goes to ``there``."""
    try:
        said = fields(json.loads(config))
    except (ValueError, RecursionError):
        return True  # who uses it says what is wrong
    if not said.get("architecture"):
        return True
    platform = [str(said.get(key) or "") for key in ("os", "architecture", "variant")]
    there.append("/".join(filter(None, platform)))
    wanted, variant = _wanted(arch)
    return platform[0] in ("", "linux") and platform[1] == wanted and _rank(wanted, variant, platform[2]) >= 0


def fields(document: object) -> dict[str, Any]:
    """An object of a document; what is none has no fields."""
    return document if isinstance(document, dict) else {}


def choose(entries: object, arch: str | None, name: object) -> list[tuple[str, bool]]:
    """The digest in an index whose platform fits, or those without a platform, which is optional.

    With each, whether the index says its platform: os, architecture and variant. Raises ImageError.
    """
    wanted, variant = _wanted(arch)
    there = []
    best: tuple[int, str] | None = None
    anybodys = []
    for entry in entries if isinstance(entries, list) else ():
        if not isinstance(entry, dict) or not isinstance(entry.get("digest"), str):
            continue
        if entry.get("mediaType") not in (None, *MANIFEST_TYPES) or entry.get("artifactType"):
            continue  # a signature, say
        platform = fields(entry.get("platform"))
        if not platform:
            anybodys.append((entry["digest"], False))
            continue
        names = [str(platform.get(key) or "") for key in ("os", "architecture", "variant")]
        if "unknown" in names[:2]:
            continue  # attestations (BuildKit) are no images
        there.append("/".join(name for name in names if name))
        if names[0] == "linux" and names[1] == wanted:
            rank = _rank(wanted, variant, names[2])
            if rank > (best[0] if best else -1):
                best = rank, entry["digest"]
    if best is not None:
        return [(best[1], True)]
    if anybodys:
        return anybodys
    raise _none_fits(there, arch, name)


def _wanted(arch: str | None) -> tuple[str, str]:
    """Architecture and variant."""
    wanted, _, variant = (arch or "").partition("/")
    return architecture(wanted or None), variant or _variant(arch)


def _none_fits(there: list[str], arch: str | None, name: object) -> ImageError:
    platform = "/".join(filter(None, ("linux", *_wanted(arch))))
    some = ", ".join(platform[:_MAX_SHOWN] for platform in there[:_MAX_SHOWN]) or "none"
    return ImageError(f"{name}: no image for {platform}", hint=f"there is: {some}; choose with --arch")


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
    if not isinstance(digest, str) or not digests.is_digest(digest):
        raise ValueError(f"bad digest {str(digest)[:80]!r}")
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size < 1 << 63:
        raise ValueError("bad size")
    urls = document.get("urls")
    urls = tuple(url for url in urls if isinstance(url, str)) if isinstance(urls, list) else ()
    return Descriptor(str(document.get("mediaType", "")), digest, size, urls)


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
