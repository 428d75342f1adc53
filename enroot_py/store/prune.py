"""What the store holds, what of it is in use, and how it is pruned and verified.

An image is in use while somebody holds it (Image.hold), while a process on this node sees
a mount of it, or while the record of a container names it. Sources: proc(5),
/proc/PID/mountinfo; the kernel's overlayfs documentation, "Changes to underlying
filesystems": a lower directory that is removed beneath a mount does not fail, it reads as
empty, so nothing that is in use may go.

In a store on a network file system other nodes have mounts and locks that cannot be seen.
There each start renews a file that names its node: a lease, which holds for thirty days, or
for as long as --older says.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from enroot_py.base import digests, filesystems, log, trees
from enroot_py.base.errors import ImageError, PenrootError
from enroot_py.base.fds import Fd
from enroot_py.config.settings import Settings
from enroot_py.registry.reference import is_uri
from enroot_py.store import index, layout, records
from enroot_py.store.crash import changed_files, is_unchanged
from enroot_py.store.store import Store, flock

_LEASE = 30 * 86400  # seconds: no job runs as long
_SETTLED = 3600  # seconds after which a container whose record was announced has been made


@dataclass(frozen=True, slots=True)
class Stored:
    """An image of the store. ``size`` is bytes: that of its layers' tars, or of its ``file``; ``used`` its last use."""

    digest: str
    names: tuple[str, ...]
    layers: tuple[str, ...]  # their diff-ids without the algorithm
    size: int
    used: float
    file: int = 0


def images(store: Store) -> list[Stored]:
    """All images of a store, the one that was used last first."""
    names: dict[str, set[str]] = {}
    for known in store.names():
        if known.text:
            names.setdefault(known.digest, set()).add(known.text.rpartition("+")[0])  # one of each architecture
    found = []
    for name in layout.names(store.root, layout.IMAGES):
        path = layout.directory(store.root, layout.IMAGES, name)
        held = tuple(dict.fromkeys(_layers_of(path)))
        file = _file_size(f"{path}/{layout.SQUASHFS}")
        size = file + sum(layer_size(store, layer) for layer in held)
        try:
            used = os.stat(path).st_mtime
        except FileNotFoundError:
            continue
        digest = layout.digest_of(path)
        found.append(Stored(digest, tuple(sorted(names.get(digest, ()))), held, size, used, file))
    return sorted(found, key=lambda image: image.used, reverse=True)


def total(store: Store) -> tuple[int, int, int]:
    """How many images and layers a store holds, and how many bytes they are."""
    found, held = images(store), layout.names(store.root, layout.LAYERS)
    size = sum(image.file for image in found) + sum(layer_size(store, layer) for layer in held)
    return len(found), len(held), size


def _file_size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0


def layer_size(store: Store, layer: str) -> int:
    """Bytes of a layer's tar, 0 where it is not stored."""
    return index.size(layout.directory(store.root, layout.LAYERS, layer))


def _layers_of(image: str) -> list[str]:
    """The names of an image's layers."""
    try:
        return [os.path.basename(path) for path in layout.layers_of(image)]
    except FileNotFoundError:
        return []


# ---------------------------------------------------------------------------
# Who uses what


def used_by_containers(store: Store, settings: Settings) -> dict[str, str]:
    """Digest of each image that the record of a container names -> the container's directory."""
    noted = {f"{settings.data_path}/{name}/{records.MARK}" for name in _listing(settings.data_path)}
    for name in layout.names(store.root, layout.USERS):
        link = layout.directory(store.root, layout.USERS, name)
        try:
            record = os.readlink(link)
        except OSError as e:  # whatever it is, no record of ours
            log.warn(f"{link}: {e.strerror}: ignoring it")
            continue
        container = os.path.dirname(record)
        old = time.time() - os.lstat(link).st_mtime > _SETTLED
        if old and os.path.isdir(os.path.dirname(container)) and not os.path.lexists(container):
            os.unlink(link)  # the place is there, the container is not: it was removed
        else:
            noted.add(record)
    found = {}
    for record in noted:
        if image := records.read(record).get("image"):
            found[layout.digest_of(image)] = os.path.dirname(record)
    return found


def _listing(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []


def leased(store: Store, digest: str, lease: float) -> str:
    """Another node that has started an image of a shared store within ``lease`` seconds, in words; or ""."""
    for path, image, node in layout.leases(store.root):
        if image != digest or node == os.uname().nodename:
            continue  # of our own we see the mounts
        try:
            if time.time() - os.stat(path).st_mtime < lease:
                return f"a start on {node}"
        except FileNotFoundError:
            continue
    return ""


def _has_leases(store: Store) -> bool:
    """Whether all that may run has a lease; a store from before there were any gets them from now on."""
    since = layout.leases_since(store.root)
    if not os.path.isdir(os.path.dirname(since)):
        os.mkdir(os.path.dirname(since), 0o700)
        with open(since, "x"):
            return False
    try:
        return time.time() - os.stat(since).st_mtime > _LEASE
    except FileNotFoundError:
        return True


def _forget_leases(store: Store) -> None:
    """Leases of images that are gone."""
    for path, image, _ in layout.leases(store.root):
        if not os.path.isdir(layout.image(store.root, image)):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


def used_by_mounts() -> dict[str, str]:
    """Digest of each image in an overlay that a process of this node sees -> the process.

    Whatever the path of the store was to him who mounted it: digests are unique. The
    digest "" stands for a mount whose layers cannot be told.
    """
    found: dict[str, str] = {}
    seen: set[bytes] = set()
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/mountinfo", "rb") as f:
                lines = f.read()
        except OSError:
            continue  # it has ended, or is hidden from us: not one of our user's then (hidepid)
        if lines in seen:
            continue
        seen.add(lines)
        for line in lines.splitlines():
            kind, _, options = line.partition(b" - ")[2].partition(b" ")
            if kind != b"overlay":
                continue
            for digest in layout.images_in(options):
                found.setdefault(digest, f"process {pid}")
            if b"lowerdir+=/proc/self/fd/" in options or b"lowerdir=/proc/self/fd/" in options:
                found.setdefault("", f"process {pid}")  # a long path: rootfs.overlay() gave a descriptor instead
    return {**found, **_used_by_servers()}


def _used_by_servers() -> dict[str, str]:
    """Those that are one squashfs file, from the command lines of who serves it: a FUSE mount does not name it."""
    found = {}
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as f:
                words = f.read().split(b"\0")
        except OSError:
            continue
        for word in words[1:]:
            if digest := layout.image_in(os.fsdecode(word)):
                found[digest] = f"process {pid}"
    return found


# ---------------------------------------------------------------------------
# Pruning


@dataclass(frozen=True, slots=True)
class Pruned:
    """What prune() removed, and what it could not: (digest, who uses it)."""

    images: tuple[Stored, ...]
    layers: int
    size: int
    kept: tuple[tuple[str, str], ...]


def prune(
    store: Store, settings: Settings, *, limit: int = 0, older: float = 0, wait: bool = True, dry: bool = False
) -> Pruned:
    """Remove images that nothing uses, those used longest ago first, until ``limit`` bytes are left; and stray layers.

    Only images that were not used for ``older`` seconds. Raises BlockingIOError where an
    import runs and ``wait`` is False, ImageError for a store on a network file system
    where other nodes may have started something without a lease.
    """
    if not os.path.isdir(store.root):
        return Pruned((), 0, 0, ())  # nothing was ever stored
    kind = filesystems.kind(store.root)
    if kind in filesystems.NETWORK and not older and not _has_leases(store):
        raise ImageError(
            f"the store {store.root} is on {kind}: other nodes may use its images, which cannot be seen from here",
            hint="give an age after which no container can run any more: --older DAYS; starts leave a sign from now on",
        )
    lease = older or _LEASE
    with _Locks(store, wait=wait) as locks:
        store.sweep()
        there = images(store)
        total = sum(layer_size(store, layer) for layer in {layer for image in there for layer in image.layers})
        total += sum(image.file for image in there)
        candidates: list[Stored] = []
        kept: list[tuple[str, str]] = []
        for image in reversed(there):
            if locks.take(layout.IMAGES, digests.encoded(image.digest)):
                candidates.append(image)
            else:
                kept.append((image.digest, "a start"))
        # After the locks: who mounts from now on waits for us, who has mounted can be seen.
        users = {**used_by_containers(store, settings), **used_by_mounts()}
        gone: list[Stored] = []
        keeping = {image.digest: image for image in there}
        freed = 0
        for image in candidates:
            user = users.get(image.digest) or users.get("") or leased(store, image.digest, lease)
            if user:
                kept.append((image.digest, user))
            elif time.time() - image.used >= older and (not limit or total - freed > limit):
                del keeping[image.digest]
                gone.append(image)
                needed = {layer for other in keeping.values() for layer in other.layers}
                freed += image.file + sum(layer_size(store, layer) for layer in set(image.layers) - needed)
        if not dry:
            for image in list(gone):
                name = digests.encoded(image.digest)
                locks.discard(layout.IMAGES, name)
                user = leased(store, image.digest, lease)
                if user:  # since we looked: whoever looks for it now waits for its name to come back
                    locks.restore(layout.IMAGES, name)
                    gone.remove(image)
                    keeping[image.digest] = image
                    kept.append((image.digest, user))
        needed = {layer for image in keeping.values() for layer in image.layers}
        stray = [name for name in layout.names(store.root, layout.LAYERS) if name not in needed]
        size = sum(layer_size(store, layer) for layer in stray) + sum(image.file for image in gone)
        if not dry:
            for name in stray:
                locks.discard(layout.LAYERS, name)
            _forget_leases(store)
            for known in store.names():
                if store.image(known.digest) is None:
                    store.forget(known)
    return Pruned(tuple(gone), len(stray), size, tuple(kept))


class _Locks:
    """The store for ourselves, and directories of it that nobody uses; what was discarded is deleted at the end."""

    def __init__(self, store: Store, *, wait: bool = True) -> None:
        self._store = store
        self._held: list[int] = []
        self._trash: list[str] = []
        self._store_lock = store.lock(exclusive=True, wait=wait)

    def __enter__(self) -> _Locks:
        return self

    def take(self, kind: str, name: str) -> bool:
        """Whether nobody else holds a directory; nobody does until the end then."""
        directory = layout.directory(self._store.root, kind, name)
        with Fd(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as fd:
            if not flock(fd, wait=False):
                return False
            self._held.append(fd.keep())
            return True

    def discard(self, kind: str, name: str) -> None:
        """Take a directory out of the store at once."""
        if kind == layout.LAYERS:
            self.take(kind, name)  # against those who sweep
        trash = layout.trash(self._store.root, kind, name)
        os.rename(layout.directory(self._store.root, kind, name), trash)
        self._trash.append(trash)

    def restore(self, kind: str, name: str) -> None:
        """Put back what was discarded."""
        trash = layout.trash(self._store.root, kind, name)
        os.rename(trash, layout.directory(self._store.root, kind, name))
        self._trash.remove(trash)

    def __exit__(self, *_: object) -> None:
        os.close(self._store_lock)
        try:
            for path in self._trash:
                trees.remove(path)
        finally:
            for fd in self._held:
                os.close(fd)


def shrink(store: Store, settings: Settings) -> None:
    """After an import: keep the store within the setting cache_limit, if nobody imports just now."""
    if not settings.cache_limit:
        return
    try:
        done = prune(store, settings, limit=settings.cache_limit, wait=False)
    except BlockingIOError:
        return  # who ends his import last will do it
    except ImageError as e:
        log.debug(str(e))
        return
    if done.images:
        log.info(f"the store was over its limit: removed {log.many(len(done.images), 'image')}, {log.size(done.size)}")


# ---------------------------------------------------------------------------
# Verifying


def verify(store: Store, wanted: Sequence[str] = ()) -> Iterator[tuple[str, str, str]]:
    """Read all that is stored, or the images with the ``wanted`` digests, again: yields what is wrong.

    As (``layers`` or ``images``, name in the store, what); nothing is pruned meanwhile. Raises OSError.
    """
    if not os.path.isdir(store.root):
        return
    with store.lock():
        yield from _verify(store, wanted)


def _verify(store: Store, wanted: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    names = [digests.encoded(digest) for digest in wanted] or layout.names(store.root, layout.IMAGES)
    for name in names:
        for what in _verify_image(store, name):
            yield layout.IMAGES, name, what
    some = {layer for name in names for layer in _layers_of(layout.directory(store.root, layout.IMAGES, name))}
    for name in sorted(some) if wanted else layout.names(store.root, layout.LAYERS):
        for what in _verify_layer(layout.directory(store.root, layout.LAYERS, name)):
            yield layout.LAYERS, name, what


def _verify_image(store: Store, name: str) -> Iterator[str]:
    path = layout.directory(store.root, layout.IMAGES, name)
    for file in changed_files(path):
        if file not in (layout.MANIFEST, layout.CONFIG):  # these have digests
            yield f"its {file} was changed"
    if os.path.exists(f"{path}/{layout.FILE}"):  # the copy of a squashfs file, which is all in its layer
        yield from index.differences(f"{path}/{layout.HEAD}")
        return
    try:
        with open(f"{path}/{layout.MANIFEST}", "rb") as f:
            manifest = f.read()
        with open(f"{path}/{layout.CONFIG}", "rb") as f:
            config = f.read()
    except FileNotFoundError as e:
        yield f"{e.filename} is missing"
        return
    if digests.of(manifest) != layout.digest_of(path):
        yield "its manifest was changed"
        return
    if json.loads(manifest)["config"]["digest"] != digests.of(config):
        yield "its config was changed"
    if os.path.exists(f"{path}/{layout.SQUASHFS}"):
        if not is_unchanged(path):
            yield f"its {layout.SQUASHFS} was changed"
        return
    for layer in _layers_of(path):
        if not os.path.isdir(layout.directory(store.root, layout.LAYERS, layer)):
            yield f"its layer {layer} is missing"
    yield from index.differences(f"{path}/{layout.HEAD}")


def _verify_layer(path: str) -> Iterator[str]:
    for name in (layout.TREE, layout.INDEX):
        if not os.path.exists(f"{path}/{name}"):
            yield f"its {name} is missing"
            return
    for file in changed_files(path):
        yield f"its {file} was changed"
    yield from index.differences(path)


def repair(store: Store, settings: Settings, damaged: Mapping[tuple[str, str], object]) -> list[str]:
    """Take what is damaged out of the store, and images above damaged layers; returns the references to pull again.

    Raises PenrootError where something uses one of them.
    """
    with _Locks(store) as locks:
        bad_layers = {name for kind, name in damaged if kind == layout.LAYERS}
        bad = [
            image
            for image in images(store)
            if (layout.IMAGES, digests.encoded(image.digest)) in damaged or bad_layers & set(image.layers)
        ]
        for image in bad:
            free = locks.take(layout.IMAGES, digests.encoded(image.digest))
            user = used_by_mounts().get(image.digest) if free else "a start"
            if user:
                raise PenrootError(
                    f"the image {image.digest} is damaged, but {user} uses it", hint="stop its containers first"
                )
        for image in bad:
            locks.discard(layout.IMAGES, digests.encoded(image.digest))
        for name in bad_layers & set(layout.names(store.root, layout.LAYERS)):
            locks.discard(layout.LAYERS, name)
    # By digest: a tag may have moved, and containers want the image that they were made from.
    return [
        name if is_uri(name) else f"docker://{_repository(name)}@{image.digest}"
        for image in bad
        for name in image.names[:1]
        if name[0] != "/"
    ]


def _repository(name: str) -> str:
    """REGISTRY/REPOSITORY of a reference in its canonical form."""
    before, at, _ = name.partition("@")
    return before if at else name.rpartition(":")[0]
