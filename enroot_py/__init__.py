"""Unprivileged containers from Docker images: namespaces, overlays, squashfs."""

import sys

from enroot_py.base.pack import LIBRARY as LIBRARY  # the pack: compiled modules in one file, used from here on

TYPE_CHECKING = False
if TYPE_CHECKING:
    from enroot_py.api.container import Container as Container
    from enroot_py.api.container import Image as Image
    from enroot_py.api.container import pull as pull
    from enroot_py.api.container import run as run
    from enroot_py.api.process import Process as Process
    from enroot_py.base.errors import CommandError as CommandError
    from enroot_py.base.errors import ConfigError as ConfigError
    from enroot_py.base.errors import ContainerError as ContainerError
    from enroot_py.base.errors import HookError as HookError
    from enroot_py.base.errors import ImageError as ImageError
    from enroot_py.base.errors import ImageReferenceError as ImageReferenceError
    from enroot_py.base.errors import MountError as MountError
    from enroot_py.base.errors import NamespaceError as NamespaceError
    from enroot_py.base.errors import PenrootError as PenrootError
    from enroot_py.base.errors import PolicyError as PolicyError
    from enroot_py.base.errors import RegistryError as RegistryError
    from enroot_py.base.errors import UsageError as UsageError

# public name -> module that __getattr__() imports when the name is first used
_PUBLIC = {
    **dict.fromkeys(("Container", "Image", "pull", "run"), "api.container"),
    "Process": "api.process",
    **dict.fromkeys(("CommandError", "ConfigError", "ContainerError", "HookError", "ImageError"), "base.errors"),
    **dict.fromkeys(("ImageReferenceError", "MountError", "NamespaceError", "PenrootError"), "base.errors"),
    **dict.fromkeys(("PolicyError", "RegistryError", "UsageError"), "base.errors"),
}
__all__ = list(_PUBLIC)
__version__ = "1.0.0rc2"
ENROOT_VERSION = "4.2.1"  # the version of enroot with which penroot is compatible; scripts compare it


def version() -> str:
    """Return our version, or enroot's if this process was called as ``enroot``."""
    return ENROOT_VERSION if called_as() == "enroot" else __version__


def called_as() -> str:
    """Return "enroot" if this process was called by that name and must behave like enroot, else "penroot"."""
    return "enroot" if sys.argv[0].rpartition("/")[2] == "enroot" else "penroot"


def __getattr__(name: str) -> object:
    """Import a public name at its first use."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'enroot_py' has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(f"enroot_py.{_PUBLIC[name]}"), name)
    return value
