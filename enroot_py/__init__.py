"""Unprivileged containers from Docker images: namespaces, overlays, squashfs."""

import sys

from enroot_py.base.pack import LIBRARY as LIBRARY  # the import also lets an installation import from the pack

__version__ = "1.0.0rc1"
ENROOT_VERSION = "4.2.1"  # of the enroot that we are compatible with: scripts compare it


def version() -> str:
    """Return our version, or enroot's if this process was called as ``enroot``."""
    return ENROOT_VERSION if called_as() == "enroot" else __version__


def called_as() -> str:
    """Return "penroot", or "enroot" if called by that name: behaviour that differs is then enroot's."""
    return "enroot" if sys.argv[0].rpartition("/")[2] == "enroot" else "penroot"
