"""With the setting ``unpack``, start containers from an unpacked copy of a squashfs file, which is kept in the store.

The copy is an image of one layer. The digest of the image and of the layer is the file's identity(). Therefore locks,
limits and pruning work as for any image. With this setting, container starts import this module.
"""

from __future__ import annotations

import os
import stat

from enroot_py.base import digests, log, superblock
from enroot_py.base.errors import ImageError
from enroot_py.store import layout
from enroot_py.store.store import Build, Image, Store, cannot_write

TYPE_CHECKING = False
if TYPE_CHECKING:
    from enroot_py.config.settings import Settings


def image(path: str, settings: Settings) -> Image:
    """Return the shared copy of a squashfs image, protected by hold(). Create it if missing. Raises ImageError."""
    store = Store(settings.cache_path, create=True)
    while True:
        try:
            digest = identity(path)
        except OSError as e:
            raise ImageError(f"cannot read the image {path}: {e.strerror}") from e
        copy = store.image(digest) or _Copy(store, path, digest, settings).make()
        if copy is not None and copy.hold():  # if not, the copy was just pruned
            return copy


def identity(path: str) -> str:
    """Return a digest that identifies a squashfs file and its version. Raises OSError.

    The digest consists of device, inode, size, time, and a checksum of the superblock, which has the creation time.
    """
    from binascii import crc32

    with open(path, "rb", buffering=0) as f:
        status = os.fstat(f.fileno())
        checksum = crc32(f.read(superblock.SIZE_BYTES))
    numbers = (
        (status.st_dev & 0xFFFFFFFF, 4),
        (status.st_ino, 8),
        (status.st_size, 8),
        (status.st_mtime_ns, 8),
        (checksum, 4),
    )
    data = b"".join((number % (1 << 8 * size)).to_bytes(size, "big") for number, size in numbers)
    return digests.of_encoded(data.hex())


class _Copy:
    """Create the copy of the squashfs file ``path``."""

    def __init__(self, store: Store, path: str, digest: str, settings: Settings) -> None:
        self._store = store
        self._path = path
        self._digest = digest
        self._settings = settings

    def make(self) -> Image | None:
        """Store the copy. Return None if it has just been pruned. Raises ImageError."""
        from enroot_py.store import prune

        store = self._store
        try:
            store.add_file(self._path, self._digest, self._make)
        except OSError as e:
            raise cannot_write(f"unpack {self._path} into the store {store.root}", store.root, e) from e
        copy = store.image(self._digest)
        if copy is not None and copy.hold():
            prune.shrink(store, self._settings)
        return copy

    def _make(self, build: Build) -> None:
        """Make the layer and the image. Raises ImageError, OSError."""
        if self._store.image(self._digest) is None:
            self._unpack()
            if not build.done:
                self._compose(build.path)
                build.publish()

    def _unpack(self) -> None:
        """Make the layer. Raises ImageError, OSError."""
        from enroot_py.store import index, unsquashfs

        with self._store.build(layout.LAYERS, self._digest) as build:
            if build.done:
                return
            log.info(f"unpacking {self._path} for all its containers on this node")
            root = f"{build.path}/{layout.TREE}"
            os.mkdir(root, 0o755)
            unsquashfs.unpack(self._path, root, self._settings)
            if identity(self._path) != self._digest:
                message = f"{self._path} changed while it was unpacked"
                raise ImageError(message, hint="try again when the file is complete")
            index.write(build.path, (index.layer_line(self._digest, _sanitize(root)),))
            build.publish()

    def _compose(self, directory: str) -> None:
        """Make the image of the layer. Raises OSError."""
        from enroot_py.store import index

        head = f"{directory}/{layout.HEAD}"
        os.makedirs(f"{head}/{layout.TREE}", 0o755)
        index.write(head, ())
        with open(f"{directory}/{layout.FILE}", "wb") as f:
            f.write(os.fsencode(self._path) + b"\n")
        with open(f"{directory}/{layout.STACK}", "wb") as f:
            f.write(layout.stack(self._digest, [self._digest]))


def _sanitize(root: str) -> int:
    """Make files readable, and remove attributes that control overlayfs. Return the size of the files."""
    from enroot_py.store import overlayfs

    size, pending = 0, [root]
    while pending:
        with os.scandir(pending.pop()) as entries:
            for entry in entries:
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode) and not status.st_mode & stat.S_IRUSR:
                    os.chmod(entry.path, status.st_mode & 0o1777 | stat.S_IRUSR)
                for attribute in filter(overlayfs.is_command, os.listxattr(entry.path, follow_symlinks=False)):
                    os.removexattr(entry.path, attribute, follow_symlinks=False)
                if stat.S_ISDIR(status.st_mode):
                    pending.append(entry.path)
                else:
                    size += status.st_size
    return size
