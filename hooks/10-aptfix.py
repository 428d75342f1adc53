"""Let apt run as root in Debian images: apt's own user does not exist in a container."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from enroot_py.runtime.hooks import Context


def run(context: Context) -> None:
    if context.settings.remap_root and context.exists("/etc/debian_version"):
        context.write("/etc/apt/apt.conf.d/enroot", b'APT::Sandbox::User "root";\n')
