"""On each node of a step, receive a squashfs file from srun and store it as an image.

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
    """Store the file with this digest. Return its image, protected from pruning by hold().

    If this node already has the image, upload it to other nodes. Raises ImageError, RegistryError.
    """
    if settings.policies:
        from enroot_py.store import policies

        policies.admission(settings).check_file(name, settings)
    store = Store(settings.cache_path, create=True)

    def source(path: str) -> FileSource:
        from enroot_py.features.swarm.file import FileSource

        return FileSource(invitation, digest, name, path)

    def make(build: Build) -> None:
        if not build.done:
            _download(source(f"{build.path}/{layout.SQUASHFS}"), name, digest, build.path, store.root)
            build.publish()

    while True:
        if (image := store.image(digest)) is not None:
            path = image.file
            run_in_background(lambda path=path: source(path).lend())  # type: ignore[misc]
        else:
            try:
                store.add_file(name, digest, make)
            except OSError as e:
                raise cannot_write(f"store {name} in {store.root}", store.root, e) from e
            image = store.image(digest)
            if image is not None and image.hold():
                from enroot_py.store import prune

                prune.shrink(store, settings)
        if image is not None and image.hold():  # otherwise it was pruned meanwhile: start again
            return image


def _download(source: FileSource, name: str, digest: str, directory: str, root: str) -> None:
    """Download the file into the directory of a new image. Raises ImageError, RegistryError, OSError."""
    from hashlib import sha256

    size = source.size()
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with Fd(os.open(f"{directory}/{layout.SQUASHFS}", flags, 0o600)) as fd:
        _reserve(fd, size, root)
        checksum = sha256()
        with source.read(fd) as reader:
            while data := reader.read(_CHUNK_BYTES):
                checksum.update(data)
    if (actual := digests.of_encoded(checksum.hexdigest())) != digest:
        raise ImageError(
            f"{name}: the file received by {os.uname().nodename} has the digest {actual}, not {digest}",
            hint="the file was changed or damaged while it was sent; nothing was stored, try again",
        )
    with open(f"{directory}/{layout.SUM}", "w") as f:
        f.write(digests.encoded(digest))
    with open(f"{directory}/{layout.FILE}", "wb") as f:
        f.write(os.fsencode(name) + b"\n")
    log.debug(f"{name}: {log.size(size)} received")


def _reserve(fd: int, size: int, root: str) -> None:
    """Reserve the space for a file, to notice a full disk before any byte is sent. Raises OSError.

    On a network file system, only compare the size with the free space.
    """
    if filesystems.kind(root) not in filesystems.NETWORK:  # on a network file system, libc would write to each block
        os.posix_fallocate(fd, 0, size)
        return
    room = os.fstatvfs(fd)
    if size > room.f_bavail * room.f_frsize:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
