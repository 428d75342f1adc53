"""An image is made of its layers: which of them show it, and its head, a topmost tree that makes it an enroot image."""

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
    """The layers that show an image, top first: their digests, their trees, and what their indexes say."""

    digests: list[str]
    lowerdirs: list[str]
    indexes: list[Index]


def stack(store: Store, diff_ids: Sequence[str], name: object) -> Stack:
    """The stack of the image ``name``, whose layers are stored. Raises ImageError."""
    digests: list[str] = []
    indexes: list[Index] = []
    for diff_id in reversed(diff_ids):
        directory = store.layer_path(diff_id)
        if directory is None:
            raise ImageError(f"{name}: the layer {diff_id} vanished from the store", hint="try again")
        if diff_id not in digests:  # of a layer that is listed twice the upper position wins
            digests.append(diff_id)
            indexes.append(index.read(directory))
        if indexes[-1].opaque:
            break
    if len(digests) > merge.MAX_LAYERS:
        lowest = slice(merge.MAX_LAYERS - 1, None)
        log.info(f"{name}: {len(digests)} layers: making one of the lowest {len(digests[lowest])}")
        digests[lowest] = [_merged(store, digests[lowest], indexes[lowest])]
        indexes[lowest] = [Index()]
    return Stack(digests, [f"{layout.layer(store.root, digest)}/{layout.TREE}" for digest in digests], indexes)


def _merged(store: Store, diff_ids: Sequence[str], indexes: Sequence[Index]) -> str:
    """One layer in the store that shows what several do, top first; returns its digest."""
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
    """Write all that the store has of an image into ``directory``. Raises ImageError, OSError."""
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
    """The topmost tree, in the making. What is added to the image has the time of that, to be the same every time.

    A directory of the head hides mode and time of the layers', so it gets theirs. That
    also repairs directories that a layer implies but does not have, as /tmp in a layer
    of nothing but tmp/x: the layers below know what they are like. All raise OSError.
    """

    def __init__(self, directory: str, stack: Stack, created: float) -> None:
        self._directory = directory
        self._root = f"{directory}/{layout.TREE}"
        self._stack = stack
        self._created = created
        os.makedirs(self._root, 0o755)
        self._made = {self._root: (0o755, created)}  # directory -> mode and time
        self._modes: dict[str, int] = {}  # those that a tree cannot hold

    def add_workdir(self, workdir: str) -> None:
        """Make the working directory where the layers have none."""
        path = real_path(self._stack.lowerdirs, workdir)
        if path is not None and look(self._stack.lowerdirs, path) is None:
            self._add_directory(path)

    def add_files(self, files: Mapping[str, bytes]) -> None:
        """Put files in /etc."""
        etc = self._add_directory(real_path(self._stack.lowerdirs, "/etc") or "/etc")
        for name, data in files.items():
            with open(f"{etc}/{name}", "xb") as f:
                f.write(data)
            os.chmod(f"{etc}/{name}", 0o644)
            os.utime(f"{etc}/{name}", (self._created, self._created))

    def show_implied(self) -> None:
        """Show what directories are like that an upper layer implies and a lower one has."""
        for lower, its in zip(self._stack.lowerdirs, self._stack.indexes, strict=True):
            for name in its.implicit:
                shown = look(self._stack.lowerdirs, name)
                if shown is not None and len(shown.layers) > 1 and shown.layers[0][1] == f"{lower}/{name}":
                    self._add_directory(name)

    def hide_whiteouts(self) -> None:
        """Let overlayfs merge directories that hold whiteouts: it shows those in a directory of one layer alone."""
        for lower in self._stack.lowerdirs:
            for name in filter(None, index.whiteouts(os.path.dirname(lower))):
                shown = look(self._stack.lowerdirs, name)
                if shown is not None and [holder for _, holder in shown.layers] == [f"{lower}/{name}"]:
                    self._add_directory(name)

    def _add_directory(self, inside: str) -> str:
        """Make a directory, and those above it, like the ones that it hides. Returns its path."""
        names = [name for name in inside.split("/") if name]
        for depth in range(1, len(names) + 1):
            path = "/".join(names[:depth])
            if f"{self._root}/{path}" not in self._made:
                self._make_alike(path)
        return "/".join((self._root, *names))

    def _make_alike(self, path: str) -> None:
        here = f"{self._root}/{path}"
        os.mkdir(here)
        self._made[here] = 0o755, self._created
        shown = look(self._stack.lowerdirs, path)
        if shown is None or not stat.S_ISDIR(shown.status.st_mode):
            return
        for number, lower in shown.layers:
            status = os.stat(lower)
            self._made[here] = stat.S_IMODE(status.st_mode), status.st_mtime
            merge.copy_attributes(lower, here)
            its = self._stack.indexes[number]
            if path not in its.implicit:
                if path in its.modes:
                    self._modes[path] = its.modes[path]
                return

    def finish(self) -> None:
        """Set modes and times, and write what lies beside the tree."""
        for path, (mode, mtime) in sorted(self._made.items(), reverse=True):
            os.chmod(path, mode)
            os.utime(path, (mtime, mtime))
        index.write(self._directory, index.mode_lines(self._modes))
