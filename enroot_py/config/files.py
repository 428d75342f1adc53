"""Read files of settings, and the ``NAME.d`` directories of the system, the user and the installation.

A file that is not there is passed over. One that cannot be read is an error: a start
without a site's mounts and hooks is not what the site wants.
"""

from __future__ import annotations

import errno
import os
import stat
from _collections_abc import Iterator, Mapping

from enroot_py import LIBRARY
from enroot_py.base import trusted
from enroot_py.base.errors import ConfigError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import BinaryIO

_LARGEST = 16 << 20  # bytes
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_TEXT = "use a text file"
_PIPES = ("/dev/fd/", "/dev/stdin", "/proc/self/fd/")
_OURS = LIBRARY + "/"


def opened(path: str) -> BinaryIO | None:
    """Open the file ``path``, or return None if it does not exist. Raises ConfigError."""
    try:
        fd = os.open(path, _READ)
    except OSError as e:
        if isinstance(e, (FileNotFoundError, NotADirectoryError)) and not os.path.islink(path):
            return None
        raise _unreadable(path, e) from e
    try:
        _check_settings(os.fstat(fd), path)
    except ConfigError:
        os.close(fd)
        raise
    return open(fd, "rb")


def _check_settings(info: os.stat_result, path: str) -> None:
    """Raise ConfigError unless this is a file of settings that no other user can write."""
    if stat.S_ISDIR(info.st_mode):
        raise _unreadable(path, IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR)))
    if not stat.S_ISREG(info.st_mode):
        if os.path.realpath(path) != os.devnull:
            raise _irregular(path)
    elif info.st_mode & stat.S_IWOTH:
        message = f"{path} can be written by others (mode {stat.S_IMODE(info.st_mode):o})"
        raise ConfigError(message, hint=f"chmod o-w {path}")


def content(path: str) -> bytes | None:
    """Return the content of the file ``path``, or None if it does not exist. Raises ConfigError."""
    file = opened(path)
    if file is None:
        return None
    with file:
        try:
            return limited(file, path)
        except OSError as e:  # the file system fails
            raise _unreadable(path, e) from e


def named(path: str) -> bytes | None:
    """Return the content of a file that the user named. In a world-writable directory, the user or root must own it.

    Elsewhere a team may have its files. Raises ConfigError, OSError.
    """
    if not any(map(_is_everybodys, {os.path.dirname(path), os.path.dirname(os.path.realpath(path))})):
        return content(path)
    try:
        fd = trusted.file(path)
    except FileNotFoundError:
        return None
    with open(fd, "rb") as file:
        return limited(file, path)


def _is_everybodys(directory: str) -> bool:
    try:
        return bool(os.stat(directory).st_mode & stat.S_IWOTH)
    except OSError:
        return False  # reading the file reports the error


def limited(file: BinaryIO, path: str) -> bytes:
    """Return the content of a text file, pipe or device. Raises ConfigError, OSError."""
    info = os.fstat(file.fileno())
    if stat.S_ISREG(info.st_mode):
        check_regular(info, path)
        return file.read()
    data = file.read(_LARGEST + 1)
    if len(data) > _LARGEST:
        raise _too_large(path)
    return data


def check_regular(info: os.stat_result, path: str) -> None:
    """Raise ConfigError for a file that is not text or is too large."""
    if not stat.S_ISREG(info.st_mode):
        raise _irregular(path)
    if info.st_size > _LARGEST:
        raise _too_large(path)


def _irregular(path: str) -> ConfigError:
    return ConfigError(f"{path} {trusted.IRREGULAR}", hint=_TEXT)


def _too_large(path: str) -> ConfigError:
    return ConfigError(f"{path} is larger than {_LARGEST >> 20} MiB", hint=_TEXT)


def path_in(cwd: str, name: str) -> str:
    """Return the path of a name in a directory."""
    return f"{cwd.rstrip('/')}/{name.removeprefix('./')}" if not name.startswith("/") else name


def script(path: str) -> bytes:
    """Open a file that the user has named: a regular file, or a pipe of ``<(command)``. Raises OSError."""
    fd = os.open(path, _READ)
    if os.path.isdir(path) or not path.startswith(_PIPES) and os.path.realpath(path) != os.devnull:
        trusted.regular(fd, path)
    with open(fd, "rb") as file:
        os.set_blocking(fd, True)
        return limited(file, path)


def names(directory: str) -> list[str]:
    """Return the names in ``directory``, or none if it does not exist. Raises ConfigError."""
    try:
        listed = os.listdir(directory)
    except OSError as e:
        # An unreadable directory, such as another user's home, may contain anything.
        if isinstance(e, PermissionError) and os.path.isdir(directory):
            raise _unreadable(directory, e) from e
        return []
    if listed:
        check(directory)
    return listed


def check(directory: str) -> None:
    """Raise ConfigError for a directory that others can write to: its files decide what runs."""
    if directory.startswith(_OURS):
        return
    try:
        trusted.place(directory, closed_to=0o002)
    except PermissionError as e:
        if e.errno != errno.EPERM or e.filename == directory and _is_installers(directory):
            return
        hint = "only you or root may own it and have write access: chown, chmod go-w"
        raise ConfigError(f"{directory} {e.strerror}: the file is not trusted", hint=hint) from e
    except OSError:
        return  # it has gone


def _is_installers(directory: str) -> bool:
    """Whether only the owner of the installation can write to it, for example a site's software account."""
    info = os.stat(directory)
    return info.st_uid == os.stat(LIBRARY).st_uid and not info.st_mode & 0o002


def refuse_unless_absent(path: str, error: OSError | UnicodeDecodeError) -> None:
    """Raise ConfigError for a text file that could not be read.

    Not for one that is missing, or in a place that is closed to us, as the home in the environment of `srun --uid`.
    """
    if not isinstance(error, OSError) or os.path.exists(path):
        raise ConfigError(f"{path}: {getattr(error, 'strerror', None) or 'is not UTF-8'}") from error


def _unreadable(path: str, error: OSError) -> ConfigError:
    hint = "make the file readable, or move it away"
    return ConfigError(f"cannot read {path}: {error.strerror}", hint=hint)


def fragments(directories: tuple[str, ...], suffix: str, shipped: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield (origin, text) of each ``*.suffix`` file, sorted by name, one directory after the other.

    A file of the first directory, the system's, replaces a shipped one of the
    same name, so that a site can change a default. Editors leave files that begin with a dot.
    """
    for index, directory in enumerate(directories):
        there = {name for name in names(directory) if name.endswith(suffix) and not name.startswith(".")}
        for name in sorted(there | set(shipped) if index == 0 else there):
            if name in there:
                path = f"{directory}/{name}"
                if (data := content(path)) is not None:
                    yield path, os.fsdecode(data)
            else:
                yield name, shipped[name]
