"""What a registry means by a refusal, and the way out, in words.

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

_MAX_DOCUMENT = 1 << 16
_MAX_TAG = 128
_SHOWN = 200  # characters of what a server says
_TAGS_SHOWN = 12


def words(response: Response) -> str:
    """What a server says about its refusal. Raises Transient for one that may pass."""
    with response:
        data = response.document(_MAX_DOCUMENT)
    try:
        errors = json.loads(data)["errors"]
        text = "; ".join(str(error.get("message") or error.get("code") or "") for error in errors)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        page = f"a web page ({response.address})" if response.is_page(data) else ""
        text = page or data[:_SHOWN].decode("utf-8", "replace")
    text = "".join(c if c.isprintable() else " " for c in text[:_SHOWN]).strip()
    if response.status in (408, 425, 429) or response.status >= 500:
        raise Transient(f"{response.status} {text}".strip(), retry_after(response.header("Retry-After")))
    return text


def failure(response: Response, registry: str, what: str) -> RegistryError:
    """The error of an answer that nothing better is known of. Raises Transient for one that may pass."""
    return RegistryError(f"{response.status} from {registry} for {what}: {words(response) or 'no reason given'}")


def elsewhere(response: Response, registry: str) -> RegistryError:
    """The error of a server to which the registry redirects, as for blobs. Raises Transient for one that may pass."""
    host = response.server.netloc
    return RegistryError(
        f"{response.status} from {host}, to which {registry} refers: {words(response) or 'no reason given'}",
        hint=f"check whether a proxy or firewall keeps this node from {host}; the login is for {registry} alone",
    )


def unauthorized(reference: Reference, login: Credential | None, settings: Settings) -> RefusedError:
    """An answer of status 401, after which no other login is left."""
    registry, repository = reference.registry, reference.repository
    if login is not None:
        return RefusedError(
            f"401 from {registry}: the login of {login.user!r} from {login.source} is refused for {repository}",
            hint="check user, password and the rights in that repository",
        )
    who = f"no password of {reference.user!r}" if reference.user else "no login"
    return RefusedError(
        f"401 from {registry}: {repository} does not exist or needs a login, and there is {who} for {registry}",
        hint=meant(reference) or f"looked in: {credentials.places(settings)}",
    )


def stranger(reference: Reference, server: str, settings: Settings) -> RefusedError:
    """An answer of status 401, where the tokens come from a server that got no login."""
    registry, repository = reference.registry, reference.repository
    return RefusedError(
        f"401 from {registry}: {repository} does not exist or needs a login, and {server}, "
        f"which hands out the tokens, gets no login for {registry}",
        hint=introduction(reference, server, settings),
    )


def introduction(reference: Reference, server: str, settings: Settings) -> str:
    """How a token server on another host gets to be known."""
    path = f"{settings.config_path}/registries.conf"
    return f"if both are of one house, say so in {path}: {reference.registry} token={server}"


def absent(reference: Reference, tags: Sequence[object] | None) -> RefusedError:
    """An answer of status 404: the repository is missing, or the tag. ``tags`` are those there are, None if unknown."""
    registry, repository = reference.registry, reference.repository
    if tags is None:
        return RefusedError(f"{registry} has no {repository}:{reference.tag or reference.digest}")
    if not tags:
        return RefusedError(
            f"{registry} has no repository {repository}",
            hint=meant(reference) or "check the name; an image of another registry is REGISTRY#IMAGE",
        )
    if reference.digest:
        return RefusedError(f"{registry}/{repository} has no image {reference.digest}")
    shown = ", ".join(str(tag)[:_MAX_TAG] for tag in tags[:_TAGS_SHOWN])
    return RefusedError(
        f"{registry}/{repository} has no tag {reference.tag}",
        hint=meant(reference) or f"there is: {shown}{', …' if len(tags) > _TAGS_SHOWN else ''}",
    )


def meant(reference: Reference) -> str:
    """The way out for a name that looks like a registry's, as #SBATCH lines leave of REGISTRY#IMAGE; else ""."""
    name = reference.repository.removeprefix("library/")
    port = reference.tag if reference.tag.isdecimal() and len(reference.tag) > 3 else ""
    if reference.registry != DOCKER_HUB or "/" in name or name.endswith(".sqsh") or not ("." in name or port):
        return ""
    host = f"{name}:{port}" if port else name
    return f"if {host} is a registry: {host}/IMAGE, as # begins a comment in a batch script"
