"""Connections of HTTP to servers that may be hostile: patience with what they send, and a look at where they are.

What http.client reads before a body has no limit in time, and none in length either: a header that comes
byte by byte, or ``100 Continue`` for ever, would hold a process until somebody kills it.
"""

from __future__ import annotations

import http.client
import io
import socket
import time
from collections.abc import Callable
from typing import Any

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection

_HEAD = 1 << 20  # bytes before the body
_LEAST = 1000  # bytes a second: less is no transfer


class _Patient(io.RawIOBase):
    """What comes from a socket, while it comes: less than _LEAST bytes a second for ``stall`` seconds is an error."""

    def __init__(self, raw: io.RawIOBase, stall: float) -> None:
        self._raw = raw
        self._stall = stall
        self._head = _HEAD  # bytes left; None from the body on
        self._waited = 0.0  # seconds, and the bytes that came in them
        self._came = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int | None:
        began = time.monotonic()
        count = self._raw.readinto(buffer)
        self._waited += time.monotonic() - began
        self._came += count or 0
        if self._head:
            self._head = max(0, self._head - (count or 0))
            if not self._head:
                raise http.client.HTTPException(f"more than {_HEAD >> 20} MiB before the body")
        if count and self._waited > self._stall > 0:
            if self._came < _LEAST * self._waited:
                raise http.client.HTTPException(f"only {self._came} bytes within ENROOT_STALL_TIMEOUT")
            self._waited, self._came = 0.0, 0
        return int(count) if count is not None else None

    def begin_body(self) -> None:
        self._head, self._waited, self._came = 0, 0.0, 0

    def close(self) -> None:
        self._raw.close()
        super().close()


def classes(
    stall: float, check: Callable[[HTTPConnection, str], None] | None = None
) -> dict[str, type[urllib3.HTTPConnectionPool]]:
    """Pools for a PoolManager, by scheme; ``check`` is told the address of a new connection's peer, and may refuse."""

    class Response(http.client.HTTPResponse):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self._patient = _Patient(self.fp.detach(), stall)
            self.fp = io.BufferedReader(self._patient)

        def begin(self) -> None:
            super().begin()
            self._patient.begin_body()

    def checked(connection: HTTPConnection, made: socket.socket) -> socket.socket:
        if check is not None:
            try:
                check(connection, str(made.getpeername()[0]))
            except BaseException:
                made.close()
                raise
        return made

    class Plain(HTTPConnection):
        response_class = Response

        def _new_conn(self) -> socket.socket:
            return checked(self, super()._new_conn())

    class Secure(HTTPSConnection):
        response_class = Response

        def _new_conn(self) -> socket.socket:
            return checked(self, super()._new_conn())

    class Pool(urllib3.HTTPConnectionPool):
        ConnectionCls = Plain

    class SecurePool(urllib3.HTTPSConnectionPool):
        ConnectionCls = Secure

    return {"http": Pool, "https": SecurePool}
