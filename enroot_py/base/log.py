"""Lines for people on stderr. Results, and nothing else, go to stdout.

Not the logging module: importing it costs more than starting a container.
"""

from __future__ import annotations

import os
import sys
from _collections_abc import Callable

_debug = bool(os.environ.get("PENROOT_DEBUG"))


_rewriting = False  # a line of progress is on the terminal


def _stderr(level: str, text: str) -> None:
    clear = "\r\x1b[K" if _rewriting else ""
    sys.stderr.write(f"{clear}[{level}] {text}\n")
    sys.stderr.flush()


def on_terminal() -> bool:
    """Whether lines go to a terminal, where one can be written over another."""
    return sink is _stderr and sys.stderr.isatty()


def captured() -> bool:
    """Whether lines do not go to stderr: in a step of Slurm, where nobody sees that."""
    return sink is not _stderr


def rewrite(text: str) -> None:
    """Show one line in the place of the one that was shown last; "" removes it."""
    global _rewriting
    _rewriting = bool(text)
    columns = os.get_terminal_size(2).columns or 80
    shown = f"[INFO] {text}"[: columns - 1] if text else ""
    sys.stderr.write(f"\r\x1b[K{shown}")
    sys.stderr.flush()


def silent(level: str, text: str) -> None:
    """Drop a line: a ``sink`` for a process that nobody listens to."""


# Where lines go; the SPANK helper sends them through slurmstepd instead.
sink: Callable[[str, str], None] = _stderr


def printable(text: str) -> str:
    """Words from elsewhere, as a registry's or names in an image, must not steer the terminal."""
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
    """Bytes: 500M, 20G, 2T, powers of 1000. Raises ValueError with what it should have been."""
    factor = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}.get(text[-1:].upper(), 1)
    digits = text[:-1] if factor > 1 else text
    if not digits.isdecimal():
        raise ValueError("must be a size such as 500M or 20G")
    return int(digits) * factor


def size(count: int) -> str:
    """Bytes, in a unit of which there are some."""
    for unit, name, digits in ((10**9, "GB", 2), (10**6, "MB", 1), (10**3, "kB", 0)):
        if count >= unit:
            return f"{count / unit:.{digits}f} {name}"
    return many(count, "byte")


def many(count: int, what: str) -> str:
    """``1 layer``, ``2 layers``."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


# Set by ``start --explain``: takes what is about to be done, in the order in which it is done.
explain: Callable[[str], None] | None = None
