"""InfiniBand and RoCE, by MELLANOX_VISIBLE_DEVICES; shared memory between processes, where the host has it.

With all of /dev and /sys in the container, as by default, there is nothing to
do for "all". A selection hides the other devices and their entries in sysfs: devices/mellanox.py.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from enroot_py.runtime.hooks import Context

SHARING = ("/dev/knem", "/dev/xpmem")  # need no choice: they give what cross-memory attach gives


def run(context: Context) -> None:
    visible = context.value("MELLANOX_VISIBLE_DEVICES")
    if visible in ("void", "none"):
        visible = ""
    root = context.host.get("PENROOT_HOST_ROOT", "")
    if visible or any(os.path.exists(root + path) for path in SHARING):
        from enroot_py.devices import mellanox

        mellanox.plan(context, visible, SHARING).execute(context)
