"""Compose an image from stored layers: choose the layers to stack, and write the head.

The head is a topmost tree with the files that make the root file system an enroot image.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from enroot_py.base import log
from enroot_py.base.errors import ImageError
from enroot_py.registry.manifests import Manifest
from enroot_py.runtime import etc
from enroot_py.store import index, layout, merge
from enroot_py.store.imageconfig import ImageConfig
from enroot_py.store.index import Index
from enroot_py.store.overlayfs import look, real_path
from enroot_py.store.store import Store, cannot_write


@dataclass(frozen=True, slots=True)
class Stack:
    """The layers of an image to mount, top first: digests, trees and indexes."""

    digests: list[str]
    lowerdirs: list[str]
    indexes: list[Index]


def stack(store: Store, diff_ids: Sequence[str], name: object) -> Stack:
    """Return the stack of the image ``name`` from its stored layers. Raises ImageError."""
    digests: list[str] = []
    indexes: list[Index] = []
    for diff_id in reversed(diff_ids):
        directory = store.layer_path(diff_id)
        if directory is None:
            raise ImageError(f"{name}: the layer {diff_id} vanished from the store", hint="try again")
        if diff_id not in digests:  # the upper position of a layer that is listed twice wins
            digests.append(diff_id)
            indexes.append(index.read(directory))
        if indexes[-1].opaque:
            break
    if len(digests) > merge.MAX_LAYERS:
        lowest = slice(merge.MAX_LAYERS - 1, None)
        log.info(f"{name}: {len(digests)} layers: merging the lowest {len(digests[lowest])} into one")
        digests[lowest] = [_merged(store, digests[lowest], indexes[lowest])]
        indexes[lowest] = [Index()]
    return Stack(digests, [f"{layout.layer(store.root, digest)}/{layout.TREE}" for digest in digests], indexes)


def _merged(store: Store, diff_ids: Sequence[str], indexes: Sequence[Index]) -> str:
    """Merge several layers (top first) into one stored layer. Return its digest."""
    chain_id = merge.chain_id(diff_ids[::-1])
    with store.build(layout.LAYERS, chain_id) as build:
        if not build.done:
            directories = [layout.layer(store.root, diff_id) for diff_id in diff_ids]
            size = sum(map(index.size, directories))
            lowerdirs = [f"{path}/{layout.TREE}" for path in directories]
            try:
                merge.merge(lowerdirs, indexes, build.path, chain_id, size)
            except OSError as e:
                raise cannot_write("merge layers", store.root, e) from e
            build.publish()
    return chain_id


def compose(directory: str, manifest: Manifest, config: ImageConfig, stack: Stack, provenance: str) -> None:
    """Write head, manifest, config and stack (layout.py) of an image into ``directory``. Raises ImageError, OSError."""
    files = config.files(provenance)
    files["rc.local"] += etc.write_digest(manifest.digest).encode()
    head = _Head(f"{directory}/{layout.HEAD}", stack, config.created)
    head.add_workdir(config.workdir)
    head.add_files(files)
    head.show_implied()
    head.hide_whiteouts()
    head.finish()
    records = {
        layout.MANIFEST: manifest.data,
        layout.CONFIG: config.data,
        layout.STACK: layout.stack(manifest.digest, stack.digests),
    }
    for name, data in records.items():
        with open(f"{directory}/{name}", "wb") as f:
            f.write(data)


class _Head:
    """Write the topmost tree. Added files get the image's creation time, so that the result is reproducible.

    A directory of the head hides mode and time of the same directory in the layers. Therefore the head copies mode and
    time from the topmost layer whose tar has an entry for the directory. For example, a layer with the entry tmp/x and
    without tmp does not change the mode of /tmp. All methods raise OSError.
    """

    def __init__(self, directory: str, stack: Stack, created: float) -> None:
        self._directory = directory
        self._root = f"{directory}/{layout.TREE}"
        self._stack = stack
        self._created = created
        os.makedirs(self._root, 0o755)
        self._made = {self._root: (0o755, created)}  # directory -> mode and time
        self._modes: dict[str, int] = {}  # modes that a tree cannot hold

    def add_workdir(self, workdir: str) -> None:
        """Create the working directory if no layer has it."""
        path = real_path(self._stack.lowerdirs, workdir)
        if path is not None and look(self._stack.lowerdirs, path) is None:
            self._add_directory(path)

    def add_files(self, files: Mapping[str, bytes]) -> None:
        """Write files into /etc."""
        etc = self._add_directory(real_path(self._stack.lowerdirs, "/etc") or "/etc")
        for name, data in files.items():
            with open(f"{etc}/{name}", "xb") as f:
                f.write(data)
            os.chmod(f"{etc}/{name}", 0o644)
            os.utime(f"{etc}/{name}", (self._created, self._created))

    def show_implied(self) -> None:
        """Restore mode and time of directories that are implicit (index.py) in the topmost of their layers."""
        for lower, layer_index in zip(self._stack.lowerdirs, self._stack.indexes, strict=True):
            for name in layer_index.implicit:
                shown = look(self._stack.lowerdirs, name)
                if shown is not None and len(shown.layers) > 1 and shown.layers[0][1] == f"{lower}/{name}":
                    self._add_directory(name)

    def hide_whiteouts(self) -> None:
        """Add directories with whiteouts that only one layer has: overlayfs shows whiteouts of unmerged directories."""
        for lower in self._stack.lowerdirs:
            for name in filter(None, index.whiteouts(os.path.dirname(lower))):
                shown = look(self._stack.lowerdirs, name)
                if shown is not None and [holder for _, holder in shown.layers] == [f"{lower}/{name}"]:
                    self._add_directory(name)

    def _add_directory(self, inside: str) -> str:
        """Make a directory and its parents, with the attributes of these directories in the layers. Return its path."""
        names = [name for name in inside.split("/") if name]
        for depth in range(1, len(names) + 1):
            path = "/".join(names[:depth])
            if f"{self._root}/{path}" not in self._made:
                self._make_alike(path)
        return "/".join((self._root, *names))

    def _make_alike(self, path: str) -> None:
        directory = f"{self._root}/{path}"
        os.mkdir(directory)
        self._made[directory] = 0o755, self._created
        shown = look(self._stack.lowerdirs, path)
        if shown is None or not stat.S_ISDIR(shown.status.st_mode):
            return
        for number, lower in shown.layers:
            status = os.stat(lower)
            self._made[directory] = stat.S_IMODE(status.st_mode), status.st_mtime
            merge.copy_attributes(lower, directory)
            layer_index = self._stack.indexes[number]
            if path not in layer_index.implicit:
                if path in layer_index.modes:
                    self._modes[path] = layer_index.modes[path]
                return

    def finish(self) -> None:
        """Set modes and times, and write index and sums."""
        for path, (mode, mtime) in sorted(self._made.items(), reverse=True):
            os.chmod(path, mode)
            os.utime(path, (mtime, mtime))
        index.write(self._directory, index.mode_lines(self._modes))
