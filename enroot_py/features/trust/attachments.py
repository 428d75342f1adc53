"""Read the files in registries.d of podman and skopeo. They can turn off the search for sigstore signatures.

penroot looks for signatures unless ``use-sigstore-attachments`` is false; podman does so only if it is true. penroot
ignores ``lookaside``, the place of GPG signatures, which penroot cannot check. A user's registries.d replaces the
system's. Source: containers-registries.d(5).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from enroot_py.base.errors import ConfigError
from enroot_py.config import files
from enroot_py.config.words import base_directories
from enroot_py.features.trust import identities
from enroot_py.registry.containersconf import SYSTEM
from enroot_py.registry.reference import Reference

_KEY = "use-sigstore-attachments"
_HINT = "see containers-registries.d(5)"


def disabled_by(reference: Reference, environ: Mapping[str, str] = os.environ) -> str:
    """Return the file that turns off the search for signatures of this image, or "". Raises ConfigError."""
    sections = _sections(environ)
    for scope in (*identities.scopes(identities.of(reference)), ""):
        path, section = sections.get(scope, ("", {}))
        enabled = section.get(_KEY)
        if enabled is not None:
            if not isinstance(enabled, bool):
                raise ConfigError(f"{path}: {_KEY} of {scope or 'default-docker'} is not true or false", hint=_HINT)
            return "" if enabled else path
    return ""


def _sections(environ: Mapping[str, str]) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the file and the section of each scope. The scope "" is the default."""
    sections: dict[str, tuple[str, dict[str, Any]]] = {}
    user_directory = base_directories(environ)["HOME"] + "/.config/containers/registries.d"
    directory = user_directory if os.path.isdir(user_directory) else f"{SYSTEM}/registries.d"
    for name in sorted(files.names(directory)):
        if name.endswith(".yaml"):
            path = f"{directory}/{name}"
            for scope, section in _in_file(path):
                if scope in sections:
                    message = f"{path}: {scope or 'default-docker'} is also in {sections[scope][0]}"
                    raise ConfigError(message, hint="keep one of the two sections")
                sections[scope] = path, section
    return sections


def _in_file(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    import yaml

    try:
        document = yaml.safe_load(files.content(path) or b"") or {}
        sections = {"": document["default-docker"]} if document.get("default-docker") else {}
        sections |= {
            identities.canonical(str(scope)): section for scope, section in (document.get("docker") or {}).items()
        }
    except (yaml.YAMLError, AttributeError, TypeError, RecursionError) as e:
        raise ConfigError(f"{path}: {' '.join(str(e).split())}", hint=_HINT) from e
    for scope, section in sections.items():
        if not isinstance(section or {}, dict):
            raise ConfigError(f"{path}: {scope or 'default-docker'} is not a mapping", hint=_HINT)
        yield scope, section or {}
