"""The arguments in plugstack.conf that configure swarms."""

from __future__ import annotations

from enroot_py.config.table import Bool, FeatureTable, Rows, Setting, Size, rows


class Networks(Setting):
    kind = "networks"

    def parse(self, text: str) -> str:
        if text:
            import ipaddress  # imported only if needed: the import takes two milliseconds

            for network in text.split(","):
                ipaddress.ip_network(network)
        return text

    def __get__(self, instance: Rows, owner: type) -> str:
        return instance.text(self)


class SwarmArguments(FeatureTable):
    swarm = Bool("1", "fetch an image once for all nodes of a step, and copy it from node to node")
    swarm_network = Networks("", "use only these networks (CIDR, comma-separated)")
    swarm_keep = Size("0", "keep this many bytes of compressed layers on each node for other nodes")


ARGUMENTS = rows(SwarmArguments)
