"""Records of containers: the file ``.penroot`` in the directory of a container over an image.

A record has a line ``image DIRECTORY`` or ``squashfs FILE``. An image or a program could write such a file into the
root of a plain-directory container. Therefore each record repeats the random word in the file ``.records`` beside the
containers, outside of their root file systems. Container starts import this module.
"""

from __future__ import annotations

import errno
import os
import stat

from enroot_py.base.fds import Fd

MARK = ".penroot"
_WORD = ".records"
_MAX_RECORD_BYTES = 64 << 10


def of(container: str) -> dict[str, str] | None:
    """Return the record of a container. Return None if the record is missing or has a wrong word. Raises OSError."""
    fields = read(f"{container}/{MARK}")
    word = fields.get("word")
    return fields if word and word == text(word_file(os.path.dirname(container))).strip() else None


def read(path: str) -> dict[str, str]:
    """Return the fields of a record without checking its word. Raises OSError."""
    return dict(line.partition(" ")[::2] for line in text(path).splitlines())


def text(path: str) -> str:
    """Return the content of a small file, or "" if it is missing or not a regular file. Raises OSError."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as e:
        if e.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO):
            return ""
        raise
    with Fd(file) as fd:
        return os.fsdecode(os.read(fd, _MAX_RECORD_BYTES)) if stat.S_ISREG(os.fstat(fd).st_mode) else ""


def write(directory: str, data_path: str, source: str) -> None:
    """Write the record of a container in the making, which will be moved to ``data_path``. Raises OSError."""
    with open(f"{directory}/{MARK}", "w") as f:
        f.write(f"format 2\nword {_word(data_path)}\n{source}")


def word_file(data_path: str) -> str:
    """Return the file with the word for all records in a data path."""
    return f"{data_path}/{_WORD}"


def _word(data_path: str) -> str:
    """Return the word of a data path, and create it if missing. Raises OSError."""
    from enroot_py.base import making

    path = word_file(data_path)
    while not (word := text(path).strip()):
        try:
            making.write(path, os.urandom(16).hex().encode() + b"\n", 0o644, replace=False)
        except FileExistsError:
            pass  # another process was quicker
    return word
