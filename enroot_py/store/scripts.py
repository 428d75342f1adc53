"""Put /etc/rc, /etc/environment and /etc/fstab into NAME/etc, where tools written for enroot read and edit them.

NAME is the directory of a container. A container over layers keeps its changes in NAME/upper. Therefore ``penroot
create`` copies the image's files to NAME/upper/etc, and makes NAME/etc a link to this directory.
"""

from __future__ import annotations

import os
import stat

from enroot_py.base.errors import PenrootError
from enroot_py.store import layout

_NAMES = ("rc", "environment", "fstab")


def copy(image: str, container: str) -> None:
    """Copy the files of the stored image in directory ``image`` to a container in the making. Raises OSError."""
    try:
        texts, mode, modified = _read(image)
    except (OSError, PenrootError):
        return  # /etc is a link in this image, or unsquashfs is missing: the container starts without copies
    etc = container + "/upper/etc"
    os.mkdir(etc)
    for name, text in texts.items():
        with open(f"{etc}/{name}", "wb") as f:
            f.write(os.fsencode(text))
        os.chmod(f"{etc}/{name}", 0o644)
        os.utime(f"{etc}/{name}", (modified, modified))
    os.chmod(etc, mode)
    os.utime(etc, (modified, modified))
    os.symlink("upper/etc", container + "/etc")


def _read(image: str) -> tuple[dict[str, str], int, float]:
    """Return the text of each file, and mode and time of /etc. Raises OSError, PenrootError."""
    file = f"{image}/{layout.SQUASHFS}"
    if os.path.exists(file):
        from enroot_py.store import unsquashfs

        return {name: unsquashfs.read(file, f"etc/{name}") for name in _NAMES}, 0o755, os.stat(image).st_mtime
    etc = f"{image}/{layout.HEAD}/{layout.TREE}/etc"
    state = os.lstat(etc)
    if not stat.S_ISDIR(state.st_mode):
        raise NotADirectoryError(etc)
    texts = {}
    for name in _NAMES:
        with open(os.open(f"{etc}/{name}", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as f:
            texts[name] = os.fsdecode(f.read())
    return texts, stat.S_IMODE(state.st_mode), state.st_mtime
