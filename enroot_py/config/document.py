"""Read JSON written by people, with the path of each value in the file for messages.

A duplicate name in an object is an error, because parsers disagree on which value counts.
"""

from __future__ import annotations

import json

from enroot_py.base.errors import ConfigError


class Node:
    """A value in a file. ``where`` is the file and the value's path, written as for jq(1) but without the first dot."""

    __slots__ = ("value", "where", "_path")

    def __init__(self, value: object, file: str, path: str = "") -> None:
        self.value = value
        self.where = f"{file}: {path}" if path else file
        self._path = file, path

    def members(self, noun: str) -> dict[str, Node]:
        """Return the members of an object. Messages call the value ``noun``. Raises ConfigError."""
        if not isinstance(self.value, dict):
            raise ConfigError(f"{self.where}: {noun} must be an object", hint='write {"NAME": …}')
        return {name: self._beneath(value, name) for name, value in self.value.items()}

    def _beneath(self, value: object, name: str) -> Node:
        file, path = self._path
        plain = name.isascii() and name.isidentifier()
        return Node(value, file, f"{path}.{name}".lstrip(".") if plain else f"{path}[{json.dumps(name)}]")

    def items(self, noun: str) -> list[Node]:
        """Return the items of a non-empty array. Raises ConfigError."""
        if not isinstance(self.value, list) or not self.value:
            raise ConfigError(f"{self.where}: {noun} must be a non-empty array", hint="write […]")
        file, path = self._path
        return [Node(value, file, f"{path}[{index}]") for index, value in enumerate(self.value)]

    def text(self, noun: str) -> str:
        """Return a non-empty string. Raises ConfigError."""
        if not isinstance(self.value, str) or not self.value:
            raise ConfigError(f"{self.where}: {noun} must be a non-empty string", hint='write "…"')
        return self.value


def parse(path: str, data: bytes) -> Node:
    """Parse the content of a file. Raises ConfigError."""
    hint = "write JSON, without comments"
    try:
        return Node(json.loads(data.decode(), object_pairs_hook=_object), path)
    except UnicodeDecodeError as e:
        line = data.count(b"\n", 0, e.start) + 1
        raise ConfigError(f"{path}:{line}: this is not UTF-8", hint="save it as UTF-8") from e
    except json.JSONDecodeError as e:
        raise ConfigError(f"{path}:{e.lineno}: {e.msg}", hint=hint) from None
    except (ValueError, RecursionError) as e:
        reason = "nested too deeply" if isinstance(e, RecursionError) else str(e)
        raise ConfigError(f"{path}: {reason}", hint=hint) from None


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    members = dict(pairs)
    if len(members) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in members if names.count(name) > 1)!r} is a duplicate name")
    return members
