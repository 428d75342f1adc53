"""The format of a store: a number, which says whether another version of penroot can read and write it.

It is the target of a symbolic link, which is made at once, whole and by one of several makers, and read by one system
call. Whoever opens a store looks at it first, a start too: layout.is_readable().
"""

from __future__ import annotations

import os

from enroot_py import __version__
from enroot_py.base.errors import ImageError
from enroot_py.store import layout

# What this version writes, the last of those that it reads: a store of an earlier one becomes one of this when it is
# written to. To be raised where what is there is not what earlier versions expect.
FORMAT = int(layout.FORMATS[-1])


def check(root: str, *, mark: bool) -> None:
    """Raise ImageError for a store whose format is not one of FORMATS; ``mark`` it as ours, as it is written to.

    One that has no mark is from before 1.0.
    """
    path = f"{root}/{layout.FORMAT}"
    try:
        given = os.readlink(path)
    except FileNotFoundError:
        if mark:
            try:
                os.symlink(str(FORMAT), path)
            except OSError:
                pass  # another has just made it; or the store is full or another's, and goes on having none
        return
    except OSError:
        given = "?"  # a file, or another thing: not ours
    if given in layout.FORMATS:
        if mark and given != str(FORMAT):
            _mark_anew(path)
        return
    later = given.isdecimal() and int(given) > FORMAT
    age = "a later penroot made" if later else "an earlier penroot made" if given.isdecimal() else "nobody knows"
    raise ImageError(
        f"the store {root} has format {given}, which {age}: penroot {__version__} reads {FORMAT}",
        hint=f"{'that penroot' if given.isdecimal() else 'remove the directory'}, or another place for this one: "
        "ENROOT_CACHE_PATH",
    )


def _mark_anew(path: str) -> None:
    """At once; where it fails the store is full or another's, and what is written to it says why."""
    from enroot_py.base import making

    try:
        making.symlink(str(FORMAT), path)
    except OSError:
        pass
