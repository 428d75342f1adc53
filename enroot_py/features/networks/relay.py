"""Relay connections from a port in a container to a Unix socket of the caller. Bytes pass unchanged."""

from __future__ import annotations

import asyncio
import os
import socket

from enroot_py.base import linux

BUFFER_BYTES = 64 << 10
_REFUSED = b"HTTP/1.1 502 the proxy of this container does not answer\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


def main(listener: socket.socket, proxy: int, ready: int) -> None:
    """Serve until the process is killed. ``proxy`` is a descriptor of the proxy's socket.

    Write a byte to the pipe ``ready`` when the relay listens. Close all descriptors that the relay does not need: it
    must not hold the pipes of the container's program open.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    linux.close_others((0, 1, 2, listener.fileno(), proxy, ready))
    asyncio.run(_serve(listener, f"/proc/self/fd/{proxy}", ready))


async def _serve(listener: socket.socket, proxy: str, ready: int) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            upstream = await asyncio.open_unix_connection(proxy)
        except OSError:
            writer.write(_REFUSED)
            writer.close()
            return
        await asyncio.gather(_copy(reader, upstream[1]), _copy(upstream[0], writer))

    server = await asyncio.start_server(serve, sock=listener)
    os.write(ready, b"1")
    os.close(ready)
    await server.serve_forever()


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    """Copy until the source ends. Then close only this direction: the answer may still be on its way."""
    try:
        while data := await source.read(BUFFER_BYTES):
            target.write(data)
            await target.drain()
        if target.can_write_eof():
            target.write_eof()
    except OSError:
        target.close()
