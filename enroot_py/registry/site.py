"""Read the rules for registries: the file ``registries.conf`` of the site or the user.

Each line has a registry (HOST or HOST:PORT; ``*`` matches all registries without a line) and its rules::

    # registry        rules
    build.site:5000   http
    reg.site          ca=/etc/ssl/site.pem
    docker.io         mirror=reg.site/hub mirror=build.site:5000
    registry.site     token=gitlab.site

``http`` allows plain HTTP if the registry does not speak TLS. ``ca`` names a file of certificate authorities to trust
in addition to the system's. Each ``mirror`` (HOST[:PORT][/PREFIX]) is asked before the registry, in order. ``token``
names a token server on another host that may get the registry's login. Without ``token``, only the registry's own host
and the token servers in _TOKEN_SERVERS get the login.

The user's line for a registry replaces the site's line. penroot trusts the digest that a mirror returns for a tag, but
verifies all content by its digest. For a registry without the rules ``http`` and ``mirror``, the registries.conf of
podman and skopeo applies; for a registry without the rule ``ca``, their certs.d directories apply (containersconf.py).
"""

from __future__ import annotations

import os
from _collections_abc import Iterable, Iterator, Mapping

from enroot_py.base.errors import ConfigError, ImageReferenceError, RefusedError
from enroot_py.base.frozen import Frozen
from enroot_py.config import files
from enroot_py.config.settings import Settings, sysconf_path
from enroot_py.config.words import nearest
from enroot_py.registry import containersconf
from enroot_py.registry.reference import (
    DOCKER,
    DOCKER_HUB,
    HUB_NAMES,
    Reference,
    canonical_registry,
    is_local,
    parse,
    spelling,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ssl import SSLContext

    from enroot_py.registry.containersconf import Endpoint, Table


# Registries whose token server is on another host.
_TOKEN_SERVERS = {
    DOCKER_HUB: "auth.docker.io",
    "nvcr.io": "authn.nvidia.com",
    "registry.gitlab.com": "gitlab.com",
    "registry.digitalocean.com": "api.digitalocean.com",
}


_FORMS = {"http": "http", "ca": "ca=/FILE", "mirror": "mirror=HOST[:PORT][/PREFIX]", "token": "token=HOST[:PORT]"}


class Rules:
    """The rules for one registry, from the ``words`` of a line at ``origin`` (FILE:LINE). Raises ConfigError."""

    __slots__ = ("http", "ca", "mirrors", "token_servers", "words", "origin")

    def __init__(self, words: Iterable[str] = (), origin: str = "") -> None:
        self.words = tuple(words)
        self.origin = origin
        self.http = False
        self.ca = ""
        self.mirrors: tuple[str, ...] = ()
        self.token_servers: tuple[str, ...] = ()
        for word in self.words:
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

    @property
    def replaces_other_files(self) -> bool:
        """Return whether ``http`` or ``mirror`` is set, so that the registries.conf of podman and skopeo is ignored."""
        return self.http or bool(self.mirrors)


class Place(Frozen):
    """A reference to an image in a registry or mirror. ``is_insecure``: see Endpoint of containersconf.py."""

    reference: Reference
    is_insecure: bool = False


def _bad_rule(word: str, key: str, origin: str) -> ConfigError:
    if key in _FORMS:
        return ConfigError(f"{origin}: bad value in {word!r}", hint=f"write {_FORMS[key]}")
    suggestion = nearest(key, _FORMS)
    hint = f"did you mean {_FORMS[suggestion]}?" if suggestion else f"write {', '.join(_FORMS.values())}"
    return ConfigError(f"{origin}: unknown rule {word!r}", hint=hint)


def rules(registry: str, settings: Settings, environ: Mapping[str, str] = os.environ) -> Rules:
    """Return the rules for ``registry``. Raises ConfigError with file and line."""
    known = _known(settings, environ)
    host = registry.rpartition(":")[0]
    return known.get(registry) or known.get(host) or known.get("*") or Rules()


def _known(settings: Settings, environ: Mapping[str, str]) -> dict[str, Rules]:
    known: dict[str, Rules] = {}
    for directory in (sysconf_path(environ), settings.config_path):
        known.update(_read(directory + "/registries.conf"))
    return known


def places(reference: Reference, settings: Settings, environ: Mapping[str, str] = os.environ) -> list[Place]:
    """Return the places of an image: each mirror, in order, then the registry itself. Raises ConfigError, RefusedError.

    Rules with ``http`` or ``mirror`` replace the files of podman and skopeo.
    """
    site_rules = rules(reference.registry, settings, environ)
    if site_rules.replaces_other_files:
        return [*(Place(mirrored(reference, mirror)) for mirror in site_rules.mirrors), Place(reference)]
    table = containersconf.table_of(reference, environ)
    if table is None:
        return [Place(reference)]
    if table.is_blocked:
        hint = "use another registry, or add a line for this registry to penroot's registries.conf"
        raise RefusedError(f"{reference}: {table.file} blocks {table.prefix}", hint=hint)
    wanted = "by_digest" if reference.digest else "by_tag"
    endpoints = (*(mirror for mirror in table.mirrors if getattr(mirror, wanted)), table.registry)
    return [Place(_rewritten(reference, table, endpoint), endpoint.is_insecure) for endpoint in endpoints]


def _rewritten(reference: Reference, table: Table, endpoint: Endpoint) -> Reference:
    """Return a reference to the same image at an endpoint. Omit user and password for another registry."""
    if endpoint.location in ("", table.prefix):
        return reference
    try:
        location = parse(f"{DOCKER}{endpoint.location}{table.rest(containersconf.name_of(reference))}")
        assert isinstance(location, Reference)
    except ImageReferenceError as e:
        message = f"{table.file}: the location {endpoint.location} of {table.prefix} makes {reference} invalid: {e}"
        raise ConfigError(message, hint="correct prefix and location: containers-registries.conf(5)") from None
    is_same = location.registry == reference.registry
    user, secret = (reference.user, reference.secret) if is_same else ("", "")
    return Reference(location.registry, location.repository, location.tag, location.digest, user, secret)


def origins(settings: Settings, environ: Mapping[str, str] = os.environ) -> Iterator[str]:
    """For each registry that has rules, yield a line with the rules and the file that sets them. Raises ConfigError."""
    known = _known(settings, environ)
    for registry, site_rules in known.items():
        yield f"{registry} {' '.join(site_rules.words)}  ({site_rules.origin})"
    for table in containersconf.tables(environ):
        host = spelling(table.prefix.partition("/")[0])
        site_rules = rules(DOCKER_HUB if host in HUB_NAMES else host, settings, environ)
        words = ["blocked"] if table.is_blocked else []
        words += ["insecure"] if table.registry.is_insecure else []
        words += [f"location={table.registry.location}"] if table.registry.location not in ("", table.prefix) else []
        words += [f"mirror={mirror.location}" for mirror in table.mirrors]
        instead = f", replaced by {site_rules.origin}" if site_rules.replaces_other_files else ""
        yield f"{' '.join([table.prefix, *words])}  ({table.file}{instead})"


def may_be_plain(registry: str, settings: Settings) -> bool:
    """Return whether to use plain HTTP for a registry that does not speak TLS."""
    allowed = tuple(spelling(name) for name in settings.allow_http)
    if is_local(registry) or "*" in allowed or registry in allowed or registry.rpartition(":")[0] in allowed:
        return True
    return rules(registry, settings).http


def is_token_server(registry: str, host: str, settings: Settings) -> bool:
    """Return whether ``host`` is a known token server of a registry on another host."""
    host = spelling(host)
    return host == _TOKEN_SERVERS.get(registry) or host in rules(registry, settings).token_servers


def mirrored(reference: Reference, mirror: str) -> Reference:
    """Return a reference to the same image in a mirror."""
    host, slash, prefix = mirror.partition("/")
    repository = f"{prefix.strip('/')}/{reference.repository}" if slash else reference.repository
    return Reference(host, repository, reference.tag, reference.digest)


def tls() -> SSLContext:
    """Return a TLS context that trusts the system's authorities and is not stricter than curl and docker.

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
