"""Connect a starting container to the caller's proxy."""

from __future__ import annotations

import os
import stat

from enroot_py.base import linux, log
from enroot_py.base.errors import ContainerError, UsageError
from enroot_py.base.fds import Fd

TYPE_CHECKING = False
if TYPE_CHECKING:
    from socket import socket
    from typing import NoReturn

    from enroot_py.runtime.hooks import Context

PORT = 3128  # the default port of Squid, the best-known proxy
_VARIABLES = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")


def connect(context: Context, path: str, origin: str) -> None:
    """Start a relay to the proxy, and set the proxy variables in the container. Raises UsageError, ContainerError."""
    with _socket(path, origin) as proxy:
        _start_relay(proxy)
    context.environ.update(dict.fromkeys(_VARIABLES, f"http://127.0.0.1:{PORT}"))
    context.environ.update(dict.fromkeys(("no_proxy", "NO_PROXY"), "localhost,127.0.0.1"))


def _socket(path: str, origin: str) -> Fd:
    """Open a socket by its path. Raises UsageError."""
    try:
        proxy = Fd(os.open(path, os.O_PATH | os.O_CLOEXEC))
    except OSError as e:
        raise UsageError(f"{origin}: cannot open {path}: {e.strerror}", hint="start the proxy first") from e
    if not stat.S_ISSOCK(os.fstat(proxy).st_mode):
        raise UsageError(f"{origin}: {path} is not a socket", hint="name the Unix socket on which the proxy listens")
    return proxy


def _start_relay(proxy: int) -> None:
    """Start the relay. The relay is a process of the container's PID namespace, and ends with the container.

    The relay has a private mount namespace, because pivot_root(2) changes the root directory of all processes in a
    mount namespace. Raises ContainerError.
    """
    from socket import create_server

    with create_server(("127.0.0.1", PORT)) as listener:
        reader, ready = os.pipe()
        with Fd(reader):
            with Fd(ready):
                if os.fork() == 0:
                    _relay(listener, proxy, ready)
            if not os.read(reader, 1):
                raise ContainerError("the relay to the proxy ended before it was ready", hint="see the messages above")


def _relay(listener: socket, proxy: int, ready: int) -> NoReturn:
    """In the child: run the relay."""
    try:
        from enroot_py.features.networks import relay
        from enroot_py.runtime import namespaces

        os.setsid()  # Ctrl-C must reach only the container's program
        namespaces.unshare(linux.CLONE_NEWNS)
        namespaces.hide()
        relay.main(listener, proxy, ready)
    except Exception as e:
        log.error(f"the relay to the proxy cannot start: {e}")
    finally:
        os._exit(1)
