"""What the plugin in C prints: the calls of fail() and postpone() in c_shims/spank."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import zip_longest

from tests.docs import ROOT

DIRECTORY = ROOT / "c_shims/spank"
_CALL = re.compile(r'\b(?:fail|postpone)\((?=")')
_PART = re.compile(r'"((?:[^"\\]|\\.)*)"|([A-Z_]+)')
_SPECIFIER = re.compile(r"%[a-z]+")


def texts() -> Iterator[str]:
    """Each message, with names of values in capitals."""
    for path in sorted(DIRECTORY.glob("*.c")):
        source = path.read_text()
        for call in _CALL.finditer(source):
            template, *values = _arguments(source[call.end() :])
            parts = [text or name.removeprefix("PENROOT_") for text, name in _PART.findall(template)]
            words = _SPECIFIER.split("".join(parts))
            text = "".join(word + name for word, name in zip_longest(words, map(_name, values), fillvalue=""))
            if re.search("[a-z]{2}", text):
                yield text.replace('\\"', '"')


def _arguments(source: str) -> list[str]:
    """The arguments of a call, up to its closing parenthesis."""
    found, depth = [""], 0
    for token in re.findall(r'"(?:[^"\\]|\\.)*"|.', source, re.S):
        depth += (token == "(") - (token == ")")
        if depth < 0:
            break
        if token == "," and not depth:
            found.append("")
        else:
            found[-1] += token
    return found


def _name(value: str) -> str:
    """The name of a value, in capitals."""
    if "strerror" in value:
        return "REASON"
    words = re.findall(r"[A-Za-z_]\w*", re.sub(r"\((?:unsigned )?\w+\)(?=\w)|\"[^\"]*\"", "", value))
    return words[-1].upper().replace("_", "-") if words else "VALUE"
