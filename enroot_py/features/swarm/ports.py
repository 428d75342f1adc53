"""Sockets that listen at one of some ports.

In a module of its own: srun waits for the first of them, and the module socket takes a while to load.
"""

from __future__ import annotations

import _socket
import errno
import os

BACKLOG = 1024  # connections that wait to be accepted


def listener(ports: range) -> _socket.socket:
    """A socket for IPv6 and IPv4, ipv6(7), or for that alone where this host knows nothing else, at one of these ports.

    Port 0 is any. Raises OSError where all of them are in use.
    """
    try:
        listener = _socket.socket(_socket.AF_INET6, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)
        listener.setsockopt(_socket.IPPROTO_IPV6, _socket.IPV6_V6ONLY, 0)
    except OSError:
        listener = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)
    begin = int.from_bytes(os.urandom(2), "big") % len(ports)  # several srun of a host begin at different ones
    for port in (*ports[begin:], *ports[:begin]):
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
