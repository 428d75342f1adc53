"""Check the format number of a store, which decides which versions of penroot can read and write the store.

The number is the target of a symbolic link, because a link is created atomically and read by one system call. Every
command, even a start, checks the number before it uses a store: layout.is_readable().
"""

from __future__ import annotations

import os

from enroot_py import __version__
from enroot_py.base.errors import ImageError
from enroot_py.store import layout

# This version writes the last of FORMATS. Writing to a store with an older format upgrades the store. Add a number to
# FORMATS with each change after which earlier versions cannot read new files.
FORMAT = int(layout.FORMATS[-1])


def check(root: str, *, mark: bool) -> None:
    """Raise ImageError for a store whose format is not one of FORMATS.

    Use ``mark`` before writing to the store: it gives the store the format of this version. Stores before 1.0 have no
    format.
    """
    path = f"{root}/{layout.FORMAT}"
    try:
        number = os.readlink(path)
    except FileNotFoundError:
        if mark:
            try:
                os.symlink(str(FORMAT), path)
            except OSError:
                pass  # another process was faster, or the store is full or not writable
        return
    except OSError:
        number = "?"  # not a symbolic link
    if number in layout.FORMATS:
        if mark and number != str(FORMAT):
            _upgrade(path)
        return
    is_later = number.isdecimal() and int(number) > FORMAT
    age = "a later penroot made" if is_later else "an earlier penroot made" if number.isdecimal() else "is unknown"
    raise ImageError(
        f"the store {root} has format {number}, which {age}: penroot {__version__} reads {FORMAT}",
        hint=f"{'use that penroot' if number.isdecimal() else 'remove the directory'}, or set ENROOT_CACHE_PATH to "
        "another directory",
    )


def _upgrade(path: str) -> None:
    """Replace the format number. A failure is ignored: the next write to the store reports the cause."""
    from enroot_py.base import making

    try:
        making.symlink(str(FORMAT), path)
    except OSError:
        pass
