"""Copy files between this machine and a container, in a process that has both: one as an open directory.

Programs in the container may change names meanwhile, so below the source and the target no link is followed.
"""

from __future__ import annotations

import os
import stat

from enroot_py.base.errors import ContainerError
from enroot_py.base.fds import Fd

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_CHUNK_BYTES = 1 << 26
_MAX_DEPTH = 200  # each level is an open directory


def copy(source: str, target: str, enter: Callable[[], object], *, into: bool) -> None:
    """Copy ``source`` to ``target``, one of which is in the container that ``enter`` enters. Raises ContainerError."""
    try:
        if into:
            with _opened(source) as file:
                enter()
                _place(file, source, target)
        else:
            parent, name = _parent(target, source)
            with parent:
                enter()
                with _opened(source) as file:
                    _copy(file, parent, name, source, 0)
    except OSError as e:
        hint = "make the container with writable=True, or copy to a mount" if e.errno == 30 and into else ""
        raise ContainerError(f"cannot copy {source} to {target}: {_reason(e)}", hint=hint) from e


def _reason(error: OSError) -> str:
    return f"{error.filename}: {error.strerror}" if error.filename is not None else str(error.strerror)


def _opened(path: str) -> Fd:
    return Fd(os.open(path, _READ))


def _place(file: int, source: str, target: str) -> None:
    parent, name = _parent(target, source)
    with parent:
        _copy(file, parent, name, source, 0)


def _parent(target: str, source: str) -> tuple[Fd, str]:
    """Open the directory that will hold the copy, and return the name of the copy."""
    name = os.path.basename(target)
    directory = os.path.dirname(target)
    if not name or os.path.isdir(target):
        directory, name = target, os.path.basename(os.path.normpath(source))
    os.makedirs(directory or ".", exist_ok=True)
    return Fd(os.open(directory or ".", _DIRECTORY)), name


def _copy(file: int, parent: int, name: str, path: str, depth: int) -> None:
    """Copy an open file or directory to ``name`` in ``parent``. ``path`` is for messages."""
    state = os.fstat(file)
    if stat.S_ISREG(state.st_mode):
        _make_room(parent, name)
        with Fd(os.open(name, _NEW, 0o600, dir_fd=parent)) as new:
            while os.sendfile(new, file, None, _CHUNK_BYTES):
                pass
            _note(new, state)
    elif stat.S_ISDIR(state.st_mode):
        if depth > _MAX_DEPTH:
            raise ContainerError(f"cannot copy {path}: more than {_MAX_DEPTH} directories in each other")
        try:
            os.mkdir(name, 0o700, dir_fd=parent)
        except FileExistsError:
            pass
        with Fd(os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)) as new:
            for entry in os.listdir(file):
                _copy_entry(file, entry, new, f"{path.rstrip('/')}/{entry}", depth + 1)
            _note(new, state)
    else:
        raise ContainerError(f"cannot copy {path}: it is neither a file nor a directory nor a symbolic link")


def _copy_entry(directory: int, name: str, parent: int, path: str, depth: int) -> None:
    if stat.S_ISLNK(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
        target = os.readlink(name, dir_fd=directory)
        _make_room(parent, name)
        os.symlink(target, name, dir_fd=parent)
        return
    with Fd(os.open(name, _READ | os.O_NOFOLLOW, dir_fd=directory)) as file:
        _copy(file, parent, name, path, depth)


def _make_room(parent: int, name: str) -> None:
    """Remove what has the name of a copy, unless it is a directory."""
    try:
        os.unlink(name, dir_fd=parent)
    except FileNotFoundError:
        return


def _note(new: int, state: os.stat_result) -> None:
    os.fchmod(new, state.st_mode & 0o777)
    os.utime(new, ns=(state.st_atime_ns, state.st_mtime_ns))
