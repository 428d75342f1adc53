"""What a site, or a user, says of single registries: the file ``registries.conf``.

One line a registry (HOST or HOST:PORT; ``*`` is every other), and what holds for it::

    # registry        what holds
    build.site:5000   http
    reg.site          ca=/etc/ssl/site.pem
    docker.io         mirror=reg.site/hub mirror=build.site:5000
    registry.site     token=gitlab.site

``http`` allows plain HTTP where TLS is not spoken, ``ca`` names a file of authorities to
trust besides the system's, and each ``mirror`` (HOST[:PORT][/PREFIX]) is asked before the
registry itself, in order. ``token`` names another host that hands out the registry's tokens,
and gets its login for that; without it, only the registry's own host does, and the token
servers that are known here. The user's line replaces the system's. Mirrors are trusted with
the meaning of a tag; what a digest names is checked whoever sends it.
"""

from __future__ import annotations

import os
from _collections_abc import Iterable, Iterator, Mapping

from enroot_py.base.errors import ConfigError
from enroot_py.config import files
from enroot_py.config.settings import Settings, sysconf_path
from enroot_py.registry.reference import DOCKER_HUB, HUB_NAMES, Reference, canonical_registry, is_local, spelling

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ssl import SSLContext


# Registries whose tokens come from another host of the same house.
_TOKEN_SERVERS = {
    DOCKER_HUB: "auth.docker.io",
    "nvcr.io": "authn.nvidia.com",
    "registry.gitlab.com": "gitlab.com",
    "registry.digitalocean.com": "api.digitalocean.com",
}


class Rules:
    """What holds for one registry: ``words`` of a line, and where that is. Raises ConfigError."""

    __slots__ = ("http", "ca", "mirrors", "token_servers")

    def __init__(self, words: Iterable[str] = (), origin: str = "") -> None:
        self.http = False
        self.ca = ""
        self.mirrors: tuple[str, ...] = ()
        self.token_servers: tuple[str, ...] = ()
        for word in words:
            key, _, value = word.partition("=")
            if word == "http":
                self.http = True
            elif key == "ca" and value.startswith("/"):
                self.ca = value
            elif key == "mirror" and value and "://" not in value:
                host, slash, prefix = value.partition("/")
                self.mirrors += (_canonical(host, origin) + slash + prefix,)
            elif key == "token" and value and "/" not in value:
                self.token_servers += (_canonical(value, origin),)
            else:
                raise ConfigError(
                    f"{origin}: {word!r}",
                    hint="write http, ca=/FILE, mirror=HOST[:PORT][/PREFIX] or token=HOST[:PORT]",
                )


def rules(registry: str, settings: Settings, environ: Mapping[str, str] = os.environ) -> Rules:
    """What holds for ``registry``. Raises ConfigError with file and line."""
    known: dict[str, Rules] = {}
    for directory in (sysconf_path(environ), settings.config_path):
        known.update(_read(directory + "/registries.conf"))
    host = registry.rpartition(":")[0]
    return known.get(registry) or known.get(host) or known.get("*") or Rules()


def may_be_plain(registry: str, settings: Settings) -> bool:
    """Whether plain HTTP may be spoken with a registry that does not speak TLS."""
    named = tuple(spelling(name) for name in settings.allow_http)
    if is_local(registry) or "*" in named or registry in named or registry.rpartition(":")[0] in named:
        return True
    return rules(registry, settings).http


def is_token_server(registry: str, host: str, settings: Settings) -> bool:
    """Whether ``host``, another one than the registry's own, is known to hand out its tokens."""
    host = spelling(host)
    return host == _TOKEN_SERVERS.get(registry) or host in rules(registry, settings).token_servers


def mirrored(reference: Reference, mirror: str) -> Reference:
    """The same image in a mirror."""
    host, slash, prefix = mirror.partition("/")
    repository = f"{prefix.strip('/')}/{reference.repository}" if slash else reference.repository
    return Reference(host, repository, reference.tag, reference.digest)


def tls() -> SSLContext:
    """TLS that trusts the system's authorities, and asks no more of a site's own than curl and docker do.

    Python 3.13 does: a key usage extension, for one.
    """
    import ssl

    context = ssl.create_default_context()
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context


def _canonical(registry: str, origin: str) -> str:
    try:
        return canonical_registry(registry)
    except ValueError as e:
        raise ConfigError(f"{origin}: {registry!r} is no registry", hint=str(e)) from None


def _read(path: str) -> Iterator[tuple[str, Rules]]:
    if not os.path.exists(path):  # or in a place that is closed to us
        return
    try:
        lines = (files.content(path) or b"").decode().splitlines()
    except UnicodeDecodeError as e:
        raise ConfigError(f"{path}: is not UTF-8") from e
    for number, line in enumerate(lines, 1):
        registry, *words = line.partition("#")[0].split() or [""]
        if registry:
            registry = registry if registry == "*" else _canonical(registry, f"{path}:{number}")
            yield DOCKER_HUB if registry in HUB_NAMES else registry, Rules(words, f"{path}:{number}")
