"""Whiteouts, opaque directories, and the merged view of lower directories, as overlayfs defines them.

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
    """Make a whiteout of ``name`` in an open directory; ``mtime`` is in nanoseconds. Raises OSError."""
    os.mknod(name, stat.S_IFCHR, os.makedev(0, 0), dir_fd=parent)
    os.utime(name, ns=(mtime, mtime), dir_fd=parent, follow_symlinks=False)


def is_opaque(directory: str) -> bool:
    try:
        return os.getxattr(directory, _OPAQUE, follow_symlinks=False) == b"y"
    except OSError:
        return False


def set_opaque(directory: int) -> None:
    """Mark an open directory as opaque: lower directories do not show through. Raises OSError."""
    os.setxattr(directory, _OPAQUE, b"y")


def is_plain(attribute: str) -> bool:
    """Return whether an image may set an attribute. Attributes such as security.selinux belong to the host."""
    return attribute.startswith("user.") and not is_command(attribute)


def is_command(attribute: str) -> bool:
    """Return whether an attribute controls overlayfs."""
    return attribute.startswith("user.overlay.")


# ---------------------------------------------------------------------------
# The merged view


@dataclass(frozen=True, slots=True)
class Shown:
    """A name in a stack of trees. ``layers`` has (number of the tree, path) for each tree with the name, top first."""

    layers: tuple[tuple[int, str], ...]
    status: os.stat_result


def look(lowerdirs: Sequence[str], path: str) -> Shown | None:
    """Return what overlayfs shows at ``path``, or None. The parents of ``path`` must not be symlinks."""
    if not lowerdirs:
        return None
    layers = tuple(enumerate(lowerdirs))
    status = os.stat(lowerdirs[0])
    for part in path.split("/"):
        if part in ("", "."):
            continue
        if not stat.S_ISDIR(status.st_mode):
            return None
        holders: list[tuple[int, str]] = []
        for number, directory in layers:
            candidate = f"{directory}/{part}"
            try:
                candidate_status = os.lstat(candidate)
            except FileNotFoundError:
                continue
            if is_whiteout(candidate_status) or holders and not stat.S_ISDIR(candidate_status.st_mode):
                break
            if not holders:
                status = candidate_status
            holders.append((number, candidate))
            if not stat.S_ISDIR(candidate_status.st_mode) or is_opaque(candidate):
                break
        if not holders:
            return None
        layers = tuple(holders)
    return Shown(layers, status)


def real_path(lowerdirs: Sequence[str], path: str) -> str | None:
    """Resolve every symlink of ``path`` in the merged view. Missing parts are kept. Return None for a loop."""
    for _ in range(MAX_SYMLINKS):
        resolved: list[str] = []
        redirected = None
        pending = [part for part in path.split("/") if part not in ("", ".")]
        for number, part in enumerate(pending):
            if part == "..":
                resolved = resolved[:-1]
                continue
            shown = look(lowerdirs, "/".join([*resolved, part]))
            if shown and stat.S_ISLNK(shown.status.st_mode):
                target = os.readlink(shown.layers[0][1])
                start = [] if target.startswith("/") else resolved
                redirected = "/".join([*start, target, *pending[number + 1 :]])
                break
            resolved.append(part)
        if redirected is None:
            return "/" + "/".join(resolved)
        path = redirected
    return None
