"""JSON whose values know the line on which they begin, for messages about files that people write.

Stricter than Python's own reader: a name that comes twice in an object is an error, as two readers may differ on which
of them counts.
"""

from __future__ import annotations

import json

from enroot_py.base.errors import ConfigError

_SPACE = " \t\r\n"
_DEEPEST = 32  # arrays and objects in each other
_scalar = json.JSONDecoder().raw_decode


class Lined:
    """A value and its line. Those in an object or array are of this class too."""

    __slots__ = ("value", "where")

    def __init__(self, value: object, where: str) -> None:
        self.value = value
        self.where = where  # FILE:LINE

    def members(self, what: str) -> dict[str, Lined]:
        """The members of an object. Raises ConfigError where it is none; ``what`` says what is to be there."""
        if not isinstance(self.value, dict):
            raise ConfigError(f"{self.where}: {what} is to be an object", hint='write {"NAME": …}')
        return self.value

    def items(self, what: str) -> list[Lined]:
        """The items of an array with something in it. Raises ConfigError."""
        if not isinstance(self.value, list) or not self.value:
            raise ConfigError(f"{self.where}: {what} is to be an array, and not empty", hint="write […]")
        return self.value

    def text(self, what: str) -> str:
        """A string that is not empty. Raises ConfigError."""
        if not isinstance(self.value, str) or not self.value:
            raise ConfigError(f"{self.where}: {what} is to be a string, and not empty", hint='write "…"')
        return self.value


def parse(path: str, data: bytes) -> Lined:
    """The value in a file. Raises ConfigError with file and line."""
    try:
        return _Reader(path, data.decode()).document()
    except UnicodeDecodeError as e:
        line = data.count(b"\n", 0, e.start) + 1
        raise ConfigError(f"{path}:{line}: this is not UTF-8", hint="save it as UTF-8, which JSON is") from e


class _Reader:
    def __init__(self, path: str, text: str) -> None:
        self._path = path
        self._text = text
        self._at = 0
        self._line = 1

    @property
    def _where(self) -> str:
        return f"{self._path}:{self._line}"

    def _slip(self, what: str) -> ConfigError:
        return ConfigError(f"{self._where}: {what}", hint="it is to be JSON, which has no comments")

    def _next(self) -> str:
        """The next character that is no space; "" at the end."""
        while (character := self._text[self._at : self._at + 1]) and character in _SPACE:
            self._line += character == "\n"
            self._at += 1
        return character

    def _take(self, expected: str, what: str) -> str:
        character = self._next()
        if not character or character not in expected:
            raise self._slip(
                f"{what} expected, not {character!r}" if character else f"the file ends where {what} is due"
            )
        self._at += 1
        return character

    def document(self) -> Lined:
        value = self._value(0)
        if rest := self._next():
            raise self._slip(f"{rest!r} after the end")
        return value

    def _value(self, depth: int) -> Lined:
        character = self._next()
        where = self._where
        if depth > _DEEPEST:
            raise self._slip("too deep")
        if character == "{":
            return Lined(self._object(depth), where)
        if character == "[":
            return Lined(self._array(depth), where)
        return Lined(self._scalar(), where)

    def _scalar(self) -> object:
        try:
            value, self._at = _scalar(self._text, self._at)
        except ValueError as e:
            raise self._slip(getattr(e, "msg", str(e))) from None
        return value

    def _object(self, depth: int) -> dict[str, Lined]:
        self._at += 1
        members: dict[str, Lined] = {}
        if self._next() == "}":
            self._at += 1
            return members
        while True:
            if self._next() != '"':
                raise self._slip("a name in double quotes expected")
            name = str(self._scalar())
            if name in members:
                raise self._slip(f"{name!r} comes twice")
            self._take(":", "':'")
            members[name] = self._value(depth + 1)
            if self._take(",}", "',' or '}'") == "}":
                return members

    def _array(self, depth: int) -> list[Lined]:
        self._at += 1
        items: list[Lined] = []
        if self._next() == "]":
            self._at += 1
            return items
        while True:
            items.append(self._value(depth + 1))
            if self._take(",]", "',' or ']'") == "]":
                return items
