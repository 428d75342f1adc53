"""Rules for single registries: the file ``registries.conf`` of the site or the user.

Each line has a registry (HOST or HOST:PORT; ``*`` matches any other) and its rules::

    # registry        rules
    build.site:5000   http
    reg.site          ca=/etc/ssl/site.pem
    docker.io         mirror=reg.site/hub mirror=build.site:5000
    registry.site     token=gitlab.site

``http`` allows plain HTTP if the registry does not speak TLS. ``ca`` names a file of certificate authorities to trust
besides the system's. Each ``mirror`` (HOST[:PORT][/PREFIX]) is asked before the registry itself, in order. ``token``
names the registry's token server on another host, which gets the registry's login. Without ``token``, only the
registry's own host and the token servers in _TOKEN_SERVERS get it.

The user's line replaces the site's. A mirror decides what a tag resolves to. Content named by a digest is checked,
whoever sends it.
"""

from __future__ import annotations

import os
from _collections_abc import Iterable, Iterator, Mapping

from enroot_py.base.errors import ConfigError
from enroot_py.config import files
from enroot_py.config.settings import Settings, sysconf_path
from enroot_py.config.words import nearest
from enroot_py.registry.reference import DOCKER_HUB, HUB_NAMES, Reference, canonical_registry, is_local, spelling

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ssl import SSLContext


# Token servers on another host that belong to the registry.
_TOKEN_SERVERS = {
    DOCKER_HUB: "auth.docker.io",
    "nvcr.io": "authn.nvidia.com",
    "registry.gitlab.com": "gitlab.com",
    "registry.digitalocean.com": "api.digitalocean.com",
}


_FORMS = {"http": "http", "ca": "ca=/FILE", "mirror": "mirror=HOST[:PORT][/PREFIX]", "token": "token=HOST[:PORT]"}


class Rules:
    """The rules for one registry, from the ``words`` of a line at ``origin`` (FILE:LINE). Raises ConfigError."""

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
                raise _bad_rule(word, key, origin)


def _bad_rule(word: str, key: str, origin: str) -> ConfigError:
    if key in _FORMS:
        return ConfigError(f"{origin}: bad value in {word!r}", hint=f"write {_FORMS[key]}")
    meant = nearest(key, _FORMS)
    hint = f"did you mean {_FORMS[meant]}?" if meant else f"write {', '.join(_FORMS.values())}"
    return ConfigError(f"{origin}: unknown rule {word!r}", hint=hint)


def rules(registry: str, settings: Settings, environ: Mapping[str, str] = os.environ) -> Rules:
    """Return the rules for ``registry``. Raises ConfigError with file and line."""
    known: dict[str, Rules] = {}
    for directory in (sysconf_path(environ), settings.config_path):
        known.update(_read(directory + "/registries.conf"))
    host = registry.rpartition(":")[0]
    return known.get(registry) or known.get(host) or known.get("*") or Rules()


def may_be_plain(registry: str, settings: Settings) -> bool:
    """Return whether to use plain HTTP for a registry that does not speak TLS."""
    allowed = tuple(spelling(name) for name in settings.allow_http)
    if is_local(registry) or "*" in allowed or registry in allowed or registry.rpartition(":")[0] in allowed:
        return True
    return rules(registry, settings).http


def is_token_server(registry: str, host: str, settings: Settings) -> bool:
    """Return whether ``host``, which is not the registry's own, is known as its token server."""
    host = spelling(host)
    return host == _TOKEN_SERVERS.get(registry) or host in rules(registry, settings).token_servers


def mirrored(reference: Reference, mirror: str) -> Reference:
    """Return a reference to the same image in a mirror."""
    host, slash, prefix = mirror.partition("/")
    repository = f"{prefix.strip('/')}/{reference.repository}" if slash else reference.repository
    return Reference(host, repository, reference.tag, reference.digest)


def tls() -> SSLContext:
    """Return a TLS context that trusts the system's authorities, and is no stricter than curl and docker.

    Python 3.13 is stricter: it rejects certificate authorities without a key usage extension.
    """
    import ssl

    context = ssl.create_default_context()
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context


def _canonical(registry: str, origin: str) -> str:
    try:
        return canonical_registry(registry)
    except ValueError as e:
        raise ConfigError(f"{origin}: {registry!r} is not a registry", hint=str(e)) from None


def _read(path: str) -> Iterator[tuple[str, Rules]]:
    if not os.path.exists(path):  # missing, or in a directory that we may not search
        return
    try:
        lines = (files.content(path) or b"").decode().splitlines()
    except UnicodeDecodeError as e:
        raise ConfigError(f"{path} is not UTF-8") from e
    for number, line in enumerate(lines, 1):
        registry, *words = line.partition("#")[0].split() or [""]
        if registry:
            registry = registry if registry == "*" else _canonical(registry, f"{path}:{number}")
            yield DOCKER_HUB if registry in HUB_NAMES else registry, Rules(words, f"{path}:{number}")
