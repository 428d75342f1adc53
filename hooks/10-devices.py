"""Give the container a private /dev: ENROOT_RESTRICT_DEV, by default for containers that root starts."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from enroot_py.runtime.hooks import Context


def run(context: Context) -> None:
    if context.settings.restrict_dev and not context.settings.unshare_ipc:  # with its own IPC it has one
        from enroot_py.runtime import isolated

        isolated.make_dev(context.root, own_ipc=False)
