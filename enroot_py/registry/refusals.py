"""Turn a registry's refusals into error messages with hints.

Source: OCI distribution specification, "Error Codes".
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from enroot_py.base.errors import RefusedError, RegistryError
from enroot_py.config.settings import Settings
from enroot_py.registry import credentials
from enroot_py.registry.credentials import Credential
from enroot_py.registry.http import Response, Transient, retry_after
from enroot_py.registry.reference import DOCKER_HUB, Reference

_MAX_DOCUMENT_BYTES = 1 << 16
_MAX_TAG_CHARS = 128
_MAX_SHOWN_CHARS = 200  # of a server's error message
_MAX_SHOWN_TAGS = 12


def details(response: Response) -> str:
    """Return the server's own error message. Raises Transient for a status that may be temporary."""
    with response:
        data = response.document(_MAX_DOCUMENT_BYTES)
    try:
        errors = json.loads(data)["errors"]
        text = "; ".join(str(error.get("message") or error.get("code") or "") for error in errors)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        page = f"a web page ({response.address})" if response.is_page(data) else ""
        text = page or data[:_MAX_SHOWN_CHARS].decode("utf-8", "replace")
    text = "".join(c if c.isprintable() else " " for c in text[:_MAX_SHOWN_CHARS]).strip()
    if response.status in (408, 425, 429) or response.status >= 500:
        raise Transient(f"{response.status} {text}".strip(), retry_after(response.header("Retry-After")))
    return text


def failure(response: Response, registry: str, path: str) -> RegistryError:
    """Return the error for an unexpected status. Raises Transient for a status that may be temporary."""
    return RegistryError(f"{response.status} from {registry} for {path}: {details(response) or 'no reason given'}")


def elsewhere(response: Response, registry: str) -> RegistryError:
    """Return the error if the registry redirects to a server that sends an error status.

    Raises Transient for a status that may be temporary.
    """
    host = response.server.netloc
    return RegistryError(
        f"{response.status} from {host}, to which {registry} redirects: {details(response) or 'no reason given'}",
        hint=f"check whether a proxy or firewall blocks {host}; the login is sent to {registry} only",
    )


def unauthorized(reference: Reference, login: Credential | None, settings: Settings) -> RefusedError:
    """Return the error for the status 401. ``login`` is the login that was sent, or None."""
    registry, repository = reference.registry, reference.repository
    if login is not None:
        return RefusedError(
            f"401 from {registry}: the login of {login.user!r} from {login.source} is refused for {repository}",
            hint="check user, password and the rights in that repository",
        )
    account = f"no password of {reference.user!r}" if reference.user else "no login"
    return RefusedError(
        f"401 from {registry}: {repository} does not exist or needs a login, and there is {account} for {registry}",
        hint=likely_registry(reference) or f"looked in: {credentials.searched_files(settings)}",
    )


def unknown_token_server(reference: Reference, server: str, settings: Settings) -> RefusedError:
    """Return the error for the status 401 if penroot sent no login to the token server ``server``."""
    registry, repository = reference.registry, reference.repository
    return RefusedError(
        f"401 from {registry}: {repository} does not exist or needs a login; "
        f"the login for {registry} is not sent to the unknown token server {server}",
        hint=how_to_trust(reference, server, settings),
    )


def how_to_trust(reference: Reference, server: str, settings: Settings) -> str:
    """Return a hint that explains how to declare a token server on another host."""
    path = f"{settings.config_path}/registries.conf"
    registry = reference.registry
    return f"if {registry} and {server} belong together, add this line to {path}: {registry} token={server}"


def absent(reference: Reference, tags: Sequence[object] | None) -> RefusedError:
    """Return the error for the status 404. ``tags`` is empty if the repository is missing, or None if unknown."""
    registry, repository = reference.registry, reference.repository
    if tags is None:
        return RefusedError(f"{registry} has no {repository}:{reference.tag or reference.digest}")
    if not tags:
        return RefusedError(
            f"{registry} has no repository {repository}",
            hint=likely_registry(reference) or "check the name; for another registry write REGISTRY#IMAGE",
        )
    if reference.digest:
        return RefusedError(f"{registry}/{repository} has no image {reference.digest}")
    shown = ", ".join(str(tag)[:_MAX_TAG_CHARS] for tag in tags[:_MAX_SHOWN_TAGS])
    return RefusedError(
        f"{registry}/{repository} has no tag {reference.tag}",
        hint=likely_registry(reference) or f"available tags: {shown}{', …' if len(tags) > _MAX_SHOWN_TAGS else ''}",
    )


def likely_registry(reference: Reference) -> str:
    """Return a hint if the image name looks like a registry, else "".

    In an #SBATCH line the "#" of REGISTRY#IMAGE begins a comment, so only the name of the registry is left.
    """
    name = reference.repository.removeprefix("library/")
    port = reference.tag if reference.tag.isdecimal() and len(reference.tag) > 3 else ""
    if reference.registry != DOCKER_HUB or "/" in name or name.endswith(".sqsh") or not ("." in name or port):
        return ""
    host = f"{name}:{port}" if port else name
    return f"if {host} is a registry, write {host}/IMAGE, because # begins a comment in an #SBATCH line"
