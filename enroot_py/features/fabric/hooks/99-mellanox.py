"""Add the InfiniBand and RoCE devices in MELLANOX_VISIBLE_DEVICES, and the host's nodes of knem and xpmem.

If the container shares the host's /dev and /sys, "all" needs no change. A selection hides the other devices and their
entries in sysfs: fabric/mellanox.py. Root's containers have a private /dev by default. They get all devices unless the
caller or the image selects some, since every user may open the devices.
"""

from __future__ import annotations

import os

from enroot_py.config.table import SETTINGS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from enroot_py.runtime.hooks import Context

SHARING = ("/dev/knem", "/dev/xpmem")  # added in any case: they allow no more than cross-memory attach


def run(context: Context) -> None:
    settings = context.settings
    is_auto = settings.origin(SETTINGS["ENROOT_RESTRICT_DEV"]).startswith("auto,")
    visible = context.value("MELLANOX_VISIBLE_DEVICES") or ("all" if settings.restrict_dev and is_auto else "")
    if visible in ("void", "none"):
        visible = ""
    root = context.host.get("PENROOT_HOST_ROOT", "")
    if visible or any(os.path.exists(root + path) for path in SHARING):
        from enroot_py.features.fabric import mellanox

        mellanox.plan(context, visible, SHARING).execute(context)
