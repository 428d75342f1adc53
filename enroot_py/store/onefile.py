"""Store an image as one squashfs file.

A network file system serves one large file faster than many small files. Overlayfs may reject directories on a network
file system. Therefore a store on such a file system keeps an image as ``images/DIGEST/image.sqsh``, which FUSE mounts.
During the import, the layers are unpacked beneath the directory of the setting temp_path.
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


def image_form(settings: Settings) -> str:
    """Return the form of images in the store: ``tree`` or ``squashfs``. With ``auto``, the file system decides."""
    form = settings.store_form
    if form != "auto":
        return form
    return "squashfs" if filesystems.kind(settings.cache_path) in filesystems.NETWORK else "tree"


def squash(path: str, reference: str, pull: Callable[[Settings], Image], settings: Settings) -> None:
    """Write the image ``reference`` as a squashfs file into ``path``, a new image's directory.

    ``pull`` gets the image into a temporary local store of trees. Afterwards, unused images and leftovers of killed
    imports are removed from the temporary store.
    """
    try:
        local = trusted.mine(settings.temp_path, f"penroot-{os.geteuid()}.trees")
    except OSError as e:
        raise ImageError(f"cannot use {settings.temp_path}: {e.strerror}", hint="see ENROOT_TEMP_PATH") from e
    local_settings = settings.replace(
        "store_form=squashfs", cache_path=local, store_form="tree", cache_limit=0, force_override=True
    )
    try:
        image = pull(local_settings)
    except ImageError as e:
        raise ImageError(str(e), hint=e.hint.replace("ENROOT_CACHE_PATH", "ENROOT_TEMP_PATH")) from e
    try:
        mksquashfs.write(image.lowerdirs, f"{path}/{layout.SQUASHFS}", local_settings)
        for record in (layout.MANIFEST, layout.CONFIG):
            shutil.copyfile(f"{image.path}/{record}", f"{path}/{record}")
        with open(f"{path}/{layout.SUM}", "w") as f:
            f.write(squashfs.checksum(f"{path}/{layout.SQUASHFS}"))
    except (OSError, ImageError) as e:
        cause = e.__cause__ if isinstance(e, ImageError) else e
        if isinstance(cause, OSError):
            action = f"write the image {reference} to the store {settings.cache_path}"
            raise cannot_write(action, settings.cache_path, cause) from e
        raise
    finally:
        image.release()
        try:
            prune.prune(Store(local), local_settings, prune.Bounds(), wait=False)
        except BlockingIOError:
            log.debug(f"{local}: another import is running")
