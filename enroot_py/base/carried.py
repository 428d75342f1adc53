"""Programs in a bundle. They run with the bundle's loader and libraries, not the host's. On the start path."""

from __future__ import annotations

import os

directory = ""  # where a bundle has unpacked itself; features/bundle/bundled.py sets it


def command(name: str) -> list[str]:
    """Return the command that runs a program of the bundle, without arguments, or [] outside a bundle.

    The kernel names a process after the executed file, so each program has a link to the loader.
    """
    program = f"{directory}/programs/{name}"
    if not directory or not os.path.exists(program):
        return []
    return [f"{directory}/loaders/{name}", "--library-path", f"{directory}/libraries", program]
