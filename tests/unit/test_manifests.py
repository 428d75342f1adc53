"""Choose the manifest for a platform, and refuse invalid manifests."""

from __future__ import annotations

import json
from typing import Any

import pytest

from enroot_py.base import digests
from enroot_py.base.errors import ImageError, PenrootError
from enroot_py.registry import manifests
from enroot_py.registry.platforms import Platform

D = "sha256:" + "0" * 64


def platform(name: str, number: int = 0) -> dict[str, Any]:
    if "/" not in name:
        return {"digest": f"{number:064}", **({"artifactType": name} if name else {})}
    os, arch, *variant = name.split("/")
    fields = {"os": os, "architecture": arch, **({"variant": variant[0]} if variant else {})}
    return {"digest": f"{number:064}", "platform": fields}


@pytest.mark.parity("attestations in an index are skipped")
@pytest.mark.parametrize(
    ("arch", "available", "chosen"),
    [
        ("amd64", ["unknown/unknown", "linux/arm64", "windows/amd64", "linux/amd64"], 3),
        ("x86_64", ["linux/amd64/v3", "linux/amd64"], 1),
        ("amd64/v3", ["linux/amd64", "linux/amd64/v3"], 1),
        ("arm64", ["linux/arm/v7", "linux/arm64/v8"], 1),
        ("aarch64", ["linux/arm64"], 0),
        ("arm/v6", ["linux/arm/v7", "linux/arm/v5", "linux/arm/v6"], 2),
        ("arm", ["linux/arm/v5", "linux/arm/v6"], 1),
        ("ppc64le", ["linux/amd64", "linux/ppc64le"], 1),
        ("arm", ["signature", "", "linux/arm"], 2),
        ("amd64", ["signature", "linux/arm64", ""], 2),
    ],
)
def test_platform_is_matched(arch: str, available: list[str], chosen: int) -> None:
    entries = [platform(name, number) for number, name in enumerate(available)]
    assert [int(digest) for digest, _ in manifests.choose(entries, Platform(arch), "an image")] == [chosen]


@pytest.mark.parity("attestations in an index are skipped")
@pytest.mark.parametrize(
    ("arch", "available"),
    [
        ("amd64", ["linux/arm64", "unknown/unknown"]),
        ("amd64", ["linux/amd64/v3"]),
        ("arm64", ["windows/arm64"]),
        ("arm/v6", ["linux/arm/v7"]),
        ("amd64", []),
    ],
)
def test_missing_platform_names_the_available_ones(arch: str, available: list[str]) -> None:
    with pytest.raises(ImageError, match="no image for linux/") as caught:
        manifests.choose([platform(name) for name in available], Platform(arch), "an image")
    assert "unknown" not in caught.value.hint
    for name in available:
        assert name.startswith("unknown") or name in caught.value.hint


LAYER = {"mediaType": "application/vnd.oci.image.layer.v1.tar", "digest": D, "size": 1}
CONFIG = {"mediaType": "application/vnd.oci.image.config.v1+json", "digest": D, "size": 1}


@pytest.mark.parametrize(
    "document",
    [
        "not json", "[]", "{}", {"schemaVersion": 1}, {"schemaVersion": 2}, {"schemaVersion": 2, "config": CONFIG},
        {"schemaVersion": 2, "config": CONFIG, "layers": [{**LAYER, "digest": "sha256:../../x"}]},
        {"schemaVersion": 2, "config": CONFIG, "layers": [{**LAYER, "size": -1}]},
        {"schemaVersion": 2, "config": CONFIG, "layers": [{**LAYER, "size": "1"}]},
        {"schemaVersion": 2, "config": CONFIG, "layers": [3]},
        {"schemaVersion": 2, "config": CONFIG, "layers": [{**LAYER, "mediaType": "application/vnd.cncf.helm.chart"}]},
        {"schemaVersion": 2, "config": CONFIG, "layers": [{**LAYER, "mediaType": LAYER["mediaType"] + "+encrypted"}]},
        {"schemaVersion": 2, "config": CONFIG, "layers": [LAYER] * 1001},
        "[" * 100_000,
    ],
)  # fmt: skip
def test_invalid_manifest_is_an_error(document: object) -> None:
    data = (document if isinstance(document, str) else json.dumps(document)).encode()
    with pytest.raises(PenrootError):
        manifests.manifest(data, manifests.parse(data, "an image"), D, "an image")


class Shelf:
    """A registry of documents by digest. ``reads`` counts the reads."""

    def __init__(self) -> None:
        self.documents: dict[str, bytes] = {}
        self.reads = 0

    def put(self, document: object) -> str:
        data = json.dumps(document).encode()
        self.documents[digests.of(data)] = data
        return digests.of(data)

    def image(self, **config: object) -> str:
        return self.put({"schemaVersion": 2, "config": {**CONFIG, "digest": self.put(config)}, "layers": []})

    def index(self, *digests: str) -> str:
        return self.put({"schemaVersion": 2, "manifests": [{"digest": digest} for digest in digests]})

    def named(self, digest: str) -> bytes:
        self.reads += 1
        return self.documents[digest]

    def config(self, manifest: manifests.Manifest) -> bytes:
        return self.documents[manifest.config.digest]

    def find(self, digest: str, arch: str | None = None) -> str:
        return manifests.Search(self, "an image", arch).image_of(self.documents[digest]).digest


def test_document_that_is_index_and_image_is_refused() -> None:
    shelf = Shelf()
    digest = shelf.put({"schemaVersion": 2, "config": CONFIG, "layers": [LAYER], "manifests": []})
    with pytest.raises(ImageError, match="an index and of an image"):
        shelf.find(digest)


def test_entry_without_a_platform_has_that_of_its_config() -> None:
    shelf = Shelf()
    arm, amd = shelf.image(os="linux", architecture="arm64"), shelf.image(os="linux", architecture="amd64")
    windows, nothing = shelf.image(os="windows", architecture="amd64"), shelf.image()
    assert shelf.find(shelf.index(arm, windows, amd), "amd64") == amd
    assert shelf.find(shelf.index(arm, amd), "arm64") == arm
    assert shelf.find(shelf.index(shelf.index(amd)), "amd64") == amd
    assert shelf.find(shelf.index(nothing), "amd64") == nothing
    with pytest.raises(ImageError, match="no image for linux/ppc64le") as caught:
        shelf.find(shelf.index(arm, windows), "ppc64le")
    assert "linux/arm64, windows/amd64" in caught.value.hint


def test_endless_indexes_are_refused() -> None:
    shelf = Shelf()
    wide = shelf.index(*(shelf.image(os="linux", architecture="arm64", n=n) for n in range(1000)))
    deep = wide
    for _ in range(9):
        deep = shelf.index(*[deep] * 1000)
    for digest in (wide, deep):
        with pytest.raises(ImageError, match="more than"):
            shelf.find(digest, "amd64")
    assert shelf.reads < 50


@pytest.mark.parametrize("size", [1 << 63, 10**4000, 1e300, True, -1, None])
def test_size_that_no_blob_has_is_refused(size: object) -> None:
    with pytest.raises(ValueError, match="bad size"):
        manifests.descriptor({**LAYER, "size": size})
