"""Read local images: from an OCI layout, an archive, or a container engine.

Sources: OCI image specification, "Image Layout"; Docker's image specification v1.2, "Combined Image JSON +
Filesystem Changeset Format"; docker-image-save(1), podman-save(1).
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import Any

from enroot_py.base import digests, log, run
from enroot_py.base.errors import ImageError
from enroot_py.config.settings import Settings
from enroot_py.registry import archives, manifests
from enroot_py.registry.archives import Archive, Files, LayoutDirectory, Section
from enroot_py.registry.manifests import Descriptor, Manifest
from enroot_py.registry.reference import ENGINES, LocalImage, parse

_TITLE = "org.opencontainers.image.ref.name"  # OCI image specification, "Pre-Defined Annotation Keys"


def open_image(reference: LocalImage, settings: Settings) -> Layout | DockerArchive | Engine:
    """Open a local image. Reads the member list of an archive, but does not run an engine yet. Raises ImageError."""
    if reference.scheme in ENGINES:
        return Engine(reference, settings)
    if reference.scheme == "oci:":
        return Layout(reference, LayoutDirectory(reference.place))
    archive = Archive(str(reference), archives.open_plain(reference.place, settings))
    return Layout(reference, archive) if reference.scheme == "oci-archive:" else DockerArchive(reference, archive)


class Layout:
    """An OCI layout: a directory, or an archive of a directory."""

    base = ""

    def __init__(self, reference: LocalImage, files: Files) -> None:
        self._reference = reference
        self._files = files

    def digest(self) -> str:
        return ""

    def manifest(self, arch: str | None = None) -> Manifest:
        """Return the manifest for an architecture. Without a name in the reference, the layout must have one image."""
        index = _json(self._files, "index.json", self._reference)
        entries = index.get("manifests") if isinstance(index, dict) else None
        entries = [e for e in entries if isinstance(e, dict)] if isinstance(entries, list) else []
        titles = [str(manifests.fields(e.get("annotations")).get(_TITLE) or "") for e in entries]
        name = self._reference.name
        if name:
            entries = [e for e, title in zip(entries, titles, strict=True) if title == name]
        if not entries or not name and len(set(titles)) > 1:
            available = ", ".join(sorted(filter(None, titles))) or "none"
            count = "no such image" if name else "more than one image" if entries else "no image"
            raise ImageError(
                f"{self._reference}: {count} in the layout",
                hint=f"available images: {available}; write {self._reference.scheme}{self._reference.place}:NAME",
            )
        search = manifests.Search(self, self._reference, arch)
        if len(entries) > 1:
            return search.image_in(entries, "")
        return search.image_of(self.named(str(entries[0].get("digest"))))

    def config(self, manifest: Manifest) -> bytes:
        return self.named(manifest.config.digest)

    def blob(self, descriptor: Descriptor) -> Section:
        return self._files.open(_blob_name(descriptor.digest))

    def named(self, digest: str) -> bytes:
        data = archives.document(self._files, _blob_name(digest))
        if digests.of(data) != digest:
            raise ImageError(f"{self._reference}: the blob {digest} has the digest {digests.of(data)}")
        return data


def _blob_name(digest: str) -> str:
    return f"blobs/sha256/{digests.encoded(digest)}"


class DockerArchive:
    """An archive of ``docker save``. Its manifest.json names the config and the layers' tar files.

    The archive has no manifest with digests. manifest() makes one from the config and its diff_ids, so that the same
    image always gets the same manifest.
    """

    base = ""

    def __init__(self, reference: LocalImage, files: Files) -> None:
        self._reference = reference
        self._files = files
        self._blobs: dict[str, str] = {}
        self._config = b""

    def digest(self) -> str:
        return ""

    def manifest(self, arch: str | None = None) -> Manifest:
        """Return the manifest. Without a name in the reference, the archive must have one image.

        ``arch`` is ignored: an archive has one architecture per name.
        """
        entry = self._choose(_json(self._files, "manifest.json", self._reference))
        try:
            self._config = archives.document(self._files, str(entry["Config"]))
            names = [str(name) for name in entry["Layers"] or ()]
            diff_ids = json.loads(self._config)["rootfs"]["diff_ids"] or []
            if len(names) != len(diff_ids):
                raise ImageError(f"{self._reference}: {len(names)} layers, but {len(diff_ids)} diff_ids in the config")
            self._blobs = dict(zip(diff_ids, names, strict=True))
            layers = []
            for diff_id, name in zip(diff_ids, names, strict=True):
                with self._files.open(name) as section:
                    layers.append({"mediaType": "application/vnd.oci.image.layer.v1.tar", "digest": diff_id,
                                   "size": section.size})  # fmt: skip
        except (KeyError, TypeError, ValueError, RecursionError) as e:
            raise ImageError(f"{self._reference}: not an archive of docker save: {e!r}") from e
        document = {
            "schemaVersion": 2,
            "config": {"digest": digests.of(self._config), "size": len(self._config)},
            "layers": layers,
        }
        data = json.dumps(document, sort_keys=True).encode()
        return manifests.manifest(data, document, digests.of(data), self._reference)

    def _choose(self, entries: Any) -> dict[str, Any]:
        entries = [e for e in entries if isinstance(e, dict)] if isinstance(entries, list) else []
        lists = [e.get("RepoTags") for e in entries]
        tags = [[str(tag) for tag in names] if isinstance(names, list) else [] for names in lists]
        if self._reference.name:
            # Some engines write docker.io/library/x:latest, others x:latest.
            reference = parse(self._reference.name)
            entries = [e for e, names in zip(entries, tags, strict=True) if reference in map(parse, names)]
        if len(entries) == 1:
            entry: dict[str, Any] = entries[0]
            return entry
        available = ", ".join(tag for names in tags for tag in names) or "none with a name"
        count = "no such image" if self._reference.name else "more than one image" if entries else "no image"
        raise ImageError(
            f"{self._reference}: {count} in the archive",
            hint=f"available images: {available}; write {self._reference.scheme}{self._reference.place}:NAME:TAG",
        )

    def config(self, manifest: Manifest) -> bytes:
        return self._config

    def blob(self, descriptor: Descriptor) -> Section:
        return self._files.open(self._blobs[descriptor.digest])


def _json(files: Files, name: str, reference: LocalImage) -> Any:
    try:
        return json.loads(archives.document(files, name))
    except (ValueError, RecursionError) as e:
        raise ImageError(f"{reference}: {name} is not JSON: {e}") from e


class Engine:
    """An image of docker or podman, copied with ``save``. The engine pulls a missing image first."""

    def __init__(self, reference: LocalImage, settings: Settings) -> None:
        self._reference = reference
        self._settings = settings
        self.base = ENGINES[reference.scheme]
        self._program = run.find(self.base, package=self.base)
        self._archive: DockerArchive | None = None
        self._id = ""

    def _run(self, *arguments: str, stdout: int | None = None) -> str:
        return run.Program([self._program, *arguments], error=ImageError, stdout=stdout, environ=os.environ).run()

    def digest(self) -> str:
        """Return the engine's id of the image. A missing image is pulled first."""
        inspect = ("image", "inspect", "--format", "{{.Id}}", self._reference.place)
        if not self._id:
            try:
                self._id = self._run(*inspect).strip()
            except ImageError as e:
                log.debug(f"{e}; pulling the image with {self.base}")
                self._run("pull", self._reference.place)
                self._id = self._run(*inspect).strip()
        return self._id

    def manifest(self, arch: str | None = None) -> Manifest:
        named = self.digest()
        log.info(f"saving {self._reference} with {self.base}")
        with archives.scratch(self._settings) as out:
            self._run("save", self._reference.place, stdout=out.fileno())
            file = archives.reopened(out)
        # The archive has one image, perhaps with several names.
        self._archive = DockerArchive(self._reference, Archive(str(self._reference), file))
        return replace(self._archive.manifest(arch), named=named)

    def config(self, manifest: Manifest) -> bytes:
        assert self._archive is not None
        return self._archive.config(manifest)

    def blob(self, descriptor: Descriptor) -> Section:
        assert self._archive is not None
        return self._archive.blob(descriptor)
