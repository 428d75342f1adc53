"""Start pasta in the network namespace of the caller, before a container leaves it."""

from __future__ import annotations

from enroot_py.base import linux
from enroot_py.features.networks.settings import NetworkSettings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from enroot_py.config.settings import Settings


def begin(settings: Settings) -> int:
    """Return the network namespace, if pasta connects it. Raises PenrootError.

    Root in the container has no power over that namespace: it could send packets to the host's loopback.
    """
    if not (NetworkSettings(settings).net_pasta and settings.unshare_net and settings.unshare_pid):
        return 0
    from enroot_py.features.networks import pasta

    pasta.begin(settings)
    return linux.CLONE_NEWNET
