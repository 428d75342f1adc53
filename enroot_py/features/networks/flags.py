"""``penroot start --net=MODE --publish PORT``."""

from __future__ import annotations

import os

from enroot_py.base.errors import UsageError
from enroot_py.cli.start import FeatureFlag
from enroot_py.config.settings import Settings
from enroot_py.features.networks.settings import NetworkSettings, pasta_option


def _mode(settings: Settings, mode: str) -> Settings:
    """Return the settings with the network of the container. Raises UsageError."""
    name, _, socket = mode.partition("=")
    origin = f"--net={mode}"
    if mode in ("none", "host"):
        return settings.replace(origin, unshare_net=mode == "none", net_proxy="", net_pasta=False)
    if mode == "pasta":
        return settings.replace(origin, unshare_net=True, unshare_pid=True, net_proxy="", net_pasta=True)
    if name == "proxy" and socket:
        path = os.path.abspath(socket)
        return settings.replace(origin, unshare_net=True, unshare_pid=True, net_proxy=path, net_pasta=False)
    hint = "use --net=none, --net=host, --net=pasta or --net=proxy=SOCKET"
    raise UsageError(f"--net={mode}: unknown network", hint=hint)


def _publish(settings: Settings, port: str) -> Settings:
    """Return the settings with one more published port. Raises UsageError."""
    try:
        pasta_option(port)
    except ValueError as e:
        raise UsageError(f"--publish {e}", hint="for example --publish 127.0.0.1:8080:80") from None
    published = filter(None, (NetworkSettings(settings).net_publish, port))
    return settings.replace("--publish", net_publish=",".join(published))


FLAGS = (
    FeatureFlag(
        "--net",
        "none|host|pasta|proxy=SOCKET",
        "choose no network, the host's network, a private network or a proxy",
        _mode,
    ),
    FeatureFlag(
        "--publish",
        "[IP:]HOST:CONTAINER[/udp]",
        "forward a port of the host to the container, with --net=pasta",
        _publish,
    ),
)
