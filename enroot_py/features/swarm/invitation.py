"""The invitation of a node to a swarm: the tracker's address and the swarm's key.

A step imports this module even if its image is stored already. So keep its imports few.
"""

from __future__ import annotations

from enroot_py.base import build

TYPE_CHECKING = False
if TYPE_CHECKING:
    from enroot_py.base.errors import ConfigError

_LIBRARY = "cryptography"


class Swarm:
    """The swarm of a step: its key, its number of nodes and the allowed networks.

    ``context`` names the step: members derive a certificate from the key and this name. ``networks`` are
    comma-separated; "" allows every network.
    """

    __slots__ = ("context", "key", "networks", "nodes")

    def __init__(self, key: bytes, context: str, nodes: int, networks: str = "") -> None:
        self.key, self.context, self.nodes, self.networks = key, context, nodes, networks

    def admits(self, host: str) -> bool:
        """Return whether an address is in a network of the swarm, or is loopback, from where the seed connects."""
        from ipaddress import ip_address, ip_network

        if not self.networks or ip_address(host).is_loopback:
            return True
        return any(ip_address(host) in ip_network(network) for network in self.networks.split(","))


class Invitation:
    """The tracker's address, and the number of this node within the step.

    The node keeps at most ``keep`` bytes of blobs for later steps, and listens at one of ``ports``.
    """

    __slots__ = ("host", "keep", "node", "port", "ports", "swarm")

    def __init__(self, host: str, port: int, node: int, swarm: Swarm, keep: int = 0, ports: range = range(1)) -> None:
        self.host, self.port, self.node, self.swarm = host, port, node, swarm
        self.keep, self.ports = keep, ports


def missing() -> ConfigError | None:
    """Return an error if this host lacks the library that a swarm needs. Do not import the library."""
    return None if build.has(_LIBRARY) else build.missing("swarm", ModuleNotFoundError(name=_LIBRARY))
