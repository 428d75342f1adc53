"""Images made by hand: layers, configs, manifests and indexes, pushed over the distribution API.

This module uses none of the code under test.
"""

from __future__ import annotations

import bz2
import functools
import gzip
import hashlib
import io
import json
import lzma
import pathlib
import shutil
import subprocess
import tarfile
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

DOCKER = {
    "manifest": "application/vnd.docker.distribution.manifest.v2+json",
    "index": "application/vnd.docker.distribution.manifest.list.v2+json",
    "config": "application/vnd.docker.container.image.v1+json",
    "layer": "application/vnd.docker.image.rootfs.diff.tar.gzip",
}
OCI = {
    "manifest": "application/vnd.oci.image.manifest.v1+json",
    "index": "application/vnd.oci.image.index.v1+json",
    "config": "application/vnd.oci.image.config.v1+json",
    "layer": "application/vnd.oci.image.layer.v1.tar+gzip",
}


def digest(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def entry(name: str, data: bytes = b"", **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    """Return a tar entry. ``fields`` are attributes of tarfile.TarInfo; without ``type``, the entry is a file."""
    info = tarfile.TarInfo(name)
    info.size, info.mtime, info.mode = len(data), 1_700_000_000, 0o644
    for key, value in fields.items():
        setattr(info, key, value)
    return info, data


def directory(name: str, mode: int = 0o755, **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    return entry(name, type=tarfile.DIRTYPE, mode=mode, **fields)


def symlink(name: str, target: str) -> tuple[tarfile.TarInfo, bytes]:
    return entry(name, type=tarfile.SYMTYPE, linkname=target, mode=0o777)


def hardlink(name: str, target: str) -> tuple[tarfile.TarInfo, bytes]:
    return entry(name, type=tarfile.LNKTYPE, linkname=target)


def tar(entries: Iterable[tuple[tarfile.TarInfo, bytes]], format: int = tarfile.PAX_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=format) as archive:
        for info, data in entries:
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def zstd(data: bytes) -> bytes:
    """Compress with the zstd program, which is independent of the code under test."""
    return subprocess.run(["zstd", "-q", "-c"], input=data, capture_output=True, check=True).stdout


COMPRESSIONS: Mapping[str, Callable[[bytes], bytes]] = {
    "gzip": lambda data: gzip.compress(data, 6, mtime=0),
    "zstd": zstd,
    "none": lambda data: data,
    "bzip2": bz2.compress,
    "xz": lzma.compress,
}


@dataclass
class Layer:
    tar: bytes
    compression: str = "gzip"
    blob: bytes = b""

    def __post_init__(self) -> None:
        self.blob = self.blob or COMPRESSIONS[self.compression](self.tar)


@dataclass
class Image:
    """An image. To make a bad image, change a field before the push."""

    layers: list[Layer]
    settings: dict[str, Any] = field(default_factory=dict)
    kinds: Mapping[str, str] = field(default_factory=lambda: DOCKER)
    architecture: str = "amd64"
    diff_ids: list[str] = field(default_factory=list)

    def config(self) -> bytes:
        return json.dumps(
            {
                "created": "2024-01-02T03:04:05Z",
                "architecture": self.architecture,
                "os": "linux",
                "config": self.settings,
                "rootfs": {"type": "layers", "diff_ids": self.diff_ids or [digest(x.tar) for x in self.layers]},
            }
        ).encode()

    def manifest(self) -> bytes:
        config = self.config()
        return json.dumps(
            {
                "schemaVersion": 2,
                "mediaType": self.kinds["manifest"],
                "config": {"mediaType": self.kinds["config"], "size": len(config), "digest": digest(config)},
                "layers": [
                    {"mediaType": self.kinds["layer"], "size": len(x.blob), "digest": digest(x.blob)}
                    for x in self.layers
                ],
            }
        ).encode()

    def digest(self) -> str:
        return digest(self.manifest())


def index(entries: Iterable[tuple[Image, Mapping[str, str]]], kinds: Mapping[str, str] = OCI) -> bytes:
    """Return an image index; each entry is an image and its platform."""
    manifests = [
        {
            "mediaType": image.kinds["manifest"],
            "size": len(image.manifest()),
            "digest": image.digest(),
            "platform": dict(platform),
        }
        for image, platform in entries
    ]
    return json.dumps({"schemaVersion": 2, "mediaType": kinds["index"], "manifests": manifests}).encode()


def write_layout(layout: pathlib.Path, blobs: Iterable[bytes], index: bytes) -> None:
    """Write an OCI layout: OCI image specification, "Image Layout"."""
    directory = layout / "blobs/sha256"
    directory.mkdir(parents=True, exist_ok=True)
    for blob in blobs:
        (directory / digest(blob).partition(":")[2]).write_bytes(blob)
    (layout / "index.json").write_bytes(index)


class Pusher:
    """A client that pushes to the registry at ``url`` (http://HOST:PORT): OCI distribution specification, "Push"."""

    def __init__(self, url: str) -> None:
        self.url = url

    def _call(self, method: str, path: str, data: bytes = b"", kind: str = "application/octet-stream") -> str:
        url = path if path.startswith("http") else self.url + path
        request = urllib.request.Request(url, data=data, method=method, headers={"Content-Type": kind})
        with urllib.request.urlopen(request) as response:
            return str(response.headers.get("Location") or "")

    def blob(self, repository: str, data: bytes) -> None:
        location = self._call("POST", f"/v2/{repository}/blobs/uploads/")
        separator = "&" if "?" in location else "?"
        self._call("PUT", f"{location}{separator}digest={digest(data)}", data)

    def manifest(self, repository: str, name: str, data: bytes) -> str:
        self._call("PUT", f"/v2/{repository}/manifests/{name}", data, json.loads(data)["mediaType"])
        return digest(data)

    def image(self, repository: str, tag: str, image: Image) -> str:
        """Push an image and return the digest of its manifest."""
        for layer in image.layers:
            self.blob(repository, layer.blob)
        self.blob(repository, image.config())
        return self.manifest(repository, tag or image.digest(), image.manifest())


def busybox(*more: tuple[tarfile.TarInfo, bytes], **fields: Any) -> Image:
    """Return a small image whose commands run: one static program under many names, and a layer of ``more``."""
    layers = [replace(_program())] + ([Layer(tar(more))] if more else [])
    return Image(layers, {"Env": ["PATH=/bin"], "Cmd": ["/bin/sh"]}, **fields)


@functools.cache
def _program() -> Layer:
    """Return the layer of the program, compressed once for all images."""
    program = pathlib.Path(shutil.which("busybox") or "/bin/busybox").read_bytes()
    names = "sh cat ls sleep true echo id mount touch sha256sum".split()
    base = [
        directory("bin"),
        entry("bin/busybox", program, mode=0o755),
        *(symlink(f"bin/{n}", "busybox") for n in names),
    ]
    base += [directory(name) for name in ("dev", "etc", "proc", "sys")] + [directory("tmp", 0o1777)]
    return Layer(tar(base))
