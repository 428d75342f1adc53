"""Store a squashfs file that srun sends as an image, on each node of a step.

The image has the digest of the file, so each node downloads it once. Locks, limits and pruning apply as to any image.
"""

from __future__ import annotations

import errno
import os

from enroot_py.base import digests, filesystems, log
from enroot_py.base.errors import ImageError
from enroot_py.base.fds import Fd
from enroot_py.config.settings import Settings
from enroot_py.features.swarm.background import run_in_background
from enroot_py.store import layout
from enroot_py.store.store import Build, Image, Store, cannot_write

TYPE_CHECKING = False
if TYPE_CHECKING:
    from enroot_py.features.swarm.file import FileSource
    from enroot_py.features.swarm.invitation import Invitation

_CHUNK_BYTES = 1 << 20


def receive(name: str, digest: str, invitation: Invitation, settings: Settings) -> Image:
    """Return the file with this digest, stored and held. If this node already has the file, upload it to other nodes.

    Raises ImageError, RegistryError.
    """
    if settings.policies:
        from enroot_py.store import policies

        policies.admission(settings).check_file(name, settings)
    arrival = _Arrival(name, digest, invitation, settings)
    while True:
        image = arrival.image()
        if image is not None and image.hold():  # otherwise it was pruned at this moment
            return image


class _Arrival:
    """Downloads a file into the store."""

    def __init__(self, name: str, digest: str, invitation: Invitation, settings: Settings) -> None:
        self._name = name
        self._digest = digest
        self._invitation = invitation
        self._settings = settings
        self._store = Store(settings.cache_path, create=True)

    def image(self) -> Image | None:
        """Return the stored file, None if it was pruned at this moment. Raises ImageError, RegistryError."""
        store = self._store
        if (stored := store.image(self._digest)) is not None:
            run_in_background(lambda: self._source(stored.file).lend())
            return stored
        try:
            store.add_file(self._name, self._digest, self._make)
        except OSError as e:
            raise cannot_write(f"store {self._name} in {store.root}", store.root, e) from e
        image = store.image(self._digest)
        if image is not None and image.hold():
            from enroot_py.store import prune

            prune.shrink(store, self._settings)
        return image

    def _make(self, build: Build) -> None:
        if not build.done:
            self._receive(build.path)
            build.publish()

    def _receive(self, directory: str) -> None:
        """Download the file into the directory of a new image. Raises ImageError, RegistryError, OSError."""
        from hashlib import sha256

        path = f"{directory}/{layout.SQUASHFS}"
        source = self._source(path)
        size = source.size()
        with Fd(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)) as fd:
            _reserve(fd, size, self._store.root)
            digest = sha256()
            with source.read(fd) as reader:
                while data := reader.read(_CHUNK_BYTES):
                    digest.update(data)
        if (actual := digests.of_encoded(digest.hexdigest())) != self._digest:
            raise ImageError(
                f"{self._name}: the file received by {os.uname().nodename} has the digest {actual}, not {self._digest}",
                hint="the file was changed or damaged while it was sent; nothing was stored, try again",
            )
        with open(f"{directory}/{layout.SUM}", "w") as f:
            f.write(digests.encoded(self._digest))
        with open(f"{directory}/{layout.FILE}", "wb") as f:
            f.write(os.fsencode(self._name) + b"\n")
        log.debug(f"{self._name}: {log.size(size)} received")

    def _source(self, path: str) -> FileSource:
        """Return a source of the file. ``path`` is its present or future path on this node."""
        from enroot_py.features.swarm.file import FileSource

        return FileSource(self._invitation, self._digest, self._name, path)


def _reserve(fd: int, size: int, root: str) -> None:
    """Reserve the space for a file, so that a full disk is noticed before any byte is sent. Raises OSError."""
    if filesystems.kind(root) not in filesystems.NETWORK:  # there libc would write to each block
        os.posix_fallocate(fd, 0, size)
        return
    room = os.fstatvfs(fd)
    if size > room.f_bavail * room.f_frsize:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
