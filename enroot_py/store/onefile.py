"""An image of the store as one squashfs file.

A network file system serves one large file well and the many small ones of a tree badly,
and overlayfs may not take its directories: there an image is ``images/DIGEST/image.sqsh``,
mounted by FUSE, and its layers are unpacked beneath the setting temp_path meanwhile.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable

from enroot_py.base import filesystems, log, trusted
from enroot_py.base.errors import ImageError
from enroot_py.config.settings import Settings
from enroot_py.store import layout, mksquashfs, prune, squashfs
from enroot_py.store.store import Image, Store, cannot_write


def of_store(settings: Settings) -> str:
    """``tree`` or ``squashfs``: the setting, or what the file system of the store is good for."""
    form = settings.store_form
    if form != "auto":
        return form
    return "squashfs" if filesystems.kind(settings.cache_path) in filesystems.NETWORK else "tree"


def squash(path: str, name: str, pull: Callable[[Settings], Image], settings: Settings) -> None:
    """Fill ``path``, a directory in the making, with the image that ``pull`` brings into a store of trees.

    That store is a local one, whose unused images go afterwards; what a killed import leaves goes then too.
    """
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
