"""Unprivileged containers from Docker images: namespaces, overlays, squashfs."""

import sys

from enroot_py.base.pack import LIBRARY as LIBRARY  # and lets an installation import its modules from one file

__version__ = "1.0.0rc1"
ENROOT_VERSION = "4.1.2"  # of enroot, whose commands, hooks and files these are: scripts compare it


def version() -> str:
    """The version to tell: ours, or that of enroot where its name was used."""
    return ENROOT_VERSION if called_as() == "enroot" else __version__


def called_as() -> str:
    """The name that this process was called by: ``enroot`` has enroot's manners where ours are others."""
    return "enroot" if sys.argv[0].rpartition("/")[2] == "enroot" else "penroot"
