"""Copy files and trees between directories that are open.

Nothing is opened through a symlink: another process may replace an entry by a symlink meanwhile, and a symlink that an
earlier copy made must not redirect a later copy.
"""

from __future__ import annotations

import os
import stat

from enroot_py.base import log
from enroot_py.base.fds import Fd

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_DIRECTORY_DEPTH = 250  # each level needs two descriptors
_CHUNK_BYTES = 1 << 20


def copy(source: int, name: str, target: int, new: str, depth: int = 0) -> None:
    """Copy the entry ``name`` of the directory ``source`` to the entry ``new`` of ``target``. Raises OSError.

    Files are replaced and directories are merged. Links are copied as links. Special files in a directory are skipped
    with a warning.
    """
    state = os.stat(name, dir_fd=source, follow_symlinks=False)
    if stat.S_ISDIR(state.st_mode):
        _copy_directory(source, name, target, new, state, depth)
    elif stat.S_ISLNK(state.st_mode):
        content = os.readlink(name, dir_fd=source)
        temporary = _temporary()
        os.symlink(content, temporary, dir_fd=target)
        _rename(temporary, new, target)
    elif stat.S_ISREG(state.st_mode):
        _copy_file(source, name, target, new)
    elif depth:
        log.warn(f"not copied: {name}: not a file, directory or link")
    else:
        raise OSError(0, "not a file, directory or link", name)


def _copy_directory(source: int, name: str, target: int, new: str, state: os.stat_result, depth: int) -> None:
    if depth == _MAX_DIRECTORY_DEPTH:
        raise OSError(0, f"more than {_MAX_DIRECTORY_DEPTH} nested directories", name)
    is_new = False
    if new != ".":
        try:
            os.mkdir(new, 0o700, dir_fd=target)
            is_new = True
        except FileExistsError:
            pass
    with Fd(os.open(name, _DIRECTORY, dir_fd=source)) as old, Fd(os.open(new, _DIRECTORY, dir_fd=target)) as made:
        for entry in sorted(os.listdir(old)):
            copy(old, entry, made, entry, depth + 1)
        if is_new:
            _copy_state(made, state)


def _copy_file(source: int, name: str, target: int, new: str) -> None:
    temporary = _temporary()
    with Fd(os.open(name, _READ, dir_fd=source)) as old:
        state = os.fstat(old)
        if not stat.S_ISREG(state.st_mode):
            raise OSError(0, "it is being changed", name)
        with Fd(os.open(temporary, _CREATE, 0o600, dir_fd=target)) as made:
            try:
                while data := os.read(old, _CHUNK_BYTES):
                    while data:
                        data = data[os.write(made, data) :]
                _copy_state(made, state)
                _rename(temporary, new, target)
            except BaseException:
                _unlink(temporary, target)
                raise


def _copy_state(made: int, state: os.stat_result) -> None:
    os.fchmod(made, stat.S_IMODE(state.st_mode) & 0o777)  # without set-user-ID and set-group-ID bits of the source
    os.utime(made, ns=(state.st_atime_ns, state.st_mtime_ns))


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
