"""Connect a starting container to its network."""

from __future__ import annotations

from enroot_py.base.errors import UsageError
from enroot_py.features.networks.settings import SETTINGS, NetworkSettings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from enroot_py.runtime.hooks import Context


def finish(context: Context) -> str:
    """Connect the container to pasta or a proxy, and return the origin of the setting that requests it.

    If no setting does, return "". Raises PenrootError.
    """
    networks = NetworkSettings(context.settings)
    origin = networks.origin(SETTINGS["ENROOT_NET_PASTA" if networks.net_pasta else "ENROOT_NET_PROXY"])
    if networks.net_publish and not networks.net_pasta:
        published = networks.origin(SETTINGS["ENROOT_NET_PUBLISH"])
        raise UsageError(f"{published}: only --net=pasta publishes ports", hint="add --net=pasta")
    if not (networks.net_pasta or networks.net_proxy):
        return ""
    if not (context.settings.unshare_net and context.settings.unshare_pid):
        mode = "pasta" if networks.net_pasta else f"proxy={networks.net_proxy}"
        hint = f"use penroot start --net={mode}, or also set ENROOT_UNSHARE_NET=yes and ENROOT_UNSHARE_PID=yes"
        raise UsageError(f"{origin}: this network needs private network and PID namespaces", hint=hint)
    if networks.net_pasta:
        from enroot_py.features.networks import pasta

        pasta.connect(context)
    if networks.net_proxy:
        from enroot_py.features.networks import proxy

        proxy.connect(context, networks.net_proxy, origin)
    return origin
