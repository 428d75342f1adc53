"""Open listening sockets. Use the module _socket: srun waits for them, and the module socket loads slowly."""

from __future__ import annotations

import _socket
import errno
import os

BACKLOG = 1024  # connections that wait to be accepted


def listener(ports: range = range(1)) -> _socket.socket:
    """Listen at one of these ports, for IPv6 and IPv4 (ipv6(7)), or only for IPv4 if this host has no IPv6.

    For port 0, the kernel chooses a free port. Raises OSError if all ports are in use.
    """
    try:
        listener = _socket.socket(_socket.AF_INET6, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)
        listener.setsockopt(_socket.IPPROTO_IPV6, _socket.IPV6_V6ONLY, 0)
    except OSError:
        listener = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)
    first = int.from_bytes(os.urandom(2), "big") % len(ports)  # several srun processes begin at different ports
    for port in (*ports[first:], *ports[:first]):
        try:
            listener.bind(("", port))
            break
        except OSError as e:
            if e.errno != errno.EADDRINUSE:
                raise
    else:
        raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
    listener.listen(BACKLOG)
    return listener
