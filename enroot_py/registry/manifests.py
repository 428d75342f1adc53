"""Parse manifests and indexes, and choose the image for a platform.

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

_MAX_NESTED_INDEXES = 4
_MAX_MANIFESTS = 16  # fetched for one image: nested indexes, and manifests that are read to learn their platform
_MAX_SHOWN_PLATFORMS = 40
_MAX_SHOWN_CHARS = 40  # of a platform
MAX_CONFIG_BYTES = 8 << 20
_MAX_LAYERS = 1000  # engines build at most 127; compose.py merges layers that overlayfs cannot stack


@dataclass(frozen=True, slots=True)
class Descriptor:
    """A descriptor of a blob: OCI image specification, "Content Descriptors". ``size`` is in bytes.

    ``urls`` are other addresses of the blob. Layers have them if their licence forbids redistribution.
    """

    media_type: str
    digest: str
    size: int
    urls: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Manifest:
    """An image manifest with the text ``data``.

    ``named`` is the digest that the image's name resolves to: ``digest``, or the digest of an index that lists it.
    """

    digest: str
    named: str
    data: bytes
    config: Descriptor
    layers: tuple[Descriptor, ...]


def parse(data: bytes, name: object) -> dict[str, Any]:
    """Parse a manifest or index of the image ``name``. Raises ImageError."""
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
    """A source of manifests and configs. Both methods check the digest, and raise ImageError."""

    def named(self, digest: str) -> bytes: ...
    def config(self, manifest: Manifest) -> bytes: ...


class Search:
    """Find the image manifest for a platform, also in an index and in nested indexes.

    ``name`` is the image's name, for messages; ``arch`` is ARCHITECTURE[/VARIANT]. Methods raise ImageError.
    """

    def __init__(self, source: Reader, name: object, arch: str | None) -> None:
        self._source = source
        self._name = name
        self._platform = Platform(arch)
        self._fetched = 0
        self._platforms: list[str] = []  # read from configs, because the index does not have them

    def image_of(self, data: bytes) -> Manifest:
        """Return the image manifest for the platform. ``data`` is the text of this manifest or of an index."""
        document = parse(data, self._name)
        named = digests.of(data)
        if _is_index(document, named, self._name):
            return self.image_in(document["manifests"], named)
        return manifest(data, document, named, self._name)

    def image_in(self, entries: object, named: str, depth: int = 0) -> Manifest:
        """Return the image manifest that an index with these ``entries`` lists for the platform.

        ``named`` is the digest of the outermost index.
        """
        for digest, has_platform in choose(entries, self._platform, self._name):
            self._fetched += 1
            if self._fetched > _MAX_MANIFESTS or depth >= _MAX_NESTED_INDEXES:
                raise ImageError(
                    f"{self._name}: more than {_MAX_NESTED_INDEXES} nested indexes, "
                    f"or more than {_MAX_MANIFESTS} images"
                )
            data = self._source.named(digest)
            document = parse(data, self._name)
            if _is_index(document, digest, self._name):
                return self.image_in(document["manifests"], named, depth + 1)
            image = manifest(data, document, named, self._name)
            if has_platform or self._fits(self._source.config(image)):
                return image
        raise _none_fits(self._platforms, self._platform, self._name)

    def _fits(self, config: bytes) -> bool:
        try:
            document = fields(json.loads(config))
        except (ValueError, RecursionError):
            return True  # the import reports the broken config
        if not document.get("architecture"):
            return True
        system, *rest = _platform_names(document)
        self._platforms.append("/".join(filter(None, (system, *rest))))
        return system in ("", "linux") and self._platform.rank(*rest) >= 0


def _is_index(document: dict[str, Any], digest: str, name: object) -> bool:
    if "manifests" in document and "layers" in document:  # CVE-2021-41190: two readers would see two images
        raise ImageError(f"{name}: {digest} is ambiguous: it has the fields of an index and of an image")
    return "manifests" in document


def _platform_names(document: dict[str, Any]) -> list[str]:
    """Return system, architecture and variant, from the platform in an index or from an image config."""
    return [str(document.get(key) or "") for key in ("os", "architecture", "variant")]


def fields(document: object) -> dict[str, Any]:
    """Return ``document`` if it is a JSON object; else {}."""
    return document if isinstance(document, dict) else {}


def choose(entries: object, platform: Platform, name: object) -> list[tuple[str, bool]]:
    """Return (digest, True) of the index entry that fits best, or (digest, False) of each entry without a platform.

    The platform of an entry is optional. Raises ImageError if no entry fits.
    """
    platforms, without_platform = [], []
    best, chosen = -1, ""
    for digest, fields_of_platform in _images(entries):
        if not fields_of_platform:
            without_platform.append((digest, False))
            continue
        names = _platform_names(fields_of_platform)
        if "unknown" in names[:2]:
            continue  # an attestation (BuildKit), not an image
        platforms.append("/".join(filter(None, names)))
        rank = platform.rank(*names[1:]) if names[0] == "linux" else -1
        if rank > best:
            best, chosen = rank, digest
    if best >= 0:
        return [(chosen, True)]
    if without_platform:
        return without_platform
    raise _none_fits(platforms, platform, name)


def _images(entries: object) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield digest and platform of each image in an index. Skip signatures and other artifacts."""
    for entry in entries if isinstance(entries, list) else ():
        if not isinstance(entry, dict) or not isinstance(entry.get("digest"), str):
            continue
        if entry.get("mediaType") in (None, *MANIFEST_TYPES) and not entry.get("artifactType"):
            yield entry["digest"], fields(entry.get("platform"))


def _none_fits(available: list[str], platform: Platform, name: object) -> ImageError:
    shown = ", ".join(other[:_MAX_SHOWN_CHARS] for other in available[:_MAX_SHOWN_PLATFORMS]) or "none"
    return ImageError(f"{name}: no image for {platform}", hint=f"available platforms: {shown}; choose with --arch")


def manifest(data: bytes, document: dict[str, Any], named: str, name: object) -> Manifest:
    """Check and return an image manifest. Raises ImageError, also if the artifact is not an image.

    ``document`` is the parsed ``data``. ``named``: see Manifest. ``name`` is the image's name, for messages.
    """
    try:
        config = descriptor(document["config"])
        layers = tuple(descriptor(layer) for layer in document["layers"])
    except (KeyError, TypeError, ValueError) as e:
        raise ImageError(f"{name}: not an image manifest: {e}") from e
    for layer in layers:
        media_type = layer.media_type
        if "tar" not in media_type or media_type.endswith(("+encrypted", ".encrypted")):
            raise ImageError(
                f"{name}: the layer {layer.digest} has the unsupported type {media_type!r}",
                hint="use a container image with unencrypted tar layers; this may be another kind of artifact",
            )
    if len(layers) > _MAX_LAYERS:
        raise ImageError(
            f"{name}: {len(layers)} layers, more than {_MAX_LAYERS}",
            hint="build the image with fewer layers: docker build --squash",
        )
    return Manifest(digests.of(data), named, data, config, layers)


def descriptor(document: Any) -> Descriptor:
    """Check and return a content descriptor. Raises KeyError, TypeError, ValueError."""
    digest, size = document["digest"], document["size"]
    if not isinstance(digest, str) or not digests.is_digest(digest):
        raise ValueError(f"bad digest {str(digest)[:80]!r}")
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size < 1 << 63:
        raise ValueError("bad size")
    urls = document.get("urls")
    urls = tuple(url for url in urls if isinstance(url, str)) if isinstance(urls, list) else ()
    return Descriptor(str(document.get("mediaType", "")), digest, size, urls)
