"""Which build this is: the commit, its day, and as what it was installed, as setup.py and packages wrote it down."""

from __future__ import annotations

from enroot_py import LIBRARY, __version__

FILE = f"{LIBRARY}/enroot_py/BUILD"


def line() -> str:
    """What ``--version`` says: penroot 1.0.0 (commit 0123456789ab of 2026-11-23, deb)."""
    try:
        with open(FILE) as file:
            commit, day, kind = file.read().strip().split(" ", 2)
    except (FileNotFoundError, ValueError):
        return f"penroot {__version__} (a source tree)"
    return f"penroot {__version__} (commit {commit} of {day}, {kind})"
