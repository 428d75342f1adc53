"""``penroot cp``: copy files between the host and a running container.

The container may change its files and links meanwhile. A path in it is resolved beneath its root, openat2(2)
RESOLVE_IN_ROOT. All that lies below is opened by directory descriptors and never through a link, on both sides: a
link that was copied earlier must not lead a later copy elsewhere.
"""

from __future__ import annotations

import errno
import os
import stat

from enroot_py.base import log, paths
from enroot_py.base.errors import ContainerError, UsageError
from enroot_py.base.fds import Fd
from enroot_py.cli import running
from enroot_py.config.settings import load

_PATH = os.O_PATH | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_DEPTH = 250  # directories; each needs two descriptors
_CHUNK_BYTES = 1 << 20


class Side:
    """A path on the host, or beneath the root directory of a container if that is open as ``root``."""

    def __init__(self, path: str, root: int = -1) -> None:
        self.path, self._root = path or ".", root

    def open(self, path: str, flags: int) -> Fd:
        """Open a path as the user named it: links are followed. Raises OSError."""
        if self._root < 0:
            return Fd(os.open(path, flags))
        return paths.open_in(self._root, path, flags)

    def directory(self) -> Fd | None:
        """Open the path if it is a directory. Raises OSError."""
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
        """The last component, or "." for the content of a directory."""
        is_content = self.path.endswith("/.") or self.path.strip("/") in ("", ".")
        return "." if is_content else os.path.basename(self.path.rstrip("/"))

    def parent(self) -> Fd:
        """Open the directory above the path. Raises OSError."""
        if self.name in (".", ".."):
            return self.open(self.path, _PATH | os.O_DIRECTORY)
        return self.open(os.path.dirname(self.path.rstrip("/")) or ".", _PATH | os.O_DIRECTORY)


def cp(source: str, target: str) -> int:
    """Copy a file or a tree. Raises PenrootError."""
    inside, outside = _container(source), _container(target)
    if bool(inside) == bool(outside):
        message = "cp copies between the host and one container"
        raise UsageError(message, hint="name a container in one of the paths: penroot cp FILE NAME:PATH")
    with _root(inside or outside) as root:
        there, here = (source, target) if inside else (target, source)
        container = Side(there.partition(":")[2] or "/", root)
        host = Side(here)
        try:
            _copy(container, host) if inside else _copy(host, container)
        except OSError as e:
            what = f"cannot copy {source} to {target}: {e.strerror}" + (f": {e.filename!s}" if e.filename else "")
            hint = "start the container with --rw, or copy to a writable mount" if e.errno == errno.EROFS else ""
            raise ContainerError(what, hint=hint) from e
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
            if running.find(name, settings) == pid:  # another process may have got the number
                return root.keep()
    except OSError as e:
        raise ContainerError(f"cannot open the root directory of {name}: {e.strerror}") from e
    raise ContainerError(f"the container {name} has just ended", hint="penroot list shows your containers")


def _copy(source: Side, target: Side) -> None:
    with source.parent() as above:
        directory = target.directory()
        if directory is not None:
            with directory:
                _Copier().copy(above, source.name, directory, source.name)
            return
        with target.parent() as below:
            _Copier().copy(above, source.name, below, target.name)


class _Copier:
    """Copy entries of directories that are open, without following links."""

    def copy(self, above: int, name: str, below: int, new: str, depth: int = 0) -> None:
        """Copy the entry ``name`` of one directory to the entry ``new`` of another. Raises OSError."""
        state = os.stat(name, dir_fd=above, follow_symlinks=False)
        if stat.S_ISDIR(state.st_mode):
            self._copy_directory(above, name, below, new, state, depth)
        elif stat.S_ISLNK(state.st_mode):
            content = os.readlink(name, dir_fd=above)
            temporary = _temporary()
            os.symlink(content, temporary, dir_fd=below)
            _rename(temporary, new, below)
        elif stat.S_ISREG(state.st_mode):
            self._copy_file(above, name, below, new)
        else:
            log.warn(f"not copied: {name}, which is no file, directory or link")

    def _copy_directory(self, above: int, name: str, below: int, new: str, state: os.stat_result, depth: int) -> None:
        if depth == _MAX_DEPTH:
            raise OSError(0, f"more than {_MAX_DEPTH} directories in each other", name)
        mode = stat.S_IMODE(state.st_mode) & 0o777
        is_new = False
        if new != ".":
            try:
                os.mkdir(new, 0o700, dir_fd=below)
                is_new = True
            except FileExistsError:
                pass
        with Fd(os.open(name, _DIRECTORY, dir_fd=above)) as old, Fd(os.open(new, _DIRECTORY, dir_fd=below)) as made:
            for entry in sorted(os.listdir(old)):
                self.copy(old, entry, made, entry, depth + 1)
            if is_new:
                os.fchmod(made, mode)

    def _copy_file(self, above: int, name: str, below: int, new: str) -> None:
        temporary = _temporary()
        with Fd(os.open(name, _READ, dir_fd=above)) as old:
            state = os.fstat(old)
            if not stat.S_ISREG(state.st_mode):
                raise OSError(0, "it is being changed", name)
            with Fd(os.open(temporary, _CREATE, 0o600, dir_fd=below)) as made:
                try:
                    while data := os.read(old, _CHUNK_BYTES):
                        while data:
                            data = data[os.write(made, data) :]
                    os.fchmod(made, stat.S_IMODE(state.st_mode) & 0o777)  # no set-user-ID of a container
                    os.utime(made, ns=(state.st_atime_ns, state.st_mtime_ns))
                    _rename(temporary, new, below)
                except BaseException:
                    _unlink(temporary, below)
                    raise


def _temporary() -> str:
    return f".penroot-{os.urandom(8).hex()}"


def _rename(temporary: str, new: str, directory: int) -> None:
    """Give a new file its name, in place of another file or link. Raises OSError."""
    try:
        os.rename(temporary, new, src_dir_fd=directory, dst_dir_fd=directory)
    except OSError:
        _unlink(temporary, directory)
        raise


def _unlink(name: str, directory: int) -> None:
    try:
        os.unlink(name, dir_fd=directory)
    except OSError:
        return
