"""InfiniBand and RoCE, by MELLANOX_VISIBLE_DEVICES; shared memory between processes, where the host has it.

With the host's /dev and /sys in the container there is nothing to do for "all". A selection hides the other devices
and their entries in sysfs: devices/mellanox.py. Root's containers have a private /dev by default, and get all devices
unless the caller or the image selects some: every user may open them.
"""

from __future__ import annotations

import os

from enroot_py.config.table import SETTINGS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from enroot_py.runtime.hooks import Context

SHARING = ("/dev/knem", "/dev/xpmem")  # need no choice: they give what cross-memory attach gives


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
