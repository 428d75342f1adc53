"""Identify this build: commit, day and kind of installation, from a file that setup.py or a package wrote."""

from __future__ import annotations

import sys

from enroot_py import LIBRARY, __version__
from enroot_py.base.errors import ConfigError

FILE = f"{LIBRARY}/enroot_py/BUILD"
# By kind of installation: how to install the libraries of the feature {0}, which are in the package {1}.
_ADD = {
    "deb": "install the package {1}",
    "rpm": "install the package {1}",
    "make install": "make install EXTRAS={0}",
    "": "make dev",
}
_PACKAGES = {"ssh": "penroot-ssh", "signatures": "penroot-signatures", "swarm": "penroot-signatures"}


def line() -> str:
    """Return the text of ``--version``, such as penroot 1.0.0 (commit 0123456789ab of 2026-11-23, deb)."""
    if not (words := _words()):
        return f"penroot {__version__} (a source tree)"
    commit, day, kind = words
    return f"penroot {__version__} (commit {commit} of {day}, {kind})"


def _words() -> list[str]:
    """Return commit, day and kind of installation, or [] in a source tree."""
    try:
        with open(FILE) as file:
            words = file.read().strip().split(" ", 2)
    except FileNotFoundError:
        return []
    return words if len(words) == 3 else []


def has(library: str) -> bool:
    """Return whether a Python library is installed, without importing it."""
    if library in sys.modules:
        return sys.modules[library] is not None
    return any(finder.find_spec(library, None) is not None for finder in sys.meta_path)


def missing(feature: str, error: ModuleNotFoundError) -> ConfigError:
    """Return the error for a ``feature`` whose library is not installed. The extra for pip has the feature's name."""
    kind, library = _words()[2] if _words() else "", (error.name or "").partition(".")[0]
    hint = _ADD.get(kind, "pip install 'penroot[{0}]'").format(feature, _PACKAGES[feature])
    return ConfigError(f"{feature} needs the Python library {library}, which is not installed", hint=hint)
