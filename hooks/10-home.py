"""Mount the caller's home directory if ENROOT_MOUNT_HOME or --container-mount-home requests it."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from enroot_py.runtime.hooks import Context


def run(context: Context) -> None:
    if not context.settings.mount_home:
        return
    source = context.host.get("HOME") or context.user.pw_dir
    target = "/root" if context.settings.remap_root else source
    context.mount(source, target, "x-create=dir,rbind,rw,nosuid")
    context.environ["HOME"] = target
