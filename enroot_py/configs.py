"""Files of settings, and the ``NAME.d`` directories of the system and the user, merged with what we ship.

What is not there says nothing. What is there and cannot be read is an error: a start
without a site's mounts and hooks would be another one than the site meant.
"""

import os
from _collections_abc import Iterator, Mapping

from enroot_py.errors import ConfigError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import BinaryIO


def opened(path: str) -> "BinaryIO | None":
    """The file ``path``, or None where there is none. Raises ConfigError."""
    try:
        return open(path, "rb")
    except OSError as e:
        if isinstance(e, (FileNotFoundError, NotADirectoryError)) and not os.path.islink(path):
            return None
        raise _unreadable(path, e) from e


def names(directory: str) -> "list[str]":
    """What is in ``directory``: nothing where there is none. Raises ConfigError."""
    try:
        return os.listdir(directory)
    except OSError as e:
        # In a place that is closed to us, as another user's home, it is not known to be there.
        if isinstance(e, PermissionError) and os.path.isdir(directory):
            raise _unreadable(directory, e) from e
        return []


def refuse_unless_absent(path: str, error: "OSError | UnicodeDecodeError") -> None:
    """Raise ConfigError for a file of text that could not be read, unless there is none.

    Or it is in a place that is closed to us, as the home in the environment of `srun --uid`.
    """
    if not isinstance(error, OSError) or os.path.exists(path):
        raise ConfigError(f"{path}: {getattr(error, 'strerror', None) or 'is not UTF-8'}") from error


def _unreadable(path: str, error: OSError) -> ConfigError:
    hint = "it would change what is done: let it be read, or move it away"
    return ConfigError(f"cannot read {path}: {error.strerror}", hint=hint)


def fragments(directories: "tuple[str, ...]", suffix: str, shipped: "Mapping[str, str]") -> "Iterator[tuple[str, str]]":
    """Yield (origin, text) of each ``*.suffix`` file, by name, one directory after the other.

    A file of the first directory (the system's) replaces a shipped one of the
    same name, so that a site changes a default without deleting ours.
    """
    for index, directory in enumerate(directories):
        found = {name for name in names(directory) if name.endswith(suffix)}
        for name in sorted(found | set(shipped) if index == 0 else found):
            if name in found:
                path = f"{directory}/{name}"
                if (file := opened(path)) is not None:
                    with file:
                        yield path, os.fsdecode(file.read())
            else:
                yield name, shipped[name]
