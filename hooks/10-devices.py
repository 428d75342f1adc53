"""Give the container a private /dev if ENROOT_RESTRICT_DEV is on.

By default, this setting is on for root without ENROOT_ALLOW_SUPERUSER.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from enroot_py.runtime.hooks import Context


def run(context: Context) -> None:
    if context.settings.restrict_dev and not context.settings.unshare_ipc:  # unshare_ipc implies a private /dev
        from enroot_py.runtime import isolated

        isolated.make_dev(context.root, own_ipc=False)
