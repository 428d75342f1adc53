"""What overlayfs makes of trees: whiteouts, opaque directories, and what a stack of lower directories shows.

Source: the kernel's overlayfs documentation, "whiteouts and opaque directories" and "User xattr".
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass

MAX_SYMLINKS = 40  # path_resolution(7)
_OPAQUE = "user.overlay.opaque"


def is_whiteout(status: os.stat_result) -> bool:
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == 0


def make_whiteout(parent: int, name: bytes, mtime: int) -> None:
    """Make a whiteout of ``name``, with a time in nanoseconds, in an open directory. Raises OSError."""
    os.mknod(name, stat.S_IFCHR, os.makedev(0, 0), dir_fd=parent)
    os.utime(name, ns=(mtime, mtime), dir_fd=parent, follow_symlinks=False)


def is_opaque(directory: str) -> bool:
    try:
        return os.getxattr(directory, _OPAQUE, follow_symlinks=False) == b"y"
    except OSError:
        return False


def set_opaque(directory: int) -> None:
    """Hide what lower directories have in an open one. Raises OSError."""
    os.setxattr(directory, _OPAQUE, b"y")


def is_plain(attribute: str) -> bool:
    """Whether an image may give its files an attribute. Those of other classes, as security.selinux, are the host's."""
    return attribute.startswith("user.") and not is_command(attribute)


def is_command(attribute: str) -> bool:
    """Whether overlayfs obeys an attribute."""
    return attribute.startswith("user.overlay.")


# ---------------------------------------------------------------------------
# What a stack shows


@dataclass(frozen=True, slots=True)
class Shown:
    """One name in a stack of trees: the lower directories that hold it, top first, as (number, path)."""

    layers: tuple[tuple[int, str], ...]
    status: os.stat_result


def look(lowerdirs: Sequence[str], path: str) -> Shown | None:
    """What overlayfs shows at ``path``. No symlink is followed, so none may be among the parents."""
    if not lowerdirs:
        return None
    here = tuple(enumerate(lowerdirs))
    status = os.stat(lowerdirs[0])
    for part in path.split("/"):
        if part in ("", "."):
            continue
        if not stat.S_ISDIR(status.st_mode):
            return None
        holders: list[tuple[int, str]] = []
        for number, directory in here:
            candidate = f"{directory}/{part}"
            try:
                this = os.lstat(candidate)
            except FileNotFoundError:
                continue
            if is_whiteout(this) or holders and not stat.S_ISDIR(this.st_mode):
                break
            if not holders:
                status = this
            holders.append((number, candidate))
            if not stat.S_ISDIR(this.st_mode) or is_opaque(candidate):
                break
        if not holders:
            return None
        here = tuple(holders)
    return Shown(here, status)


def real_path(lowerdirs: Sequence[str], path: str) -> str | None:
    """``path`` with every symlink resolved in the view; what is missing is kept. None for a loop."""
    for _ in range(MAX_SYMLINKS):
        done: list[str] = []
        again = None
        pending = [part for part in path.split("/") if part not in ("", ".")]
        for number, part in enumerate(pending):
            if part == "..":
                done = done[:-1]
                continue
            shown = look(lowerdirs, "/".join([*done, part]))
            if shown and stat.S_ISLNK(shown.status.st_mode):
                target = os.readlink(shown.layers[0][1])
                start = [] if target.startswith("/") else done
                again = "/".join([*start, target, *pending[number + 1 :]])
                break
            done.append(part)
        if again is None:
            return "/" + "/".join(done)
        path = again
    return None
