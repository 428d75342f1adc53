"""The format of a store: a number, which says whether another version of penroot can read and write it.

It is the target of a symbolic link, which is made at once, whole and by one of several makers, and read by one system
call. Who writes to a store, or looks through all of it, looks at it first; a start, which reads one image, does not:
a later format gives its files other names, and an earlier penroot finds no image there.
"""

from __future__ import annotations

import os

from enroot_py import __version__
from enroot_py.base.errors import ImageError
from enroot_py.store import layout

# To be raised, with other names in layout.py, where what is there is not what earlier versions expect.
FORMAT = 1
READ = (1,)  # what this version reads and writes


def check(root: str, *, mark: bool) -> None:
    """Raise ImageError for a store of a format that is not READ; ``mark`` one that has none yet, as before 1.0."""
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
    if given in map(str, READ):
        return
    later = given.isdecimal() and int(given) > FORMAT
    age = "a later penroot made" if later else "an earlier penroot made" if given.isdecimal() else "nobody knows"
    raise ImageError(
        f"the store {root} has format {given}, which {age}: penroot {__version__} reads {FORMAT}",
        hint=f"{'that penroot' if given.isdecimal() else 'remove the directory'}, or another place for this one: "
        "ENROOT_CACHE_PATH",
    )
