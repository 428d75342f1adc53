"""Fork pasta in the network namespace of the caller, before the container gets its own network namespace."""

from __future__ import annotations

from enroot_py.base import linux
from enroot_py.features.networks.settings import NetworkSettings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from enroot_py.config.settings import Settings


def begin(settings: Settings) -> int:
    """Fork pasta and return CLONE_NEWNET. If the settings do not request pasta, return 0. Raises PenrootError.

    With this flag, root in the container gets no capabilities in the network namespace. With capabilities, root could
    send packets to the host's loopback.
    """
    if not (NetworkSettings(settings).net_pasta and settings.unshare_net and settings.unshare_pid):
        return 0
    from enroot_py.features.networks import pasta

    pasta.begin(settings)
    return linux.CLONE_NEWNET
