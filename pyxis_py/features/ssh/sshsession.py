"""Requests of an ssh client: shells, commands, sftp, and forwarded connections."""

from __future__ import annotations

import asyncio
import fcntl
import functools
import os
import re
import signal
import socket
import struct
import termios
from collections.abc import Callable, Mapping
from typing import Any

import asyncssh
from asyncssh.constants import EXTENDED_DATA_STDERR

from enroot_py.base import log
from pyxis_py.features.ssh.joined import Inside

_LOCAL = ("localhost", "127.0.0.1", "::1")
_ACCEPTED = re.compile("LANG|LC_[A-Z]+|COLORTERM")  # variables that a client may set with SendEnv
_BLOCK_BYTES = 1 << 18
_DRAIN_S = 1.0  # wait for terminal output after exit: a background process may keep the terminal open
# Terminal modes of RFC 4254, section 8, under their termios(3) names: characters, and flags. A row of
# flags has the index of its field in tcgetattr(), and the number of its first mode.
_CHARACTERS = dict(
    zip(
        (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 13, 14, 18),
        "VINTR VQUIT VERASE VKILL VEOF VEOL VEOL2 VSTART VSTOP VSUSP VREPRINT VWERASE VLNEXT VDISCARD".split(),
        strict=True,
    )
)
_FLAGS = (
    (0, 30, "IGNPAR PARMRK INPCK ISTRIP INLCR IGNCR ICRNL IUCLC IXON IXANY IXOFF IMAXBEL IUTF8"),
    (3, 50, "ISIG ICANON XCASE ECHO ECHOE ECHOK ECHONL NOFLSH TOSTOP IEXTEN ECHOCTL ECHOKE PENDIN"),
    (1, 70, "OPOST OLCUC ONLCR OCRNL ONOCR ONLRET"),
)


async def copy(source: Any, target: Any) -> None:
    """Copy a stream to another one until its end."""
    try:
        while data := await source.read(_BLOCK_BYTES):
            target.write(data)
            await target.drain()
        target.write_eof()
    except (OSError, asyncssh.Error):
        target.close()


class JobServer(asyncssh.SSHServer):
    """Answers the requests of an authenticated client."""

    def __init__(self, inside: Inside, *, own_network: bool) -> None:
        self._inside = inside
        self._own_network = own_network
        self._client = ""

    def connection_made(self, connection: asyncssh.SSHServerConnection) -> None:
        self._connection = connection

    def session_requested(self) -> JobSession:
        return JobSession(self._inside, str(self._connection.get_extra_info("client_version", "")))

    def connection_requested(self, dest_host: str, dest_port: int, orig_host: str, orig_port: int) -> Any:
        """ssh -L and -D: connect from the node, unless the container has a private network."""
        return self._open((dest_host, dest_port)) if self._own_network else True

    def unix_connection_requested(self, dest_path: str) -> Any:
        return self._open(dest_path)

    def server_requested(self, listen_host: str, listen_port: int) -> bool:
        """ssh -R: listen only on loopback addresses, and not if the container has a private network."""
        return listen_host in _LOCAL and not self._own_network

    def _open(self, address: str | tuple[str, int]) -> Callable[..., Any]:
        """Return a handler that relays a connection to a socket in the container.

        The handler closes the connection if it cannot connect to the socket.
        """

        async def relay(reader: Any, writer: Any) -> None:
            try:
                connection = await self._inside.connect(await _numeric(address))
            except OSError as e:
                log.debug(f"ssh: {address}: {e.strerror}")
                writer.close()
                return
            source, target = await asyncio.open_connection(sock=connection)
            await asyncio.gather(copy(reader, target), copy(source, writer))
            target.close()
            writer.close()

        return relay


async def _numeric(address: str | tuple[str, int]) -> list[str] | list[tuple[str, int]]:
    """Resolve an address on the host. No library of the image may resolve names. Raises OSError."""
    if isinstance(address, str):
        return [address]
    resolved = await asyncio.get_running_loop().getaddrinfo(*address, type=socket.SOCK_STREAM)
    return [(str(numeric[0]), address[1]) for *_, numeric in resolved]


class JobSession(asyncssh.SSHServerSession[bytes]):
    """One shell, command or sftp server, and the pumps of its input and output."""

    def __init__(self, inside: Inside, client: str) -> None:
        self._inside = inside
        self._client = client
        self._number = 0
        self._terminal: tuple[int, int] | None = None  # descriptors of both ends
        self._input: Pump | None = None
        self._outputs: list[Pump] = []
        self._early: list[bytes] = []  # input before the program has started
        self._ends = False

    def connection_made(self, chan: asyncssh.SSHServerChannel[bytes]) -> None:
        self._chan = chan

    def pty_requested(self, term_type: str, term_size: Any, term_modes: Mapping[int, int]) -> bool:
        self._terminal = os.openpty()
        _set_modes(self._terminal[1], term_modes)
        _set_size(self._terminal[0], term_size)
        return True

    def terminal_size_changed(self, width: int, height: int, pixwidth: int, pixheight: int) -> None:
        if self._terminal:
            _set_size(self._terminal[0], (width, height, pixwidth, pixheight))

    def shell_requested(self) -> bool:
        return True

    def exec_requested(self, command: str) -> bool:
        return True

    def subsystem_requested(self, subsystem: str) -> bool:
        return subsystem == "sftp"

    def session_started(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            ended = await self._start()
        except OSError as e:
            self._chan.write(f"[ERROR] cannot start a process: {e.strerror}\n".encode(), EXTENDED_DATA_STDERR)
            return self._chan.exit(1)
        status = await ended
        await asyncio.wait([pump.ended for pump in self._outputs], timeout=_DRAIN_S if self._terminal else None)
        if status >= 0:
            self._chan.exit(status)
        else:
            self._chan.exit_with_signal(signal.Signals(-status).name.removeprefix("SIG"))

    async def _start(self) -> asyncio.Future[int]:
        """Start the requested program. Return a future for its exit status. Raises OSError."""
        if self._chan.get_subsystem():
            ours, theirs = socket.socketpair()
            with theirs:
                self._number, ended = self._inside.start((theirs.fileno(),), kind="sftp", client=self._client)
            await self._take_input(asyncio.get_running_loop().create_connection(self._output, sock=ours))
            return ended
        environ = {name: value for name, value in self._chan.get_environment().items() if _ACCEPTED.fullmatch(name)}
        if kind := self._chan.get_terminal_type():
            environ["TERM"] = kind
        ends: tuple[int, ...]
        others: tuple[int, ...]
        if self._terminal:
            master, slave = self._terminal
            ends, others = (os.dup(master), master), (slave,)
        else:
            (stdin, write), (read, stdout), (errors, stderr) = os.pipe(), os.pipe(), os.pipe()
            ends, others = (write, read, errors), (stdin, stdout, stderr)
        try:
            request = {"command": self._chan.get_command(), "environ": environ, "tty": bool(self._terminal)}
            self._number, ended = self._inside.start(others, kind="run", **request)
        finally:
            for fd in others:
                os.close(fd)
        loop = asyncio.get_running_loop()
        for fd, datatype in zip(ends[1:], (None, EXTENDED_DATA_STDERR), strict=False):
            await loop.connect_read_pipe(functools.partial(self._output, datatype), os.fdopen(fd, "rb", 0))
        await self._take_input(loop.connect_write_pipe(lambda: Pump(self._chan), os.fdopen(ends[0], "wb", 0)))
        return ended

    def _output(self, datatype: int | None = None) -> Pump:
        self._outputs.append(Pump(self._chan, datatype))
        return self._outputs[-1]

    async def _take_input(self, connecting: Any) -> None:
        """Connect the input of the program. First send the data that came before the program started."""
        _, self._input = await connecting
        self._input.transport.write(b"".join(self._early))
        self._chan.resume_reading()
        if self._ends:
            self.eof_received()

    def data_received(self, data: bytes, datatype: int | None) -> None:
        if self._input:
            self._input.transport.write(data)
        else:
            self._early.append(data)
            self._chan.pause_reading()

    def eof_received(self) -> bool:
        """Close the input of the program. A terminal stays open."""
        self._ends = True
        if self._input and not self._terminal:
            self._input.transport.write_eof()
        return True

    def pause_writing(self) -> None:
        for pump in self._outputs:
            pump.transport.pause_reading()

    def resume_writing(self) -> None:
        for pump in self._outputs:
            pump.transport.resume_reading()

    def signal_received(self, signal: str) -> None:
        self._inside.signal(self._number, signal)

    def connection_lost(self, exc: Exception | None) -> None:
        self._inside.signal(self._number, "HUP")
        for pump in (self._input, *self._outputs):
            if pump:
                pump.transport.close()


class Pump(asyncio.Protocol):
    """One input or output of a program, with flow control in both directions."""

    def __init__(self, chan: asyncssh.SSHServerChannel[bytes], datatype: int | None = None) -> None:
        self._chan = chan
        self._datatype = datatype
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._chan.write(data, self._datatype)

    def pause_writing(self) -> None:
        self._chan.pause_reading()

    def resume_writing(self) -> None:
        # Do not resume directly: asyncio calls this during a write, and data that arrives now with EOF would be lost.
        asyncio.get_running_loop().call_soon(self._chan.resume_reading)

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set_result(None)
        self._chan.resume_reading()  # do not block the channel: the program reads no more input


def _set_size(fd: int, size: tuple[int, int, int, int]) -> None:
    width, height, *pixels = size
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("4H", height, width, *pixels))


def _set_modes(fd: int, modes: Mapping[int, int]) -> None:
    fields = termios.tcgetattr(fd)
    for mode, name in _CHARACTERS.items():
        if mode in modes and hasattr(termios, name):
            fields[6][getattr(termios, name)] = bytes([modes[mode] & 255]) if modes[mode] != 255 else b"\0"
    for field, first, names in _FLAGS:
        for mode, name in enumerate(names.split(), first):
            if mode in modes:
                flag = getattr(termios, name, 0)
                fields[field] = fields[field] | flag if modes[mode] else fields[field] & ~flag
    termios.tcsetattr(fd, termios.TCSANOW, fields)
