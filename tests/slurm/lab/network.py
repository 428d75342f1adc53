"""The lab's network, by rtnetlink(7): a switch in its own network namespace, and a cable to each node.

Each namespace is found by a process in it, because names like those of ip-netns(8) would remain on the machine.
Functions import pyroute2 late: the import takes 0.2 s, and some lab commands do not need it.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

SWITCH, CABLE, PLUG = "br0", "v-{}", "eth0"
SOCKET_TIMEOUT_S = 60  # seconds to wait for the child in which pyroute2 makes a socket; pyroute2's default is 2


class Node(Protocol):
    """The name, the address and a process of a machine."""

    name: str
    address: str
    pid: int


@contextlib.contextmanager
def namespace(pid: int) -> Iterator[Any]:
    """Yield a client for the network namespace of a process. Raises OSError for requests that the kernel refuses."""
    from pyroute2 import NetlinkError, NetNS, config

    config.default_communicate_timeout = config.default_create_socket_timeout = SOCKET_TIMEOUT_S
    try:
        with NetNS(f"/proc/{pid}/ns/net", flags=0) as requests:
            yield requests
    except NetlinkError as e:
        raise OSError(e.code, os.strerror(e.code)) from e


def connect(lab: int, nodes: Iterable[Node]) -> None:
    """Create the switch in the namespace of the process ``lab``, and connect all nodes. Raises OSError."""
    with namespace(lab) as switch:
        switch.link("add", ifname=SWITCH, kind="bridge", state="up")
        for node in nodes:
            peer = {"ifname": PLUG, "net_ns_pid": node.pid}
            switch.link("add", ifname=CABLE.format(node.name), kind="veth", peer=peer)
            switch.link("set", index=index(switch, CABLE.format(node.name)), master=index(switch, SWITCH), state="up")
            with namespace(node.pid) as own:
                own.link("set", index=index(own, "lo"), state="up")
                own.addr("add", index=index(own, PLUG), address=node.address, prefixlen=24)
                own.link("set", index=index(own, PLUG), state="up")


def index(network: Any, name: str) -> int:
    """Return the index of an interface."""
    [number] = network.link_lookup(ifname=name)
    return int(number)


@contextlib.contextmanager
def slowed(lab: int, node: Node, bits: int) -> Iterator[None]:
    """Limit the cable of a node to ``bits`` bits a second in each direction: tc-tbf(8). Raises OSError."""
    from pyroute2.netlink.rtnl import TC_H_ROOT

    with namespace(lab) as switch, namespace(node.pid) as own, contextlib.ExitStack() as shaped:
        for network, name in ((switch, CABLE.format(node.name)), (own, PLUG)):
            end = index(network, name)
            # TCP aggregates segments, so a packet can have 64 KiB.
            network.tc("add", "tbf", end, rate=f"{bits}bit", burst=1 << 16, latency="1s")
            shaped.callback(network.tc, "del", index=end, parent=TC_H_ROOT)
        yield


@contextlib.contextmanager
def unreachable(node: Node, other: Node) -> Iterator[None]:
    """Add an "unreachable" route to ``other`` on ``node``: connect(2) fails at once (EHOSTUNREACH). Raises OSError."""
    route = {"dst": f"{other.address}/32", "type": "unreachable"}
    with namespace(node.pid) as own:
        own.route("add", **route)
        try:
            yield
        finally:
            own.route("del", **route)


def listener(node: Node) -> socket.socket:
    """Return a socket of this process that listens on ``node``, at a port of the kernel's choice. Raises OSError."""
    from pyroute2 import netns

    made = netns.create_socket(f"/proc/{node.pid}/ns/net", flags=0, timeout=SOCKET_TIMEOUT_S)
    made.bind((node.address, 0))
    made.listen(64)
    return made
