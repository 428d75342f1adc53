"""Two more forms of an image in the store: one squashfs file, and the unpacked copy of a squashfs file.

A network file system serves one large file well and the many small ones of a tree badly,
and overlayfs may not take its directories: there an image is ``images/DIGEST/image.sqsh``,
mounted by FUSE, and its layers are unpacked beneath the setting temp_path meanwhile.

A squashfs file that starts often is unpacked once, with the setting ``unpack``, as a layer
and an image of its own; their name is made of what tells this file from others. So locks,
limits and pruning are those of any image. On the start path: unpacked().
"""

from __future__ import annotations

import os

from enroot_py.base import digests, filesystems, log, trusted
from enroot_py.base.errors import ImageError
from enroot_py.store import layout
from enroot_py.store.squashfs import SUPERBLOCK
from enroot_py.store.store import Image, Name, Store, cannot_write

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from enroot_py.config.settings import Settings


def of_store(settings: Settings) -> str:
    """``tree`` or ``squashfs``: the setting, or what the file system of the store is good for."""
    form = settings.store_form
    if form != "auto":
        return form
    return "squashfs" if filesystems.kind(settings.cache_path) in filesystems.NETWORK else "tree"


# ---------------------------------------------------------------------------
# One squashfs file


def squash(path: str, name: str, pull: Callable[[Settings], Image], settings: Settings) -> None:
    """Fill ``path``, a directory in the making, with the image that ``pull`` brings into a store of trees.

    That store is a local one, whose unused images go afterwards; what a killed import leaves goes then too.
    """
    import shutil

    from enroot_py.store import mksquashfs, prune, squashfs

    try:
        local = trusted.mine(settings.temp_path, f"penroot-{os.geteuid()}.trees")
    except OSError as e:
        raise ImageError(f"cannot use {settings.temp_path}: {e.strerror}", hint="see ENROOT_TEMP_PATH") from e
    inner = settings.replace(
        "store_form=squashfs", cache_path=local, store_form="tree", cache_limit=0, force_override=True
    )
    try:
        image = pull(inner)
    except ImageError as e:
        raise ImageError(str(e), hint=e.hint.replace("ENROOT_CACHE_PATH", "ENROOT_TEMP_PATH")) from e
    try:
        mksquashfs.write(image.lowerdirs, f"{path}/{layout.SQUASHFS}", inner)
        for record in (layout.MANIFEST, layout.CONFIG):
            shutil.copyfile(f"{image.path}/{record}", f"{path}/{record}")
        with open(f"{path}/{layout.SUM}", "w") as f:
            f.write(squashfs.checksum(f"{path}/{layout.SQUASHFS}"))
    except (OSError, ImageError) as e:
        cause = e.__cause__ if isinstance(e, ImageError) else e
        if isinstance(cause, OSError):
            raise cannot_write(f"store {name} in {settings.cache_path}", settings.cache_path, cause) from e
        raise
    finally:
        image.release()
        try:
            prune.prune(Store(local), inner, prune.Bounds(), wait=False)
        except BlockingIOError:
            log.debug(f"{local}: another import is at work")


# ---------------------------------------------------------------------------
# The unpacked copy of a squashfs file


def identity(path: str) -> str:
    """What tells a squashfs file from others, and from what it was before it was changed, as a digest.

    Device, inode, size, time, and a checksum of the superblock, which knows when it was made. Raises OSError.
    """
    from binascii import crc32

    with open(path, "rb", buffering=0) as f:
        status = os.fstat(f.fileno())
        check = crc32(f.read(SUPERBLOCK))
    numbers = (
        (status.st_dev & 0xFFFFFFFF, 4),
        (status.st_ino, 8),
        (status.st_size, 8),
        (status.st_mtime_ns, 8),
        (check, 4),
    )
    data = b"".join((number % (1 << 8 * size)).to_bytes(size, "big") for number, size in numbers)
    return digests.of_encoded(data.hex())


def unpacked(path: str, settings: Settings) -> Image:
    """The copy of a squashfs image that all its containers share, made where it is missing; held. Raises ImageError."""
    store = Store(settings.cache_path, create=True)
    while True:
        try:
            name = identity(path)
        except OSError as e:
            raise ImageError(f"cannot read the image {path}: {e.strerror}") from e
        image = store.image(name) or _unpack(store, path, name, settings)
        if image is not None and image.hold():  # else it was pruned this very moment
            return image


def _unpack(store: Store, path: str, name: str, settings: Settings) -> Image | None:
    from enroot_py.store import prune

    store.sweep()
    try:
        with store.lock():
            with store.build(layout.IMAGES, name) as build:
                if store.image(name) is None:
                    _unpack_layer(store, path, name, settings)
                    if not build.done:
                        _compose(build.path, path, name)
                        build.publish()
            if os.geteuid() == 0:  # see crash.py
                store.settle(name)
            store.name(path, None, Name(name))
    except OSError as e:
        raise cannot_write(f"unpack {path} in {store.root}", store.root, e) from e
    image = store.image(name)
    if image is not None and image.hold():
        prune.shrink(store, settings)
    return image


def _compose(directory: str, path: str, name: str) -> None:
    """Make an image of the layer that the squashfs file ``path`` was unpacked to. Raises OSError."""
    from enroot_py.store import index

    head = f"{directory}/{layout.HEAD}"
    os.makedirs(f"{head}/{layout.TREE}", 0o755)
    index.write(head, ())
    for file, data in ((layout.FILE, os.fsencode(path) + b"\n"), (layout.STACK, layout.stack(name, [name]))):
        with open(f"{directory}/{file}", "wb") as f:
            f.write(data)


def _unpack_layer(store: Store, path: str, name: str, settings: Settings) -> None:
    import stat

    from enroot_py.store import index, unsquashfs

    with store.build(layout.LAYERS, name) as build:
        if build.done:
            return
        log.info(f"unpacking {path} for all containers of it on this node")
        root = f"{build.path}/{layout.TREE}"
        os.mkdir(root, 0o755)
        unsquashfs.unpack(path, root, settings)
        if identity(path) != name:
            raise ImageError(f"{path} was changed while it was unpacked", hint="try again when it is complete")
        size, pending = 0, [root]
        while pending:
            with os.scandir(pending.pop()) as entries:
                for entry in entries:
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode) and not status.st_mode & stat.S_IRUSR:
                        os.chmod(entry.path, status.st_mode & 0o1777 | stat.S_IRUSR)  # as in the trees of layers
                    _disarm(entry.path)
                    if stat.S_ISDIR(status.st_mode):
                        pending.append(entry.path)
                    else:
                        size += status.st_size
        index.write(build.path, (index.layer_line(name, size),))
        build.publish()


def _disarm(path: str) -> None:
    """Attributes of overlayfs are commands to it, and not the image's to give."""
    for attribute in os.listxattr(path, follow_symlinks=False):
        if attribute.startswith("user.overlay."):
            os.removexattr(path, attribute, follow_symlinks=False)
