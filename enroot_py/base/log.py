"""Log to stderr: stdout is for results only.

Do not use the module logging here: its import costs more than a container start.
"""

from __future__ import annotations

import os
import sys
from _collections_abc import Callable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TextIO

_debug = bool(os.environ.get("PENROOT_DEBUG"))


_rewriting = False  # True while a line of progress is on the terminal
RED, GREEN, YELLOW, CYAN = "31", "32", "33", "36"  # ECMA-48 SGR
_COLOURS = {"ERROR": RED, "WARN": YELLOW, "HINT": CYAN}


def _stderr(level: str, text: str) -> None:
    clear = "\r\x1b[K" if _rewriting else ""
    sys.stderr.write(f"{clear}{coloured(f'[{level}]', _COLOURS.get(level, ''), sys.stderr)} {text}\n")
    sys.stderr.flush()


def is_terminal(descriptor: int) -> bool:
    """Return whether a descriptor is a terminal that understands control sequences."""
    return os.isatty(descriptor) and os.environ.get("TERM", "dumb") != "dumb"


def coloured(text: str, colour: str, stream: TextIO) -> str:
    """Return text in a colour, if the stream is a terminal with colours and NO_COLOR is unset (no-color.org)."""
    if not colour or os.environ.get("NO_COLOR") or not stream.isatty() or not is_terminal(stream.fileno()):
        return text
    return f"\x1b[{colour}m{text}\x1b[0m"


def on_terminal() -> bool:
    """Return whether lines go to a terminal, where rewrite() works."""
    return sink is _stderr and is_terminal(2)


def captured() -> bool:
    """Return whether lines do not go to stderr: for example in a Slurm step, where stderr is not visible."""
    return sink is not _stderr


def rewrite(text: str) -> None:
    """Replace the line that the last rewrite() has written; "" removes it."""
    global _rewriting
    _rewriting = bool(text)
    sys.stderr.write(f"\r\x1b[K{text}")
    sys.stderr.flush()


def silent(level: str, text: str) -> None:
    """Drop a line: a ``sink`` for a process whose output has no reader."""


# The function that writes a line. For example, the helper of the SPANK plugin sets a function that sends lines to it.
sink: Callable[[str, str], None] = _stderr


def printable(text: str) -> str:
    """Escape control characters: text of a registry or names in an image must not control the terminal."""
    return text if text.isprintable() else "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def debug(text: str) -> None:
    if _debug:
        sink("DEBUG", printable(text))


def info(text: str) -> None:
    sink("INFO", printable(text))


def warn(text: str) -> None:
    sink("WARN", printable(text))


def error(text: str) -> None:
    sink("ERROR", printable(text))


def hint(text: str) -> None:
    sink("HINT", printable(text))


def parse_size(text: str) -> int:
    """Return the bytes of a size such as 500M, 20G or 2T, in powers of 1000. Raises ValueError."""
    factor = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}.get(text[-1:].upper(), 1)
    digits = text[:-1] if factor > 1 else text
    if not digits.isdecimal():
        raise ValueError("must be a size such as 500M or 20G")
    return int(digits) * factor


def size(count: int) -> str:
    """Format bytes with the largest unit that fits."""
    for unit, name, digits in ((10**9, "GB", 2), (10**6, "MB", 1), (10**3, "kB", 0)):
        if count >= unit:
            return f"{count / unit:.{digits}f} {name}"
    return many(count, "byte")


def many(count: int, noun: str) -> str:
    """Format a count with its noun: ``1 layer``, ``2 layers``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


# A function that ``start --explain`` sets. It gets the description of each operation before the operation.
explain: Callable[[str], None] | None = None
