"""``penroot cp``: copy files between the host and a running container.

Programs in the container can change files and links during the copy. So the kernel resolves the paths in the container,
and cannot leave the container's root directory: openat2(2), RESOLVE_IN_ROOT.
"""

from __future__ import annotations

import errno
import os

from enroot_py.base import copytree, paths
from enroot_py.base.errors import ContainerError, UsageError
from enroot_py.base.fds import Fd
from enroot_py.cli import running
from enroot_py.config.settings import load

_PATH = os.O_PATH | os.O_CLOEXEC


class Side:
    """One side of a copy: a path on the host, or a path beneath ``root``, an open root directory of a container."""

    def __init__(self, path: str, root: int = -1) -> None:
        self.path, self._root = path or ".", root

    def open(self, path: str, flags: int) -> Fd:
        """Open a path on this side, following links. Raises OSError."""
        if self._root < 0:
            return Fd(os.open(path, flags))
        return paths.open_in(self._root, path, flags)

    def directory(self) -> Fd | None:
        """Open the path if it is a directory, else return None. Raises OSError."""
        try:
            return self.open(self.path, _PATH | os.O_DIRECTORY)
        except FileNotFoundError:
            if self.path.endswith("/"):
                raise
        except NotADirectoryError:
            pass
        return None

    @property
    def name(self) -> str:
        """Return the last component of the path, or "." if the path means the content of a directory."""
        name = os.path.basename(self.path.rstrip("/"))
        return "." if name in ("", ".", "..") else name

    def parent(self) -> Fd:
        """Open the directory that contains ``name``. Raises OSError."""
        if self.name == ".":
            return self.open(self.path, _PATH | os.O_DIRECTORY)
        return self.open(os.path.dirname(self.path.rstrip("/")) or ".", _PATH | os.O_DIRECTORY)


def cp(source: str, target: str) -> int:
    """Copy a file or a tree. Raises PenrootError."""
    inside, outside = _container(source), _container(target)
    if bool(inside) == bool(outside):
        message = "cp copies between the host and one container"
        raise UsageError(message, hint="name a container in one of the paths: penroot cp FILE NAME:PATH")
    with _root(inside or outside) as root:
        container_word, host_word = (source, target) if inside else (target, source)
        container = Side(container_word.partition(":")[2] or "/", root)
        host = Side(host_word)
        try:
            _copy(container, host) if inside else _copy(host, container)
        except OSError as e:
            message = f"cannot copy {source} to {target}: {e.strerror}" + (f": {e.filename!s}" if e.filename else "")
            hint = "start the container with --rw, or copy to a writable mount" if e.errno == errno.EROFS else ""
            raise ContainerError(message, hint=hint) from e
    return 0


def _container(path: str) -> str:
    """Return the container in NAME:PATH, or "" for a path of the host."""
    name, colon, _ = path.partition(":")
    return name if colon and "/" not in name and name else ""


def _root(name: str) -> Fd:
    """Open the root directory of a running container. Raises ContainerError."""
    settings = load()
    pid = running.find(name, settings)
    try:
        with Fd(os.open(f"/proc/{pid}/root", _PATH | os.O_DIRECTORY)) as root:
            if running.find(name, settings) == pid:  # if not, the PID may have been reused before open()
                return root.keep()
    except OSError as e:
        raise ContainerError(f"cannot open the root directory of {name}: {e.strerror}") from e
    raise ContainerError(f"the container {name} has just ended", hint="penroot list shows your containers")


def _copy(source: Side, target: Side) -> None:
    with source.parent() as source_parent:
        directory = target.directory()
        if directory is not None:
            with directory:
                copytree.copy(source_parent, source.name, directory, source.name)
            return
        with target.parent() as target_parent:
            copytree.copy(source_parent, source.name, target_parent, target.name)
