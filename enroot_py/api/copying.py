"""Copy files between this machine and a container.

A child of the launcher opens the directory of this machine, enters the container, opens the directory of the container,
and copies.
"""

from __future__ import annotations

import errno
import os

from enroot_py.base import copytree
from enroot_py.base.errors import ContainerError
from enroot_py.base.fds import Fd

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC


def copy(source: str, target: str, enter: Callable[[], object], *, into: bool) -> None:
    """Copy into the container, or without ``into`` out of it. ``enter`` enters the container. Raises ContainerError."""
    try:
        first, name = _above(source) if into else _parent(target, source)
        with first:
            enter()
            second, other = _parent(target, source) if into else _above(source)
            with second:
                if into:
                    copytree.copy(first, name, second, other)
                else:
                    copytree.copy(second, other, first, name)
    except OSError as e:
        is_read_only = e.errno == errno.EROFS and into
        hint = "make the container with writable=True, or copy to a mount" if is_read_only else ""
        reason = f"{e.filename}: {e.strerror}" if e.filename is not None else str(e.strerror)
        raise ContainerError(f"cannot copy {source} to {target}: {reason}", hint=hint) from e


def _above(source: str) -> tuple[Fd, str]:
    """Open the parent directory of a source, and return the name of the source in it. Raises OSError."""
    path = os.path.realpath(source, strict=True)
    return Fd(os.open(os.path.dirname(path), _DIRECTORY)), os.path.basename(path) or "."


def _parent(target: str, source: str) -> tuple[Fd, str]:
    """Open the directory that will hold the copy, created if missing. Return the name of the copy. Raises OSError."""
    name = os.path.basename(target)
    directory = os.path.dirname(target)
    if not name or os.path.isdir(target):
        directory, name = target, os.path.basename(os.path.normpath(source))
    os.makedirs(directory or ".", exist_ok=True)
    return Fd(os.open(directory or ".", _DIRECTORY)), name
