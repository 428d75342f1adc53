"""Find the settings of a registry in the files that podman, skopeo and buildah share.

penroot's own ``registries.conf`` takes precedence: its rules ``http`` and ``mirror`` replace the tables read here, and
its rule ``ca`` replaces certs.d (site.py). A user's ``~/.config/containers/registries.conf`` replaces the system's file
and the system's drop-ins. A table in a drop-in replaces an earlier table with the same prefix. As in enroot, short
names mean Docker Hub, so ``unqualified-search-registries`` and ``aliases`` are ignored.

Sources: containers-registries.conf(5), containers-registries.conf.d(5), containers-certs.d(5).
"""

from __future__ import annotations

import os
from _collections_abc import Iterator, Mapping

from enroot_py.base.errors import ConfigError
from enroot_py.base.frozen import Frozen
from enroot_py.config import files
from enroot_py.config.words import base_directories
from enroot_py.registry.reference import DOCKER_HUB, Reference

TYPE_CHECKING = False
if TYPE_CHECKING:
    from enroot_py.registry import containerstoml

SYSTEM = "/etc/containers"
_DOCKER_CERTS = "/etc/docker/certs.d"
_VARIABLE = "CONTAINERS_REGISTRIES_CONF"
AUTH_FILES = "containers-auth.json"  # in credential-helpers, this name stands for the files with logins
_HUB = "docker.io"  # the name of Docker Hub in these files


class Endpoint(Frozen):
    """The registry of a ``[[registry]]`` table, or one of its mirrors."""

    location: str
    is_insecure: bool = False  # allow plain HTTP, and TLS with a certificate that is not trusted
    by_digest: bool = True  # serves references with a digest
    by_tag: bool = True  # serves references with a tag


class Table(Frozen):
    """A ``[[registry]]`` table of ``file``: settings for the images whose names begin with ``prefix``."""

    prefix: str  # HOST[:PORT][/PATH][:TAG], or *.DOMAIN
    registry: Endpoint  # an empty location means the registry in the image's name
    mirrors: tuple[Endpoint, ...]
    is_blocked: bool
    file: str

    def rest(self, name: str) -> str | None:
        """Return the rest of an image's name after the prefix, or None if the name does not begin with the prefix."""
        if self.prefix.startswith("*."):
            host, end = name.partition("/")[0], self.prefix[1:]
            at = host.rfind(end)
            rest = name[at + len(end) :] if at >= 0 else None
        else:
            rest = name[len(self.prefix) :] if name.startswith(self.prefix) else None
        return rest if rest is None or rest[:1] in ("", ":", "/", "@") else None


class Certificates(Frozen):
    """The TLS files in ``directory``: certificate authorities, and pairs of a client's certificate and its key."""

    directory: str
    authorities: tuple[str, ...]
    pairs: tuple[tuple[str, str], ...]


def name_of(reference: Reference) -> str:
    """Return the name of an image in the form of these files: docker.io/library/box:1."""
    host = _HUB if reference.registry == DOCKER_HUB else reference.registry
    return f"{host}/{reference.repository}" + (f"@{reference.digest}" if reference.digest else f":{reference.tag}")


def table_of(reference: Reference, environ: Mapping[str, str]) -> Table | None:
    """Return the table with the longest prefix that matches an image's name, or None. Raises ConfigError."""
    name = name_of(reference)
    matching = [table for table in tables(environ) if table.rest(name) is not None]
    return max(matching, key=lambda table: len(table.prefix), default=None)


def tables(environ: Mapping[str, str]) -> tuple[Table, ...]:
    """Return the tables of all files. Raises ConfigError."""
    merged: dict[str, Table] = {}
    for path in paths(environ):
        for prefix, registry, mirrors, is_blocked in _read(path):
            endpoints = tuple(Endpoint(*mirror) for mirror in mirrors)
            merged[prefix] = Table(prefix, Endpoint(*registry), endpoints, is_blocked, path)
    return tuple(merged.values())


def paths(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield the paths of the files that exist, in the order of reading. Raises ConfigError."""
    user = base_directories(environ)["HOME"] + "/.config/containers"
    variable_file = environ.get(_VARIABLE, "")
    if variable_file and not os.path.exists(variable_file):
        raise ConfigError(f"{_VARIABLE}={variable_file}: there is no such file", hint=f"unset {_VARIABLE}")
    user_file = f"{user}/registries.conf"
    is_user_file = not variable_file and os.path.exists(user_file)
    file = variable_file or (user_file if is_user_file else f"{SYSTEM}/registries.conf")
    if os.path.exists(file):
        yield file
    for directory in (user,) if is_user_file else (SYSTEM, user):
        fragments = f"{directory}/registries.conf.d"
        yield from (f"{fragments}/{name}" for name in sorted(files.names(fragments)) if name.endswith(".conf"))


def credential_helpers(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the ``credential-helpers`` of the last file that lists any, or AUTH_FILES. Raises ConfigError."""
    helpers: tuple[str, ...] = ()
    for path in paths(environ):
        if data := _content(path, b"credential-helpers"):
            from enroot_py.registry import containerstoml

            helpers = containerstoml.credential_helpers(path, data) or helpers
    return helpers or (AUTH_FILES,)


def _read(path: str) -> tuple[containerstoml.Table, ...]:
    data = _content(path, b"location", b"prefix", b"[registries")
    if not data:
        return ()
    from enroot_py.registry import containerstoml

    return containerstoml.parse(path, data)


def _content(path: str, *words: bytes) -> bytes:
    """Return the content of a file, or b"" if no line has one of ``words``. Comments do not count.

    Most distributions ship a file with comments only. For such a file the parser is not imported, because its import
    takes longer than the start of Python.
    """
    data = files.content(path) or b""
    lines = [line for line in data.splitlines() if not line.lstrip().startswith(b"#")]
    return data if any(word in line for line in lines for word in words) else b""


def certificates(registry: str, environ: Mapping[str, str]) -> Certificates | None:
    """Return the TLS files for HOST[:PORT], or None. Reads only the first directory that exists. Raises ConfigError."""
    host = _HUB if registry == DOCKER_HUB else registry
    names = (host,) if host.rpartition(":")[2].isdecimal() and not host.endswith("]") else (host, f"{host}:443")
    user = base_directories(environ)["HOME"] + "/.config/containers/certs.d"
    for parent in (user, f"{SYSTEM}/certs.d", _DOCKER_CERTS):
        for name in names:
            directory = f"{parent}/{name}"
            # Skip docker's directory if only root can read it.
            if os.path.isdir(directory) and os.access(directory, os.R_OK | os.X_OK):
                return _certificates(directory)
    return None


def _certificates(directory: str) -> Certificates:
    present = sorted(files.names(directory))
    pairs = []
    for name in present:
        stem, ending = os.path.splitext(name)
        other = {".cert": ".key", ".key": ".cert"}.get(ending)
        if other and stem + other not in present:
            hint = f"add {stem}{other}; certificates of authorities end in .crt"
            raise ConfigError(f"{directory}/{name}: the client's {stem}{other} is missing", hint=hint)
        if ending == ".cert":
            pairs.append((f"{directory}/{name}", f"{directory}/{stem}.key"))
    authorities = tuple(f"{directory}/{name}" for name in present if name.endswith(".crt"))
    return Certificates(directory, authorities, tuple(pairs))
