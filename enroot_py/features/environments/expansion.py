"""Expand variables in environment files. Supports most of bash's forms of ``${…}``, but runs no shell and no command.

``$$`` is a dollar sign. A ``$`` without a brace after it is a dollar sign too, as at CSCS; but within ``${…}``,
``$NAME`` is a variable. Each step with an environment file waits for the import of this module, so it imports re only
for patterns.
Sources: docs.cscs.ch, "Environment variable expansion" and "Bash Expansion in EDFs"; bash(1), "Parameter Expansion".
"""

from __future__ import annotations

from enroot_py.base.frozen import Frozen

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Text = tuple["str | Variable", ...]
    Lookup = Callable[[str], "str | None"]

# The longest operators come first, because the parser takes the first match.
_OPERATORS = (":-", ":=", ":+", ":?", "##", "%%", "//", "/#", "/%", "^^", ",,", *"-=+?#%/^,:")
_HINT = "write ${NAME} or ${NAME:-TEXT}; write $$ for a dollar sign"
_MAX_DEPTH = 10


class NotYetKnown(Exception):
    """A variable is not known yet: leave its expression unchanged."""


class Variable(Frozen):
    """``${NAME}``, perhaps with an operator and the words after it. The operator "length" stands for ``${#NAME}``."""

    written: str
    name: str
    operator: str = ""
    words: tuple[Text, ...] = ()


def parse(text: str) -> Text:
    """Split a text into literal characters and variables. Raises ValueError, with a hint."""
    return tuple(_parts(text, False, 0))


def names(text: str) -> list[str]:
    """Return the names of the variables in a text, in order. Raises ValueError."""
    return list(_names(parse(text)))


def expand(text: str, lookup: Lookup, quote: Callable[[str], str] = str) -> str:
    """Expand a text. ``quote`` escapes the values and literal dollar signs. Raises ValueError, with a hint.

    ``lookup`` returns the value of a variable, or None if it is not set. It may raise NotYetKnown.
    """
    out = ""
    for part in parse(text):
        if isinstance(part, str):
            out += part.replace("$", quote("$"))
            continue
        try:
            out += quote(_value(part, lookup))
        except NotYetKnown:
            out += part.written
    return out


def _names(parts: Text) -> Iterator[str]:
    for part in parts:
        if not isinstance(part, str):
            yield part.name
            for word in part.words:
                yield from _names(word)


# ---------------------------------------------------------------------------
# Parsing


def _parts(text: str, in_braces: bool, depth: int) -> Iterator[str | Variable]:
    at = 0
    while at < len(text):
        if text.startswith("$$", at):
            yield "$"
            at += 2
        elif text.startswith("${", at):
            end = _end(text, at)
            yield _variable(text[at:end], depth)
            at = end
        elif in_braces and text[at] == "$" and (name := _name(text[at + 1 :])):
            yield Variable("${" + name + "}", name)
            at += 1 + len(name)
        else:
            yield text[at]
            at += 1


def _end(text: str, start: int) -> int:
    """Return the index after the brace that closes the brace at ``start``. Raises ValueError."""
    at, depth = start, 0
    while at < len(text):
        if text.startswith("${", at):
            depth += 1
            at += 2
            continue
        if text[at] == "\\":
            at += 1
        elif text[at] == "}":
            depth -= 1
            if not depth:
                return at + 1
        at += 1
    raise ValueError(f"{text[start:]} is no variable", _HINT)


def _variable(written: str, depth: int) -> Variable:
    inner = written[2:-1]
    if depth > _MAX_DEPTH:
        raise ValueError(f"{written} is nested too deeply", _HINT)
    if inner.startswith("#") and _name(inner[1:]) == inner[1:] != "":
        return Variable(written, inner[1:], "length")
    name = _name(inner)
    rest = inner[len(name) :]
    operator = next((operator for operator in _OPERATORS if rest.startswith(operator)), "")
    if not name or rest and not operator:
        raise ValueError(f"{written} is no variable", _HINT)
    rest = rest[len(operator) :]
    words = _cut(rest, operator[0]) if operator == ":" or operator[:1] == "/" else (rest,)
    return Variable(written, name, operator, tuple(tuple(_parts(word, True, depth + 1)) for word in words))


def _cut(text: str, separator: str) -> tuple[str, ...]:
    """Split a text at the first separator that is neither escaped nor within braces."""
    at, depth = 0, 0
    while at < len(text):
        if text[at] == "\\":
            at += 1
        elif text.startswith("${", at):
            depth += 1
        elif text[at] == "}":
            depth -= 1
        elif text[at] == separator and not depth:
            return text[:at], text[at + 1 :]
        at += 1
    return (text,)


def _name(text: str) -> str:
    """Return the variable name at the beginning of a text, or ""."""
    end = 0
    while end < len(text) and text[: end + 1].isascii() and text[: end + 1].isidentifier():
        end += 1
    return text[:end]


# ---------------------------------------------------------------------------
# Values


def _text(parts: Text, lookup: Lookup) -> str:
    """Expand the variables in a word of an expression. A backslash quotes the next character."""
    out = "".join(part if isinstance(part, str) else _value(part, lookup).replace("\\", "\\\\") for part in parts)
    return _unescaped(out)


def _unescaped(text: str) -> str:
    head, *rest = text.split("\\")
    out = head
    while rest:
        part = rest.pop(0)
        out += part or ("\\" + rest.pop(0) if rest else "\\")
    return out


def _value(variable: Variable, lookup: Lookup) -> str:
    current, operator, words = lookup(variable.name), variable.operator, variable.words
    if operator in (":-", ":=", "-", "="):
        return _text(words[0], lookup) if current is None or operator[0] == ":" and not current else current
    if operator in (":+", "+"):
        return _text(words[0], lookup) if current or operator == "+" and current is not None else ""
    if operator in (":?", "?") and (current is None or operator == ":?" and not current):
        message = _text(words[0], lookup)
        raise ValueError(f"{variable.name}: {message or 'the variable is not set'}", f"export {variable.name}")
    if current is None:
        hint = f"export it, or write ${{{variable.name}:-}} for an empty value; write $$ for a dollar sign"
        raise ValueError(f"the variable {variable.name} is not set", hint)
    if operator == "length":
        return str(len(current))
    if operator == ":":
        return _slice(current, [_text(word, lookup) for word in words], variable)
    if operator[:1] in ("^", ","):
        return _cased(current, operator, words[0], variable)
    if operator[:1] in ("#", "%"):
        return _stripped(current, operator, _pattern(words[0], lookup, lazy=len(operator) == 1))
    if operator[:1] == "/":
        return _replaced(
            current, operator, _pattern(words[0], lookup), _text(words[1], lookup) if len(words) > 1 else ""
        )
    return current


def _slice(text: str, words: list[str], variable: Variable) -> str:
    try:
        start, *length = (int(word) for word in words)
    except ValueError:
        raise ValueError(f"{variable.written}: offset and length are not numbers", "write ${NAME:2:3}") from None
    start = start if start >= 0 else max(len(text) + start, 0)
    end = (start + length[0] if length[0] >= 0 else len(text) + length[0]) if length else len(text)
    if length and end < start:
        raise ValueError(f"{variable.written}: the end lies before the offset", "write ${NAME:2:3}")
    return text[start:end]


def _cased(text: str, operator: str, word: Text, variable: Variable) -> str:
    if word:
        raise ValueError(f"{variable.written}: a pattern after ^ or , is not supported", "write ${NAME^^} or ${NAME,,}")
    changed = text.upper() if operator[0] == "^" else text.lower()
    return changed if len(operator) == 2 else changed[:1] + text[1:]


def _stripped(text: str, operator: str, pattern: str) -> str:
    import re

    if operator[0] == "#":
        match = re.match(pattern, text, re.DOTALL)
        return text[match.end() :] if match else text
    before = ".*" if len(operator) == 1 else ".*?"  # % removes the shortest suffix, so let .* match as much as possible
    match = re.fullmatch(f"({before}){pattern}", text, re.DOTALL)
    return match[1] if match else text


def _replaced(text: str, operator: str, pattern: str, word: str) -> str:
    import re

    if not pattern:
        return text
    anchored = {"/#": rf"\A{pattern}", "/%": rf"{pattern}\Z"}.get(operator, pattern)
    return re.sub(anchored, lambda _: word, text, count=0 if operator == "//" else 1, flags=re.DOTALL)


def _pattern(parts: Text, lookup: Lookup, *, lazy: bool = False) -> str:
    """Convert a pattern of bash(1) to a regular expression.

    ``*``, ``?`` and ``[…]`` are special also in values of variables. A ``lazy`` ``*`` matches as little as possible.
    """
    import re

    out = "".join(part if isinstance(part, str) else _value(part, lookup) for part in parts)
    at, expression = 0, ""
    while at < len(out):
        c = out[at]
        end = out.find("]", at + 2) if c == "[" else -1
        if c == "\\" and at + 1 < len(out):
            at += 1
            expression += re.escape(out[at])
        elif c == "*":
            expression += ".*?" if lazy else ".*"
        elif c == "?":
            expression += "."
        elif end > 0:
            inner = out[at + 1 : end].replace("\\", "\\\\").replace("[", "\\[")
            expression += f"[{'^' + inner[1:] if inner[0] in '!^' else inner}]"
            at = end
        else:
            expression += re.escape(c)
        at += 1
    try:
        re.compile(expression)
    except re.error as e:
        raise ValueError(f"bad pattern {out}: {e}", "see bash(1), Pattern Matching") from None
    return expression
