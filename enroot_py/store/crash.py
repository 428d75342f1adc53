"""Detect layers and images that a crash of the node truncated, and use only intact ones.

An import does not wait for the disk, because this would double its time. It writes a mark, the file ``boot``, with the
node's boot ID and checksums of the files beside the mark. If a process finds another boot ID in a mark, the node may
have crashed. The process checks the layer or image against its checksums. If they match, it renames the mark to
``checked``. Other users cannot rename marks in a store that root has made readable for all. So imports by root, and
imports of an image as one file, call syncfs(2) and rename the mark at once. Container starts import this module.
"""

from __future__ import annotations

import errno
import os

from enroot_py.base import linux, log
from enroot_py.base.fds import Fd
from enroot_py.store import layout


def mark(directory: str) -> None:
    """Mark a layer or an image as written during this boot. Raises OSError."""
    with open(f"{directory}/{layout.BOOT}", "w") as f:
        f.writelines((linux.boot_id() + "\n", *_checksums(directory)))


def is_whole(directory: str) -> bool:
    """Return whether a layer or an image exists and has no mark of another boot."""
    try:
        with open(f"{directory}/{layout.BOOT}", errors="replace") as f:
            return f.readline().rstrip("\n") == linux.boot_id()
    except FileNotFoundError:
        return os.path.isdir(directory)


def is_usable(image: str) -> bool:
    """Return whether an image exists and is intact. If its mark has another boot ID, this reads all its files."""
    if is_whole(image):
        return True
    if not os.path.isdir(image):
        return False
    log.info(f"{image} was perhaps not completely on the disk when the node went down: checking it")
    if not _survived(image):
        return False
    layers = layout.layers_of(image)
    if not all(is_whole(layer) or os.path.isdir(layer) and _survived(layer) for layer in layers):
        return False
    _unmark(image, *layers)
    return True


def keep_or_drop(directory: str, aside: str) -> None:
    """Keep a layer or an image from another boot if intact, else move it to ``aside``. Raises OSError."""
    if _survived(directory):
        _unmark(directory)
        return
    log.warn(f"{directory} was damaged when the node went down: making it again")
    os.rename(directory, aside)


def settle(image: str) -> None:
    """Write the store to the disk, and mark an image and its layers as checked. Raises OSError."""
    with Fd(os.open(image, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as fd:
        linux.syncfs(fd)
    _unmark(image, *layout.layers_of(image))


def _unmark(*directories: str) -> None:
    for directory in directories:
        try:
            os.rename(f"{directory}/{layout.BOOT}", f"{directory}/{layout.CHECKED}")
        except OSError as e:  # another process was faster; or the store is read-only, and every start checks again
            if e.errno not in (errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS):
                raise


def _survived(directory: str) -> bool:
    """Return whether a layer or an image is unchanged since it was published."""
    from enroot_py.store import index

    if changed_files(directory):
        return False
    if os.path.exists(f"{directory}/{layout.SQUASHFS}"):
        return is_unchanged(directory)
    is_layer = os.path.isdir(f"{directory}/{layout.TREE}")
    return next(index.differences(directory if is_layer else f"{directory}/{layout.HEAD}"), None) is None


def is_unchanged(image: str) -> bool:
    """Return whether the squashfs file of an image is unchanged since it was written. Raises OSError."""
    from enroot_py.store import squashfs

    with open(f"{image}/{layout.SUM}") as f:
        return f.read() == squashfs.checksum(f"{image}/{layout.SQUASHFS}")


def changed_files(directory: str) -> list[str]:
    """Return the files beside the tree that have changed since the layer or image was published."""
    for name in (layout.BOOT, layout.CHECKED):
        try:
            with open(f"{directory}/{name}", errors="replace") as f:
                before = f.read().splitlines()[1:]
                now = "".join(_checksums(directory)).splitlines()
        except FileNotFoundError:
            continue
        return sorted({line.rpartition(" ")[0] for line in set(before) ^ set(now)})
    return []  # published by an older version


def _checksums(directory: str) -> list[str]:
    """Return a line NAME CRC for each file beside the tree of a layer or an image."""
    from zlib import crc32

    lines = []
    for inside in ("", f"{layout.HEAD}/"):
        if os.path.isdir(f"{directory}/{inside}"):
            for name in sorted(os.listdir(f"{directory}/{inside}")):
                file = f"{directory}/{inside}{name}"
                if name not in (layout.BOOT, layout.CHECKED, layout.SQUASHFS) and os.path.isfile(file):
                    with open(file, "rb") as f:
                        lines.append(f"{inside}{name} {crc32(f.read()):08x}\n")
    return lines
