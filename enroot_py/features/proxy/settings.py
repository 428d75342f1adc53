"""The setting for the proxy of a container."""

from __future__ import annotations

from enroot_py.config.table import FeatureTable, Place, rows


class ProxySettings(FeatureTable):
    net_proxy = Place(
        "", "Unix socket of an HTTP proxy, the only connection of a container with private network and PID namespaces"
    )


SETTINGS = rows(ProxySettings)
