"""Read the config of an image. The config is untrusted: a malformed config raises ImageError.

Source: OCI image specification, "Image Configuration". Container starts import this module if the image is not stored
yet.
"""

from __future__ import annotations

import json
import os

from enroot_py.base import log
from enroot_py.base.errors import ImageError
from enroot_py.runtime import etc, fstab
from enroot_py.store.layout import MAX_DIRECTORY_DEPTH

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from enroot_py.registry.manifests import Manifest

_DEFAULT_COMMAND = ("/bin/sh",)
_TYPES = ("application/vnd.oci.image.config.v1+json", "application/vnd.docker.container.image.v1+json", "")


class ImageConfig:
    """The config of an image; ``name`` is for messages. Raises ImageError for invalid data."""

    def __init__(self, data: bytes, name: object) -> None:
        self.data = data
        self._name = name
        try:
            document = json.loads(data)
        except (ValueError, RecursionError) as e:
            raise ImageError(f"{name}: the image config is not JSON: {e}") from e
        if not isinstance(document, dict) or not isinstance(document.get("config") or {}, dict):
            raise ImageError(f"{name}: the image config is malformed")
        self._document: dict[str, Any] = document
        self._config: dict[str, Any] = document.get("config") or {}

    @property
    def platform(self) -> tuple[object, object]:
        """Return operating system and architecture, each None if missing."""
        return self._document.get("os"), self._document.get("architecture")

    @property
    def created(self) -> float:
        """Return the creation time of the image in seconds, or 0 if missing or invalid."""
        import datetime

        date, _, time = str(self._document.get("created") or "").partition("T")
        try:
            created = datetime.datetime.fromisoformat(f"{date}T{time[:8]}+00:00")
        except ValueError:
            return 0.0
        return max(0.0, created.timestamp())

    def diff_ids(self, manifest: Manifest) -> list[str]:
        """Return the diff-ids of the layers of ``manifest``. Raises ImageError."""
        rootfs = self._document.get("rootfs")
        diff_ids = rootfs.get("diff_ids") if isinstance(rootfs, dict) else None
        diff_ids = diff_ids if isinstance(diff_ids, list) else []
        if len(diff_ids) != len(manifest.layers):
            kind = manifest.config.media_type
            raise ImageError(
                f"{self._name}: the manifest has {log.many(len(manifest.layers), 'layer')}, "
                f"but the image config has {log.many(len(diff_ids), 'diff_id')}",
                hint="" if kind in _TYPES else f"perhaps it is not a container image: its config has the type {kind!r}",
            )
        if not all(isinstance(diff_id, str) for diff_id in diff_ids):
            raise ImageError(f"{self._name}: the diff_ids of the image config are not strings")
        return diff_ids

    @property
    def workdir(self) -> str:
        """Return the working directory of the command. Raises ImageError."""
        workdir = "/" + str(self._config.get("WorkingDir") or "").strip("/")
        if ".." in workdir.split("/"):
            workdir = os.path.normpath(workdir)
        if workdir.count("/") > MAX_DIRECTORY_DEPTH:
            raise ImageError(f"{self._name}: the WorkingDir has more than {MAX_DIRECTORY_DEPTH} directories")
        return workdir

    def files(self, provenance: str) -> dict[str, bytes]:
        """Map the name of each file that an enroot image needs in /etc to the file's content. Raises ImageError."""
        labels, volumes = self._object("Labels"), self._object("Volumes")
        try:
            entrypoint, command = self._words("Entrypoint"), self._words("Cmd")
            default = () if entrypoint else _DEFAULT_COMMAND
            run = etc.Exec(_text(self.workdir), entrypoint, command or default)
            variables, ignored = etc.variables(self._words("Env"))
            if ignored:
                log.warn(f"{self._name}: Env of the image config has {etc.no_variables(ignored)}")
            rc = etc.write_rc(provenance, {key: str(value) for key, value in labels.items()}, run)
            return {
                "rc": rc.encode(),
                "rc.local": etc.RC_LOCAL.encode(),
                "fstab": fstab.write_image(volumes).encode(),
                "environment": etc.write_environment(variables).encode("utf-8", "surrogateescape"),
            }
        except ValueError as e:
            raise ImageError(f"{self._name}: the image config has a value that is not text: {e}") from e

    def _object(self, key: str) -> Mapping[str, object]:
        value = self._config.get(key) or {}
        if not isinstance(value, dict):
            raise ImageError(f"{self._name}: {key} in the image config is not an object")
        return value

    def _words(self, key: str) -> tuple[str, ...]:
        """Return the strings of a value that is null, a string or a list. Raises ImageError, ValueError."""
        value = self._config.get(key)
        words = [value] if isinstance(value, str) else [] if value is None else value
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise ImageError(f"{self._name}: {key} in the image config is not a list of strings")
        return tuple(map(_text, words))


def _text(word: str) -> str:
    if "\0" in word:
        raise ValueError(f"{word!r} contains a NUL")
    return word
