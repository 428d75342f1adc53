"""What is written down of a container over an image when it is made: the file ``.penroot`` in its directory.

It has a line ``image DIRECTORY`` or ``squashfs FILE``. An image or a program can put such a file into the root of
a container that is a plain directory; so a record repeats a random word that lies beside the containers, in
``.records``, where neither of them can read it. On the start path.
"""

from __future__ import annotations

import errno
import os
import stat

from enroot_py.base.fds import Fd

MARK = ".penroot"
_WORD = ".records"
_LARGEST = 64 << 10  # bytes of a record


def of(container: str) -> dict[str, str] | None:
    """What is written down of the container in a directory; None of a plain one. Raises OSError."""
    fields = read(f"{container}/{MARK}")
    word = fields.get("word")
    return fields if word and word == text(word_file(os.path.dirname(container))).strip() else None


def read(path: str) -> dict[str, str]:
    """What a record says, whoever wrote it. Raises OSError."""
    return dict(line.partition(" ")[::2] for line in text(path).splitlines())


def text(path: str) -> str:
    """The content of a small file; "" where there is none, or it is no regular file. Raises OSError."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as e:
        if e.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO):
            return ""
        raise
    with Fd(file) as fd:
        return os.fsdecode(os.read(fd, _LARGEST)) if stat.S_ISREG(os.fstat(fd).st_mode) else ""


def write(directory: str, data_path: str, source: str) -> None:
    """Write the record of a container that is made in ``directory``, for its place in ``data_path``. Raises OSError."""
    with open(f"{directory}/{MARK}", "w") as f:
        f.write(f"format 2\nword {_word(data_path)}\n{source}")


def word_file(data_path: str) -> str:
    """The file with the word of the records of a data path."""
    return f"{data_path}/{_WORD}"


def _word(data_path: str) -> str:
    """The word, made where there is none. Raises OSError."""
    from enroot_py.base import making

    path = word_file(data_path)
    while not (word := text(path).strip()):
        try:
            making.write(path, os.urandom(16).hex().encode() + b"\n", 0o644, replace=False)
        except FileExistsError:
            pass  # another process was quicker
    return word
