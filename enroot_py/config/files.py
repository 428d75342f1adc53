"""Read settings files, and the ``NAME.d`` directories of the system, the user and the installation.

Missing files are skipped. An unreadable file is an error: skipping it could lose a site's mounts and hooks.
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

_MAX_FILE_BYTES = 16 << 20
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
    """Raise ConfigError unless this is /dev/null, or a regular file that is not world-writable."""
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
        except OSError as e:  # an I/O error
            raise _unreadable(path, e) from e


def named(path: str) -> bytes | None:
    """Return the content of a file that the user named, or None if it is missing. Raises ConfigError, OSError.

    In a world-writable directory, the user or root must own the file. In other directories, any user may own it, so
    that a team can share files.
    """
    if not any(map(_is_world_writable, {os.path.dirname(path), os.path.dirname(os.path.realpath(path))})):
        return content(path)
    try:
        fd = trusted.file(path)
    except FileNotFoundError:
        return None
    with open(fd, "rb") as file:
        return limited(file, path)


def _is_world_writable(directory: str) -> bool:
    try:
        return bool(os.stat(directory).st_mode & stat.S_IWOTH)
    except OSError:
        return False  # reading the file reports the error


def limited(file: BinaryIO, path: str) -> bytes:
    """Return the content of an open file, pipe or device. Raises OSError, and ConfigError if it is too large."""
    info = os.fstat(file.fileno())
    if stat.S_ISREG(info.st_mode):
        check_regular(info, path)
        return file.read()
    data = file.read(_MAX_FILE_BYTES + 1)
    if len(data) > _MAX_FILE_BYTES:
        raise _too_large(path)
    return data


def check_regular(info: os.stat_result, path: str) -> None:
    """Raise ConfigError unless this is a regular file that is not too large."""
    if not stat.S_ISREG(info.st_mode):
        raise _irregular(path)
    if info.st_size > _MAX_FILE_BYTES:
        raise _too_large(path)


def _irregular(path: str) -> ConfigError:
    return ConfigError(f"{path} {trusted.IRREGULAR}", hint=_TEXT)


def _too_large(path: str) -> ConfigError:
    return ConfigError(f"{path} is larger than {_MAX_FILE_BYTES >> 20} MiB", hint=_TEXT)


def path_in(cwd: str, name: str) -> str:
    """Return ``name`` if it is an absolute path, else the path of ``name`` in ``cwd``, without a ./ between them."""
    return f"{cwd.rstrip('/')}/{name.removeprefix('./')}" if not name.startswith("/") else name


def script(path: str) -> bytes:
    """Read a file that the user named: a regular file, /dev/null, or the pipe of ``<(command)``.

    Raises ConfigError, OSError.
    """
    fd = os.open(path, _READ)
    if os.path.isdir(path) or not path.startswith(_PIPES) and os.path.realpath(path) != os.devnull:
        trusted.regular(fd, path)
    with open(fd, "rb") as file:
        os.set_blocking(fd, True)
        return limited(file, path)


def names(directory: str) -> list[str]:
    """Return the names in ``directory``, or [] if it is missing or cannot be reached. Raises ConfigError."""
    try:
        listed = os.listdir(directory)
    except OSError as e:
        # Do not ignore an unreadable directory: it may contain settings.
        if isinstance(e, PermissionError) and os.path.isdir(directory):
            raise _unreadable(directory, e) from e
        return []
    if listed:
        check(directory)
    return listed


def check(directory: str) -> None:
    """Raise ConfigError if other users can write to a directory: the files in it decide which programs run.

    The owner of this installation of penroot, such as a site's account for software, may own the directory.
    """
    if directory.startswith(_OURS):
        return
    try:
        trusted.place(directory, closed_to=0o002)
    except PermissionError as e:
        if e.errno != errno.EPERM or e.filename == directory and _is_installers(directory):
            return
        hint = "only you or root may own it and have write access: chown, chmod go-w"
        raise ConfigError(f"{directory} {e.strerror}: its files are not trusted", hint=hint) from e
    except OSError:
        return  # the directory was removed


def _is_installers(directory: str) -> bool:
    """Return whether a directory belongs to the owner of this installation of penroot, and is not world-writable."""
    info = os.stat(directory)
    return info.st_uid == os.stat(LIBRARY).st_uid and not info.st_mode & 0o002


def refuse_unless_absent(path: str, error: OSError | UnicodeDecodeError) -> None:
    """Raise ConfigError for a text file that could not be read.

    Ignore the error if the file is missing, or if its directory is inaccessible, as HOME may be under `srun --uid`.
    """
    if not isinstance(error, OSError) or os.path.exists(path):
        raise ConfigError(f"{path}: {getattr(error, 'strerror', None) or 'is not UTF-8'}") from error


def _unreadable(path: str, error: OSError) -> ConfigError:
    hint = "make the file readable, or move it away"
    return ConfigError(f"cannot read {path}: {error.strerror}", hint=hint)


def fragments(directories: tuple[str, ...], suffix: str, shipped: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield (origin, text) of each file whose name ends with ``suffix``: directory by directory, sorted by name.

    The first directory is the system's. Its files replace penroot's own files of the same name, so that a site can
    change a default. ``shipped`` has penroot's own files: name -> text. Names that begin with a dot are skipped,
    because editors leave such files.
    """
    for index, directory in enumerate(directories):
        present = {name for name in names(directory) if name.endswith(suffix) and not name.startswith(".")}
        for name in sorted(present | set(shipped) if index == 0 else present):
            if name in present:
                path = f"{directory}/{name}"
                if (data := content(path)) is not None:
                    yield path, os.fsdecode(data)
            else:
                yield name, shipped[name]
