"""``penroot start --net=MODE``."""

from __future__ import annotations

import os

from enroot_py.base.errors import UsageError
from enroot_py.cli.start import FeatureFlag
from enroot_py.config.settings import Settings


def _mode(settings: Settings, mode: str) -> Settings:
    """Return the settings with the network of the container. Raises UsageError."""
    name, _, socket = mode.partition("=")
    if mode in ("none", "host"):
        return settings.replace(f"--net={mode}", unshare_net=mode == "none", net_proxy="")
    if name == "proxy" and socket:
        path = os.path.abspath(socket)
        return settings.replace(f"--net={mode}", unshare_net=True, unshare_pid=True, net_proxy=path)
    raise UsageError(f"--net={mode}: unknown network", hint="use --net=none, --net=host or --net=proxy=SOCKET")


FLAGS = (FeatureFlag("--net", "none|host|proxy=SOCKET", "network: none, the host's, or a proxy's socket", _mode),)
