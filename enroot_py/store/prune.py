"""Remove unused images, and layers that belong to no image, from the store."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from enroot_py.base import filesystems, log, trees
from enroot_py.base.errors import ImageError
from enroot_py.base.fds import Fd
from enroot_py.config.settings import Settings
from enroot_py.store import index, inventory, layout, usage
from enroot_py.store.inventory import Stored
from enroot_py.store.store import Store, flock


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits for pruning. A limit that is 0 or empty has no effect.

    Remove only images unused for ``age`` seconds, until at most ``size`` bytes are left. With ``only``, remove only the
    images with these digests.
    """

    size: int = 0
    age: float = 0
    only: frozenset[str] = frozenset()

    def covers(self, image: Stored) -> bool:
        return not self.only or image.digest in self.only


@dataclass(frozen=True, slots=True)
class Pruned:
    """The result of prune()."""

    images: tuple[Stored, ...]  # removed
    layers: int  # number of removed layers
    size: int  # removed bytes
    kept: tuple[tuple[str, str], ...]  # images in use, as (digest, user)


def prune(store: Store, settings: Settings, bounds: Bounds, *, wait: bool = True, dry: bool = False) -> Pruned:
    """Remove unused images, the least recently used first, and layers without an image. With ``dry``, only list them.

    Raises BlockingIOError if an import is running and ``wait`` is False. Raises ImageError for a store on a network
    file system if starts on other nodes may have no lease: usage.py.
    """
    if not os.path.isdir(store.root):
        return Pruned((), 0, 0, ())
    _refuse_unseen(store, bounds)
    with Alone(store, wait=wait) as alone:
        store.sweep()
        images = inventory.images(store)
        unused, kept = _unused(alone, filter(bounds.covers, images), settings, bounds)
        removed = _excess(images, unused, bounds)
        if not dry:
            for image, user in _discard(alone, removed, bounds).items():
                removed.remove(image)
                kept.append((image.digest, user))
        needed = _layers(image for image in images if image not in removed)
        stray = [path for path in layout.all_of(store.root, layout.LAYERS) if path not in needed]
        size = sum(map(index.size, stray)) + sum(image.file for image in removed)
        if not dry:
            for path in stray:
                alone.take(path)  # prevent sweeps by other processes
                alone.discard(path)
            usage.forget_leases(store)
            for known in store.names():
                if store.image(known.digest) is None:
                    store.forget(known)
    return Pruned(tuple(removed), len(stray), size, tuple(kept))


def _refuse_unseen(store: Store, bounds: Bounds) -> None:
    kind = filesystems.kind(store.root)
    if kind in filesystems.NETWORK and not bounds.age and not usage.leases_are_complete(store):
        raise ImageError(
            f"the store {store.root} is on {kind}: other nodes may use its images",
            hint="use --older with more days than any container runs; from now on, each start records its node",
        )


def _unused(
    alone: Alone, images: Iterable[Stored], settings: Settings, bounds: Bounds
) -> tuple[list[Stored], list[tuple[str, str]]]:
    """Return the unused images, the least recently used first, and (digest, user) of all others."""
    free, kept = [], []
    for image in reversed(list(images)):
        if alone.take(image.path):
            free.append(image)
        else:
            kept.append((image.digest, "a start"))
    # Find users after locking: later starts wait for our locks, and the mounts of earlier starts are visible.
    users = {**usage.of_containers(alone.store, settings), **usage.of_mounts(alone.store)}
    unused = []
    for image in free:
        user = users.get(image.digest) or _leased(alone.store, image, bounds)
        if user:
            kept.append((image.digest, user))
        else:
            unused.append(image)
    return unused, kept


def _leased(store: Store, image: Stored, bounds: Bounds) -> str:
    return usage.leased(store, image.digest, bounds.age or usage.LEASE_S)


def _excess(images: Sequence[Stored], unused: Sequence[Stored], bounds: Bounds) -> list[Stored]:
    """Return the unused images to remove."""
    sizes = {layer: index.size(layer) for layer in _layers(images)}
    keeping = set(images)
    excess = []
    for image in unused:
        size = sum(sizes[layer] for layer in _layers(keeping)) + sum(image.file for image in keeping)
        if time.time() - image.used >= bounds.age and (not bounds.size or size > bounds.size):
            keeping.remove(image)
            excess.append(image)
    return excess


def _layers(images: Iterable[Stored]) -> set[str]:
    return {layer for image in images for layer in image.layers}


def _discard(alone: Alone, images: Sequence[Stored], bounds: Bounds) -> dict[Stored, str]:
    """Take images out of the store. Put back images that other nodes have just started, and return their users."""
    users = {}
    for image in images:
        alone.discard(image.path)
        if user := _leased(alone.store, image, bounds):
            alone.restore(image.path)  # the start waits for our lock
            users[image] = user
    return users


class Alone:
    """Exclusive locks on the store and on unused directories. The end of the ``with`` deletes discarded directories."""

    def __init__(self, store: Store, *, wait: bool = True) -> None:
        self.store = store
        self._wait = wait
        self._held = contextlib.ExitStack()
        self._trash: list[str] = []

    def __enter__(self) -> Alone:
        """Lock the store. Raises BlockingIOError if an import is running and ``wait`` is False."""
        self._lock = self.store.lock(exclusive=True, wait=self._wait)
        return self

    def take(self, directory: str) -> bool:
        """Lock a directory until the ``with`` ends. Return False if another process holds the lock."""
        with Fd(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as fd:
            if not flock(fd):
                return False
            self._held.enter_context(fd.keep())
            return True

    def discard(self, directory: str) -> None:
        """Take a directory out of the store by renaming it."""
        os.rename(directory, layout.trash(directory))
        self._trash.append(layout.trash(directory))

    def restore(self, directory: str) -> None:
        """Put a discarded directory back."""
        os.rename(layout.trash(directory), directory)
        self._trash.remove(layout.trash(directory))

    def __exit__(self, *_: object) -> None:
        with self._held:
            os.close(self._lock)  # imports need not wait for the deletion
            for path in self._trash:
                trees.remove(path)


def shrink(store: Store, settings: Settings) -> None:
    """Prune the store to the setting cache_limit after an import, unless another import is running."""
    if not settings.cache_limit:
        return
    try:
        done = prune(store, settings, Bounds(size=settings.cache_limit), wait=False)
    except BlockingIOError:
        return  # the import that ends last will shrink the store
    except ImageError as e:
        log.debug(str(e))
        return
    if done.images:
        log.info(f"the store exceeded its limit: removed {log.many(len(done.images), 'image')}, {log.size(done.size)}")
