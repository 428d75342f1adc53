"""Cache the parsed content of files: penroot.yaml and CDI specifications.

Importing a parser takes longer than a start, so the result is cached in a private directory of the user. A cached
result is used only if device, inode, size, mtime and ctime of the file are unchanged, and if no other user can write to
the cache. A start may import this module, so it imports nothing slow.
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
# Do not cache a file younger than this: a second change within the clock's granularity would leave mtime unchanged.
_MIN_AGE_NS = 100_000_000


def read(path: str, directory: str, parse: Callable[[str, bytes], Parsed]) -> Parsed | None:
    """Return the result of ``parse`` for the file ``path``, or None if the file does not exist.

    The result must consist of types that marshal can write. It is cached in ``directory`` unless ``directory`` is "".
    Raises ConfigError for an unreadable file, and the errors of ``parse``.
    """
    file = files.opened(path)
    if file is None:
        return None
    with file:
        state = _state(path, os.fstat(file.fileno()))
        cached = f"{directory}/{path.replace('/', '%')[-200:]}"  # cut if long; `state` has the whole path
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
    """Return state and content of a cache file. Return () if another user could have written it, or it is damaged."""
    try:
        if os.path.islink(directory) or trusted.place(directory, strict=True).st_uid != os.geteuid():
            return ()
        with open(trusted.file(cached), "rb") as file:
            kept = marshal.load(file)
    except (OSError, EOFError, ValueError, TypeError):
        return ()
    return kept if isinstance(kept, tuple) else ()


def _keep(cached: str, directory: str, state: State, parsed: Any) -> None:
    """Write the cache atomically, unless the file has just changed or the directory belongs to another user."""
    import time

    from enroot_py.base import making

    if time.time_ns() - max(state[-2:]) < _MIN_AGE_NS:
        return
    try:
        data = marshal.dumps((state, parsed))
        if trusted.place(directory, make=True, strict=True).st_uid == os.geteuid():
            making.write(cached, data, 0o600)
    except (OSError, ValueError):  # marshal refuses a type, or the directory is not writable
        return  # the next start parses the file again
