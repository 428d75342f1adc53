"""Find programs of the host and of a bundle. On the start path.

A bundle is an executable file that contains an image and programs (features/bundle). The programs run with the bundle's
loader and libraries.
"""

from __future__ import annotations

import os

directory = ""  # where the running bundle was unpacked; features/bundle/bundled.py sets it


def installed(*names: str) -> str:
    """Return the path of the first of ``names`` that the bundle or the host has, or "". Ignores the user's PATH."""
    for name in names:
        if carried := command(name):
            return carried[-1]
        for place in ("/usr/bin", "/usr/local/bin", "/bin"):
            if os.access(f"{place}/{name}", os.X_OK):
                return f"{place}/{name}"
    return ""


def command(name: str) -> list[str]:
    """Return the command line for a program of the bundle, without arguments; [] if there is no such program.

    The command line executes the loader. The kernel names a process after the executed file, so the bundle has a link
    to the loader under each program's name.
    """
    program = f"{directory}/programs/{name}"
    if not directory or not os.path.exists(program):
        return []
    return [f"{directory}/loaders/{name}", "--library-path", f"{directory}/libraries", program]
