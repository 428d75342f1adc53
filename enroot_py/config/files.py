"""Files of settings, and the ``NAME.d`` directories of the system and the user, merged with what we ship.

What is not there says nothing. What is there and cannot be read is an error: a start
without a site's mounts and hooks would be another one than the site meant.
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
_PIPES = ("/dev/fd/", "/dev/stdin", "/proc/self/fd/")
_OURS = LIBRARY + "/"


def opened(path: str) -> BinaryIO | None:
    """The file ``path``, or None where there is none. Raises ConfigError."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as e:
        if isinstance(e, (FileNotFoundError, NotADirectoryError)) and not os.path.islink(path):
            return None
        raise _unreadable(path, e) from e
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode) and not mode & stat.S_IWOTH or os.path.realpath(path) == os.devnull:
        return open(fd, "rb")
    os.close(fd)
    if stat.S_ISDIR(mode):
        raise _unreadable(path, IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR)))
    if stat.S_ISREG(mode):
        raise ConfigError(f"{path} can be written by others (mode {mode & 0o7777:o})", hint=f"chmod o-w {path}")
    raise ConfigError(f"{path} is not a regular file", hint="a file of settings is text")


def content(path: str) -> bytes | None:
    """What is in the file ``path``, or None where there is none. Raises ConfigError."""
    file = opened(path)
    if file is None:
        return None
    with file:
        return limited(file, path)


def limited(file: BinaryIO, path: str) -> bytes:
    """What is in a file of text that people write: nobody writes so much that it fills the memory."""
    regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
    if not regular or os.fstat(file.fileno()).st_size <= _LARGEST:
        data = file.read() if regular else file.read(_LARGEST + 1)
        if len(data) <= _LARGEST:
            return data
    raise ConfigError(f"{path} is larger than {_LARGEST >> 20} MiB", hint="it is to be a file of text")


def check_regular(path: str) -> None:
    """Raises ConfigError for what no text is in, OSError where there is nothing."""
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode) or found.st_size > _LARGEST:
        raise ConfigError(f"{path} is not a regular file of up to {_LARGEST >> 20} MiB", hint="it is to be text")


def script(path: str) -> bytes:
    """A file that the user has named: regular, or a pipe of a shell's own, as of ``<(command)``. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode) and os.path.realpath(path) != os.devnull:
            if os.path.isdir(path) or not path.startswith(_PIPES):
                raise OSError(errno.EINVAL, "is not a regular file", path)
            os.set_blocking(fd, True)
        return limited(file, path)


def names(directory: str) -> list[str]:
    """What is in ``directory``: nothing where there is none. Raises ConfigError."""
    try:
        found = os.listdir(directory)
    except OSError as e:
        # In a place that is closed to us, as another user's home, it is not known to be there.
        if isinstance(e, PermissionError) and os.path.isdir(directory):
            raise _unreadable(directory, e) from e
        return []
    if found:
        check(directory)
    return found


def check(directory: str) -> None:
    """Raises ConfigError for a directory whose files others may have written: they decide what runs."""
    if directory.startswith(_OURS):
        return
    try:
        trusted.place(directory, closed_to=0o002)
    except PermissionError as e:
        if e.errno != errno.EPERM or e.filename == directory and _is_installers(directory):
            return
        hint = "only you and root may own it and write to it"
        raise ConfigError(f"{directory} {e.strerror}: what it says is not believed", hint=hint) from e
    except OSError:
        return  # it has gone


def _is_installers(directory: str) -> bool:
    """Whether it belongs, and to him alone, to whoever has installed penroot: as a site's account for software."""
    found = os.stat(directory)
    return found.st_uid == os.stat(__file__).st_uid and not found.st_mode & 0o002


def refuse_unless_absent(path: str, error: OSError | UnicodeDecodeError) -> None:
    """Raise ConfigError for a file of text that could not be read, unless there is none.

    Or it is in a place that is closed to us, as the home in the environment of `srun --uid`.
    """
    if not isinstance(error, OSError) or os.path.exists(path):
        raise ConfigError(f"{path}: {getattr(error, 'strerror', None) or 'is not UTF-8'}") from error


def _unreadable(path: str, error: OSError) -> ConfigError:
    hint = "it would change what is done: let it be read, or move it away"
    return ConfigError(f"cannot read {path}: {error.strerror}", hint=hint)


def fragments(directories: tuple[str, ...], suffix: str, shipped: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield (origin, text) of each ``*.suffix`` file, by name, one directory after the other.

    A file of the first directory (the system's) replaces a shipped one of the
    same name, so that a site changes a default without deleting ours.
    """
    for index, directory in enumerate(directories):
        found = {name for name in names(directory) if name.endswith(suffix)}
        for name in sorted(found | set(shipped) if index == 0 else found):
            if name in found:
                path = f"{directory}/{name}"
                if (data := content(path)) is not None:
                    yield path, os.fsdecode(data)
            else:
                yield name, shipped[name]
