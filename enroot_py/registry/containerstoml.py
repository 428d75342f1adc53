"""Parse registries.conf of podman and skopeo.

As in these programs, unknown keys are ignored, and a file with contradicting tables is refused. Version 1 of the format
is converted to version 2. Source: containers-registries.conf(5).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from enroot_py.base.errors import ConfigError
from enroot_py.registry.reference import HUB_NAMES, spelling

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Endpoint = tuple[str, bool, bool, bool]  # location, insecure, for digests, for tags
Table = tuple[str, Endpoint, tuple[Endpoint, ...], bool]  # prefix, registry, mirrors, blocked
_FILE_HINT = "see containers-registries.conf(5)"
_PULLS = {"": (True, True), "all": (True, True), "digest-only": (True, False), "tag-only": (False, True)}


def parse(path: str, data: bytes) -> tuple[Table, ...]:
    """Return the tables of a file. Raises ConfigError."""
    document = _document(path, data)
    version_1 = _value(document, "registries", dict, path)
    raw = _value(document, "registry", list, path)
    if version_1 and raw:
        raise ConfigError(f"{path}: mixes version 1 and 2 of the format", hint="write [[registry]] tables only")
    if version_1:
        raw = list(_from_version_1(version_1, path))
    tables = tuple(_table(entry, f"{path}: registry[{number}]") for number, entry in enumerate(raw))
    _check_conflicts(tables, path)
    return tables


def credential_helpers(path: str, data: bytes) -> tuple[str, ...]:
    """Return the names in ``credential-helpers``. Raises ConfigError."""
    names = _value(_document(path, data), "credential-helpers", list, path)
    if not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{path}: bad value of credential-helpers", hint="write an array of strings")
    return tuple(names)


def _document(path: str, data: bytes) -> dict[str, Any]:
    try:
        return tomllib.loads(data.decode())
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"{path}: {' '.join(str(e).split())}", hint="write TOML: " + _FILE_HINT) from e


def _from_version_1(document: dict[str, Any], path: str) -> Iterator[dict[str, Any]]:
    """Convert the lists of version 1 to tables of version 2."""
    lists = {name: _value(document, name, dict, path) for name in ("insecure", "block")}
    insecure, blocked = (_value(entry, "registries", list, path) for entry in lists.values())
    for location in dict.fromkeys(map(str, [*blocked, *insecure])):
        yield {"location": location, "insecure": location in insecure, "blocked": location in blocked}


def _table(entry: object, position: str) -> Table:
    if not isinstance(entry, dict):
        raise ConfigError(f"{position} is not a table", hint="write [[registry]]")
    location, prefix = (_location(entry, key, position) for key in ("location", "prefix"))
    is_wildcard = prefix.startswith("*.")
    if is_wildcard and "/" in prefix or "*" in prefix[is_wildcard:] or "*" in location:
        raise ConfigError(f"{position}: bad wildcard in {prefix or location!r}", hint='write prefix = "*.DOMAIN"')
    if not location and not is_wildcard:
        raise ConfigError(f"{position} has no location", hint='write location = "HOST[:PORT][/PATH]"')
    by_digest_only = _value(entry, "mirror-by-digest-only", bool, position)
    mirrors = []
    for number, mirror in enumerate(_value(entry, "mirror", list, position)):
        mirrors.append(_mirror(mirror, by_digest_only, f"{position}.mirror[{number}]"))
    registry = (location, _value(entry, "insecure", bool, position), True, True)
    return prefix or location, registry, tuple(mirrors), _value(entry, "blocked", bool, position)


def _mirror(entry: object, by_digest_only: bool, position: str) -> Endpoint:
    if not isinstance(entry, dict):
        raise ConfigError(f"{position} is not a table", hint="write [[registry.mirror]]")
    location, pull = _location(entry, "location", position), _value(entry, "pull-from-mirror", str, position)
    if not location or "*" in location:
        raise ConfigError(f"{position} has no location", hint='write location = "HOST[:PORT][/PATH]"')
    if pull not in _PULLS:
        hint = "write all, digest-only or tag-only"
        raise ConfigError(f"{position}: bad pull-from-mirror {pull!r}", hint=hint)
    if pull and by_digest_only:
        hint = "remove mirror-by-digest-only, and set pull-from-mirror for each mirror"
        raise ConfigError(f"{position}: both pull-from-mirror and mirror-by-digest-only are set", hint=hint)
    by_digest, by_tag = (True, False) if by_digest_only else _PULLS[pull]
    return location, _value(entry, "insecure", bool, position), by_digest, by_tag


def _location(entry: dict[str, Any], key: str, position: str) -> str:
    """Return the value HOST[:PORT][/PATH] of a key, with the canonical spelling of the host, or ""."""
    text: str = _value(entry, key, str, position).rstrip("/")
    if "://" in text or not text.isprintable() or " " in text:
        raise ConfigError(f"{position}: bad {key} {text!r}", hint=f'write {key} = "HOST[:PORT][/PATH]"')
    host, slash, path = text.partition("/")
    host = host if host.startswith("*.") else spelling(host)
    return ("docker.io" if host in HUB_NAMES else host) + slash + path


def _value(entry: dict[str, Any], key: str, kind: type, position: str) -> Any:
    """Return the value of a key, or an empty value for a missing key. Raises ConfigError for a value of another type.

    ``position`` names the file and the table in messages.
    """
    value = entry.get(key, kind())
    if not isinstance(value, kind):
        words = {bool: "true or false", str: 'a string: "…"', list: "an array", dict: "a table"}
        raise ConfigError(f"{position}: bad value of {key}", hint=f"write {words[kind]}")
    return value


def _check_conflicts(tables: tuple[Table, ...], path: str) -> None:
    known: dict[str, tuple[bool, bool]] = {}
    for _, (location, is_insecure, *_), _, is_blocked in tables:
        flags = known.setdefault(location, (is_insecure, is_blocked)) if location else (is_insecure, is_blocked)
        if flags != (is_insecure, is_blocked):
            word = "insecure" if flags[0] != is_insecure else "blocked"
            hint = f"give all tables of that location the same value of {word}"
            raise ConfigError(f"{path}: tables of {location} contradict each other: {word}", hint=hint)
