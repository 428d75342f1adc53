"""Programs that a bundle carries. Their own loader and libraries run them, whatever the host has. On the start path."""

from __future__ import annotations

import os

directory = ""  # where a bundle has unpacked itself; features/bundle/bundled.py sets it


def command(name: str) -> list[str]:
    """Return the command that runs a program of the bundle, without arguments; nothing outside a bundle.

    The kernel names the process after the file that it executes, so each program has a link to the loader.
    """
    program = f"{directory}/programs/{name}"
    if not directory or not os.path.exists(program):
        return []
    return [f"{directory}/loaders/{name}", "--library-path", f"{directory}/libraries", program]
