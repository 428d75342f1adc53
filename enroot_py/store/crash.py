"""What a crash of the node may have made of the store: nothing is used that is not what was published.

An import waits for no disk: it would take as long again as all the rest. What it made has a
mark, ``boot``, that names the boot of the node and has checksums of the files beside it.
Where the mark names another boot, the node may have crashed: what has it is compared with all
its sums before anybody uses it, and then the mark is renamed ``checked``. The users of root's
store (``store_form: squashfs``, and modes for all to read) cannot rename a mark: there the
import calls syncfs(2) and renames it at once. On the start path.
"""

from __future__ import annotations

import errno
import os

from enroot_py.base import linux, log
from enroot_py.base.fds import Fd
from enroot_py.store import layout


def mark(directory: str) -> None:
    """Mark a layer or an image as one of this boot. Raises OSError."""
    with open(f"{directory}/{layout.BOOT}", "w") as f:
        f.writelines((linux.boot_id() + "\n", *_checksums(directory)))


def is_whole(directory: str) -> bool:
    """Whether a layer or an image is there, and has not the mark of another boot."""
    try:
        with open(f"{directory}/{layout.BOOT}", errors="replace") as f:
            return f.readline().rstrip("\n") == linux.boot_id()
    except FileNotFoundError:
        return os.path.isdir(directory)


def is_usable(image: str) -> bool:
    """Whether an image is there, and whole: after a crash that takes a look at all of it."""
    if is_whole(image):
        return True
    if not os.path.isdir(image):
        return False
    log.info(f"{image} may not have been on the disk when the node went down: checking it")
    if not _survived(image):
        return False
    layers = layout.layers_of(image)
    if not all(is_whole(layer) or os.path.isdir(layer) and _survived(layer) for layer in layers):
        return False
    _unmark(image, *layers)
    return True


def keep_or_drop(directory: str, aside: str) -> None:
    """Keep a layer or an image of another boot if it is whole, else move it to ``aside``. Raises OSError."""
    if _survived(directory):
        _unmark(directory)
        return
    log.warn(f"{directory} was damaged when the node went down: making it again")
    os.rename(directory, aside)


def settle(image: str) -> None:
    """Write all to the disk: then an image and its layers need no mark any more. Raises OSError."""
    with Fd(os.open(image, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as fd:
        linux.syncfs(fd)
    _unmark(image, *layout.layers_of(image))


def _unmark(*directories: str) -> None:
    for directory in directories:
        try:
            os.rename(f"{directory}/{layout.BOOT}", f"{directory}/{layout.CHECKED}")
        except OSError as e:  # another was quicker, or it is not ours: then each of us looks
            if e.errno not in (errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS):
                raise


def _survived(directory: str) -> bool:
    """Whether a layer or an image is what it was when it was published."""
    from enroot_py.store import index

    if changed_files(directory):
        return False
    if os.path.exists(f"{directory}/{layout.SQUASHFS}"):
        return is_unchanged(directory)
    is_layer = os.path.isdir(f"{directory}/{layout.TREE}")
    return next(index.differences(directory if is_layer else f"{directory}/{layout.HEAD}"), None) is None


def is_unchanged(image: str) -> bool:
    """Whether the squashfs file of an image is what it was when it was written. Raises OSError."""
    from enroot_py.store import squashfs

    with open(f"{image}/{layout.SUM}") as f:
        return f.read() == squashfs.checksum(f"{image}/{layout.SQUASHFS}")


def changed_files(directory: str) -> list[str]:
    """Which files of a layer or an image, of those that are not in its tree, are not what was published."""
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
    """A line NAME CRC for each file of a layer or an image that is not in its tree."""
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
