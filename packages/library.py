"""Shrink a directory of modules: of each library, keep only files that penroot needs, and archive our modules.

python -m packages.library DIRECTORY     # where pip installed penroot and the libraries
"""

from __future__ import annotations

import fnmatch
import os
import subprocess
import sys
import zipfile
from pathlib import Path

from packages.vendored import KEPT

OURS = ("enroot_py", "pyxis_py")
# Python imports these modules before it can read the archive: enroot_py/base/pack.py.
BOOTSTRAP = {"enroot_py/__init__.py", "enroot_py/base/__init__.py", "enroot_py/base/pack.py", "pyxis_py/__init__.py"}
# Hooks that people read and copy, and the sources of the plugin.
UNPACKED = ("enroot_py/standard_hooks/*", "pyxis_py/c_shims/*")
ARCHIVE = "modules.zip"


def reduce(library: Path) -> None:
    """Remove the files of libraries that are not in KEPT, archive our modules, and compile the rest."""
    patterns = [pattern for kept in KEPT.values() for pattern in kept]
    for path in library.rglob("*"):
        name = str(path.relative_to(library))
        if path.is_file() and not name.startswith(OURS) and not any(fnmatch.fnmatchcase(name, p) for p in patterns):
            path.unlink()
    for path in library.rglob("*.so"):
        subprocess.run(["strip", "--strip-unneeded", path], check=True)
    gather_hooks(library)
    archive_modules(library)
    remove_empty(library)
    # Leave out column numbers. They are a quarter of the compiled code, and every start would load them.
    subprocess.run([sys.executable, "-X", "no_debug_ranges", "-m", "compileall", "-q", library], check=True)


def gather_hooks(library: Path) -> None:
    """Move the hooks of features to the hooks of the core: a node has only one directory of hooks, with one extra/."""
    standard = library / "enroot_py/standard_hooks"
    for hooks in (library / "enroot_py/features").glob("*/hooks"):
        for path in list(hooks.rglob("*.py")):
            path.rename(standard / path.relative_to(hooks))


def archive_modules(library: Path) -> None:
    """Move the sources of our modules into ARCHIVE. enroot_py/base/packing.py compiles them for starts."""
    with zipfile.ZipFile(library / ARCHIVE, "w", zipfile.ZIP_DEFLATED) as modules:
        for path in sorted(path for package in OURS for path in (library / package).rglob("*.py")):
            name = str(path.relative_to(library))
            if name in BOOTSTRAP or any(fnmatch.fnmatchcase(name, pattern) for pattern in UNPACKED):
                continue
            modules.writestr(zipfile.ZipInfo(name), path.read_bytes(), zipfile.ZIP_DEFLATED)
            path.unlink()
    for path in (library / "pyxis_py/c_shims").rglob("*.py"):
        path.unlink()


def remove_empty(top: Path) -> None:
    for directory, _, _ in os.walk(top, topdown=False):
        if not os.listdir(directory):
            os.rmdir(directory)


if __name__ == "__main__":
    reduce(Path(sys.argv[1]))
