"""Merge layer trees into one equivalent tree, for images with more layers than overlayfs can stack.

A merged tree takes little space, because its files are hard links to the files of the layers, which never change. Its
name is the ChainID of the layers: OCI image specification, "Layer ChainID".
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence

from enroot_py.base import digests, trees
from enroot_py.store import index
from enroot_py.store.index import Index
from enroot_py.store.layout import TREE
from enroot_py.store.overlayfs import is_opaque, is_plain, is_whiteout

# On kernels before 6.7, all lower directories (/proc/self/fd/NUMBER) must fit into one page of mount options:
# rootfs.overlay_by_mount().
MAX_LAYERS = 200


def chain_id(diff_ids: Sequence[str]) -> str:
    """Return the ChainID of several layers, bottom first."""
    chain = diff_ids[0]
    for diff_id in diff_ids[1:]:
        chain = digests.of(f"{chain} {diff_id}".encode())
    return chain


def merge(lowerdirs: Sequence[str], indexes: Sequence[Index], directory: str, name: str, size: int) -> None:
    """Merge ``lowerdirs``, top first, into ``directory``/fs, and write index and sums beside it.

    ``name`` is the ChainID. ``size`` is the number of bytes in the layers' tars. Raises OSError.
    """
    root = f"{directory}/{TREE}"
    os.mkdir(root, 0o755)
    for lowerdir, layer_index in zip(reversed(lowerdirs), reversed(indexes), strict=True):
        _add(lowerdir, root, "", layer_index.implicit)
    modes = dict(index.special_modes(lowerdirs))
    index.write(directory, (index.layer_line(name, size), *index.mode_lines(modes)))


def _add(source: str, target: str, inside: str, implicit: frozenset[str]) -> None:
    """Merge a directory of a layer into ``target``. Implicit directories (index.py) do not change mode and time."""
    with os.scandir(source) as entries:
        for entry in entries:
            status, target_path = entry.stat(follow_symlinks=False), f"{target}/{entry.name}"
            below = _lstat(target_path)
            is_directory = stat.S_ISDIR(status.st_mode)
            if below is not None and not (is_directory and stat.S_ISDIR(below.st_mode) and not is_opaque(entry.path)):
                _remove(target, entry.name, below)
                below = None
            if is_whiteout(status):
                continue
            if not is_directory:
                _link(entry.path, target_path)
                continue
            name = f"{inside}{entry.name}"
            if below is None:
                os.mkdir(target_path, 0o700)
            _add(entry.path, target_path, name + "/", implicit)
            like = below if below is not None and name in implicit else status
            if like is status:
                copy_attributes(entry.path, target_path)
            _look_like(target_path, like)
    if not inside:
        _look_like(target, os.stat(source))


def _look_like(directory: str, status: os.stat_result) -> None:
    os.chmod(directory, stat.S_IMODE(status.st_mode))
    os.utime(directory, ns=(status.st_mtime_ns, status.st_mtime_ns))


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        # The file system limits hard links of a file, or allows none across directories.
        import shutil

        shutil.copy2(source, target, follow_symlinks=False)


def copy_attributes(source: str, target: str) -> None:
    """Give ``target`` the user.* attributes of ``source``, and no others, except user.overlay.*. Raises OSError."""
    for name in filter(is_plain, os.listxattr(target)):
        os.removexattr(target, name)
    for name in filter(is_plain, os.listxattr(source)):
        os.setxattr(target, name, os.getxattr(source, name))


def _remove(directory: str, name: str, status: os.stat_result) -> None:
    if stat.S_ISDIR(status.st_mode):
        trees.remove(f"{directory}/{name}")
    else:
        os.unlink(f"{directory}/{name}")


def _lstat(path: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except FileNotFoundError:
        return None
