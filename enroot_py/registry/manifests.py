"""Manifests and indexes, wherever they come from.

Sources: OCI image specification, "Image Manifest", "Image Index" and "Content
Descriptors"; Docker's "Image Manifest V 2, Schema 2".
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from enroot_py.base import digests
from enroot_py.base.errors import ImageError
from enroot_py.registry.platforms import Platform
from enroot_py.registry.reference import MANIFEST_TYPES

_MAX_NESTED = 4  # indexes in indexes
_MAX_LOOKS = 16  # images of an index whose platform their config has to say
_MAX_SHOWN = 40  # platforms in a message, and characters of one
MAX_CONFIG = 8 << 20  # bytes
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


class Search:
    """The way from a name to the image manifest for a platform, through an index and those in it.

    ``name`` is that of the image, for messages; ``arch`` is ARCHITECTURE[/VARIANT]. Methods raise ImageError.
    """

    def __init__(self, source: Reader, name: object, arch: str | None) -> None:
        self._source = source
        self._name = name
        self._platform = Platform(arch)
        self._looks = 0
        self._there: list[str] = []  # platforms of images whose config had to say it

    def image_of(self, data: bytes) -> Manifest:
        """The image manifest that a manifest or index is or leads to."""
        document = parse(data, self._name)
        named = digests.of(data)
        if _is_index(document, named, self._name):
            return self.image_in(document["manifests"], named)
        return manifest(data, document, named, self._name)

    def image_in(self, entries: object, named: str, depth: int = 0) -> Manifest:
        """The image manifest in an index of ``entries`` and those in it; ``named`` is the digest of the first index."""
        for digest, is_said in choose(entries, self._platform, self._name):
            self._looks += 1
            if self._looks > _MAX_LOOKS or depth >= _MAX_NESTED:
                raise ImageError(
                    f"{self._name}: more than {_MAX_NESTED} indexes in indexes, or more than {_MAX_LOOKS} images"
                )
            data = self._source.named(digest)
            document = parse(data, self._name)
            if _is_index(document, digest, self._name):
                return self.image_in(document["manifests"], named, depth + 1)
            image = manifest(data, document, named, self._name)
            if is_said or self._fits(self._source.config(image)):
                return image
        raise _none_fits(self._there, self._platform, self._name)

    def _fits(self, config: bytes) -> bool:
        """Whether an image is for the platform by what its config says."""
        try:
            document = fields(json.loads(config))
        except (ValueError, RecursionError):
            return True  # who uses it says what is wrong
        if not document.get("architecture"):
            return True
        system, *rest = _platform_names(document)
        self._there.append("/".join(filter(None, (system, *rest))))
        return system in ("", "linux") and self._platform.rank(*rest) >= 0


def _is_index(document: dict[str, Any], digest: str, name: object) -> bool:
    if "manifests" in document and "layers" in document:  # CVE-2021-41190: two readers would see two images
        raise ImageError(f"{name}: {digest} says that it is an index and an image")
    return "manifests" in document


def _platform_names(document: dict[str, Any]) -> list[str]:
    """System, architecture and variant, as the platform in an index and an image config have them."""
    return [str(document.get(key) or "") for key in ("os", "architecture", "variant")]


def fields(document: object) -> dict[str, Any]:
    """``document``, if it is a JSON object; else an empty one."""
    return document if isinstance(document, dict) else {}


def choose(entries: object, platform: Platform, name: object) -> list[tuple[str, bool]]:
    """The digest in an index whose platform fits best, or all without a platform, which is optional.

    With each, whether the index says its platform. Raises ImageError.
    """
    there, without = [], []
    best, chosen = -1, ""
    for digest, its_platform in _images(entries):
        if not its_platform:
            without.append((digest, False))
            continue
        names = _platform_names(its_platform)
        if "unknown" in names[:2]:
            continue  # attestations (BuildKit) are no images
        there.append("/".join(filter(None, names)))
        rank = platform.rank(*names[1:]) if names[0] == "linux" else -1
        if rank > best:
            best, chosen = rank, digest
    if best >= 0:
        return [(chosen, True)]
    if without:
        return without
    raise _none_fits(there, platform, name)


def _images(entries: object) -> Iterator[tuple[str, dict[str, Any]]]:
    """Digest and platform of each image in an index; signatures and other artifacts are none."""
    for entry in entries if isinstance(entries, list) else ():
        if not isinstance(entry, dict) or not isinstance(entry.get("digest"), str):
            continue
        if entry.get("mediaType") in (None, *MANIFEST_TYPES) and not entry.get("artifactType"):
            yield entry["digest"], fields(entry.get("platform"))


def _none_fits(there: list[str], platform: Platform, name: object) -> ImageError:
    shown = ", ".join(other[:_MAX_SHOWN] for other in there[:_MAX_SHOWN]) or "none"
    return ImageError(f"{name}: no image for {platform}", hint=f"there is: {shown}; choose with --arch")


def manifest(data: bytes, document: dict[str, Any], named: str, name: object) -> Manifest:
    """An image manifest, which has been parsed to ``document``. Raises ImageError for what is none, or not of layers.

    ``named``: see Manifest. ``name`` is that of the image, for messages.
    """
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
    return Manifest(digests.of(data), named, data, config, layers)


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
