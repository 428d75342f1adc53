"""The arguments of the plugin for swarms."""

from __future__ import annotations

from enroot_py.config.table import Bool, FeatureTable, Rows, Setting, Size, rows


class Networks(Setting):
    kind = "networks"

    def parse(self, text: str) -> str:
        if text:
            import ipaddress  # rarely: it takes two milliseconds

            for network in text.split(","):
                ipaddress.ip_network(network)
        return text

    def __get__(self, instance: Rows, owner: type) -> str:
        return instance.text(self)


class SwarmArguments(FeatureTable):
    swarm = Bool("1", "let the nodes of a step fetch an image once, and give it to each other")
    swarm_network = Networks("", "networks, as 10.1.0.0/16,fd00::/8, over which alone")
    swarm_keep = Size("0", "bytes of compressed layers that a node keeps to give them")


ARGUMENTS = rows(SwarmArguments)
