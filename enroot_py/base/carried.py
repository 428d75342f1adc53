"""Programs of the host, and of a bundle, which run with the bundle's loader and libraries. On the start path."""

from __future__ import annotations

import os

directory = ""  # where a bundle has unpacked itself; features/bundle/bundled.py sets it


def installed(*names: str) -> str:
    """Return the path of the first program that the bundle or the host has, or "". Ignores the user's PATH."""
    for name in names:
        if carried := command(name):
            return carried[-1]
        for place in ("/usr/bin", "/usr/local/bin", "/bin"):
            if os.access(f"{place}/{name}", os.X_OK):
                return f"{place}/{name}"
    return ""


def command(name: str) -> list[str]:
    """Return the command that runs a program of the bundle, without arguments, or [] outside a bundle.

    The kernel names a process after the executed file, so each program has a link to the loader.
    """
    program = f"{directory}/programs/{name}"
    if not directory or not os.path.exists(program):
        return []
    return [f"{directory}/loaders/{name}", "--library-path", f"{directory}/libraries", program]
