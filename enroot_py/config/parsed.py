"""A cache of parsed files, if it can be trusted: settings of penroot.yaml, devices of CDI.

Importing a parser costs more than a start. So what it made of a file is kept in a directory of the
user's own, and believed while the file is the same one: device, inode, size, times of change.
Nobody else may be able to write there. On the start path.
"""

from __future__ import annotations

import marshal
import os
from _collections_abc import Callable

from enroot_py.base import trusted
from enroot_py.config import files

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypeVar

    Parsed = TypeVar("Parsed")
    State = tuple[str, str, int, int, int, int, int]

_FORM = "penroot-parsed 1"
# A change so soon after a parse may not show in the file's times.
_SETTLED = 100_000_000  # ns


def read(path: str, directory: str, parse: Callable[[str, bytes], Parsed]) -> Parsed | None:
    """Return the result of ``parse`` for the file ``path``, of plain types, or None if there is no file.

    It is kept in ``directory``, or nowhere if that is "". Raises ConfigError for a file that
    cannot be read, and what ``parse`` raises.
    """
    file = files.opened(path)
    if file is None:
        return None
    with file:
        state = _state(path, os.fstat(file.fileno()))
        cached = f"{directory}/{path.replace('/', '%')[-200:]}"  # `state` tells those apart that share their end
        kept = _kept(cached, directory) if directory else ()
        if len(kept) == 2 and kept[0] == state:
            parsed: Parsed = kept[1]
        else:
            parsed = parse(path, files.limited(file, path))
            if directory:
                _keep(cached, directory, state, parsed)
    return parsed


def _state(path: str, info: os.stat_result) -> State:
    return _FORM, path, info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns


def _kept(cached: str, directory: str) -> tuple[Any, ...]:
    """Return state and content of a cache file that only this user can have written, or nothing."""
    try:
        if os.path.islink(directory) or trusted.place(directory, strict=True).st_uid != os.geteuid():
            return ()
        with open(trusted.file(cached), "rb") as file:
            kept = marshal.load(file)
    except (OSError, EOFError, ValueError, TypeError):
        return ()
    return kept if isinstance(kept, tuple) else ()


def _keep(cached: str, directory: str, state: State, parsed: Any) -> None:
    """Write the cache atomically, unless the directory belongs to another user."""
    import time

    from enroot_py.base import making

    if time.time_ns() - max(state[-2:]) < _SETTLED:
        return
    try:
        data = marshal.dumps((state, parsed))
        if trusted.place(directory, make=True, strict=True).st_uid == os.geteuid():
            making.write(cached, data, 0o600)
    except (OSError, ValueError):  # of types that are not plain
        return  # the next start parses it again
