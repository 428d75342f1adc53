"""Serve the files of a container over sftp, with asyncssh's server in a process that has joined the container."""

from __future__ import annotations

import asyncio
import socket
import sys
from typing import Any, cast

import asyncssh
from asyncssh.logging import logger
from asyncssh.sftp import run_sftp_server

_VERSION = 3  # of the sftp protocol, as in OpenSSH


class _Files(asyncssh.SFTPServer):
    """All files that the process may open. Owners are numbers: a name lookup would load libraries of the image."""

    def format_user(self, uid: int | None) -> str:
        return str(uid)

    def format_group(self, gid: int | None) -> str:
        return str(gid)


class _Stream:
    """A socket as both directions of a channel, for asyncssh's sftp server."""

    logger = logger

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, client: str) -> None:
        self.channel = self
        self.readexactly = reader.readexactly
        self.write = writer.write
        self.close = writer.close
        self.is_closing = writer.is_closing
        self._client = client

    def get_extra_info(self, name: str, default: object = None) -> object:
        return self._client if name == "client_version" else default


def serve(fd: int, client: str) -> int:
    """Serve until the peer closes the socket. Return the exit status."""
    # Prevent further imports, which would load files of the image.
    sys.path.clear()
    sys.meta_path.clear()
    asyncio.run(_serve(socket.socket(fileno=fd), client))
    return 0


async def _serve(connection: socket.socket, client: str) -> None:
    stream = cast(Any, _Stream(*await asyncio.open_connection(sock=connection), client))
    await run_sftp_server(_Files(cast(Any, None)), stream, stream, _VERSION)
