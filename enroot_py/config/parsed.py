"""penroot.yaml as a start reads it: the result of the last parse, where that can be trusted.

Importing yaml costs more than a start. So what a file said is kept in a directory of the
user's own, in his runtime directory, and believed while the file is the same one: device,
inode, size, times of change. Nobody else may be able to write there. On the start path.
"""

from __future__ import annotations

import os
from _collections_abc import Iterator

from enroot_py.base import trusted
from enroot_py.config import files

TYPE_CHECKING = False
if TYPE_CHECKING:
    Entries = list[tuple[str, int, str]]

_FORM = "penroot-settings 1"
# A change so soon after a parse may not show in the file's times.
_SETTLED = 100_000_000  # ns


def read(path: str, directory: str) -> Entries:
    """(variable, line, text) of each setting of the file ``path``. Raises ConfigError."""
    f = files.opened(path)
    if f is None:
        return []
    with f:
        now = _state(path, os.fstat(f.fileno()))
        cached = f"{directory}/{path.replace('/', '%')[-200:]}"  # `now` tells those apart that share their end
        kept = _trusted(cached, directory)
        if kept is not None and kept[:1] == [now]:
            return list(_entries(kept[1:]))
        from enroot_py.config import yaml

        found = yaml.parse(path, files.limited(f, path))
        _keep(cached, directory, now, found)
        return found


def _state(path: str, s: os.stat_result) -> str:
    return f"{_FORM} {s.st_dev} {s.st_ino} {s.st_size} {s.st_mtime_ns} {s.st_ctime_ns} {path}"


def _trusted(cached: str, directory: str) -> list[str] | None:
    """The records of a cache that nobody but this user can have written."""
    try:
        if os.path.islink(directory) or trusted.place(directory, strict=True).st_uid != os.geteuid():
            return None
        with open(trusted.file(cached), "rb") as f:
            return os.fsdecode(f.read()).split("\0")[:-1]
    except OSError:
        return None


def _entries(records: list[str]) -> Iterator[tuple[str, int, str]]:
    for at in range(0, len(records) - 2, 3):
        yield records[at], int(records[at + 1]), records[at + 2]


def _keep(cached: str, directory: str, now: str, found: Entries) -> None:
    """Write the cache, whole or not at all; a place that is not ours is left alone."""
    import time

    changed = max(map(int, now.split(" ")[5:7]))
    if time.time_ns() - changed < _SETTLED or any("\0" in text for _, _, text in found):
        return
    records = [now, *(word for key, line, text in found for word in (key, str(line), text))]
    temporary = f"{cached}.{os.getpid()}"
    try:
        if trusted.place(directory, make=True, strict=True).st_uid != os.geteuid():
            return
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(fd, "wb") as f:
            f.write(b"".join(os.fsencode(record) + b"\0" for record in records))
        os.rename(temporary, cached)
    except OSError:
        return  # the next start parses it again
