"""Messages between an API process, its launcher and the launcher's children: JSON lines, packets, exit statuses."""

from __future__ import annotations

import _socket
import json
import os
import sys

from enroot_py.base import log
from enroot_py.base.errors import PenrootError, cause

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

    Message = Mapping[str, Any]

_RECEIVE_BYTES = 1 << 16
STATUS_BYTES = 4  # a return code as in subprocess (negative for a signal), in the machine's byte order


def encoded(message: Message) -> bytes:
    return json.dumps(message).encode() + b"\n"


def decoded(line: bytes) -> Message:
    message: Message = json.loads(line)
    return message


class Conversation:
    """One request and its answer. It ends when the answering child exits or executes a program."""

    def __init__(self, socket: _socket.socket) -> None:
        self.socket = socket

    def send(self, message: Message) -> None:
        """Send one message. Raises OSError if the peer has ended."""
        self.socket.sendall(encoded(message))

    def lines(self) -> Iterator[bytes]:
        """Yield the peer's messages as text until the conversation ends. Raises OSError."""
        rest = b""
        while part := self.socket.recv(_RECEIVE_BYTES):
            *lines, rest = (rest + part).split(b"\n") if b"\n" in part else [rest + part]
            yield from lines

    def receive(self) -> Iterator[Message]:
        """Yield the peer's messages until the conversation ends. Raises OSError, ValueError."""
        return map(decoded, self.lines())

    def log(self, level: str, text: str) -> None:
        """Send a log message. log.py calls this for each message of the child."""
        self.send({"log": text, "level": level})

    def fail(self, error: BaseException) -> None:
        """Send an error's class, text, hint and exit status. For a bug of penroot, the hint names the line of code."""
        error = cause(error) or error
        if not isinstance(error, PenrootError):
            error = unexpected(error)
        kind, status = type(error).__name__, error.exit_code
        self.send({"error": str(error), "kind": kind, "hint": error.hint, "exit_code": status})


def unexpected(error: BaseException) -> PenrootError:
    """Return an error for a failed system call or for a bug of penroot. The hint is a fix or names the line of code."""
    from enroot_py.base import filesystems

    place = filesystems.place(error)
    if isinstance(error, OSError):
        message, hint = filesystems.in_words(error)
        return PenrootError(message, hint=hint or place)
    return PenrootError(repr(error), hint=f"a bug in penroot, {place}")


def send_with_fds(socket: _socket.socket, data: bytes, fds: tuple[int, ...]) -> None:
    """Send one packet with descriptors: unix(7), SCM_RIGHTS. Raises OSError."""
    rights = b"".join(fd.to_bytes(4, sys.byteorder) for fd in fds)
    socket.sendmsg([data], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)] if fds else [])


def receive_with_fds(socket: _socket.socket, max_bytes: int, max_fds: int) -> tuple[bytes, list[int]]:
    """Return a packet with descriptors, without waiting. Raises OSError.

    If this process cannot open so many descriptors, return at most the first one.
    """
    room, flags = _socket.CMSG_SPACE(4 * max_fds), _socket.MSG_CMSG_CLOEXEC | _socket.MSG_DONTWAIT
    data, controls, flags, _ = socket.recvmsg(max_bytes, room, flags)
    fds = [fd for _, _, content in controls for fd in _numbers(content)]
    while flags & _socket.MSG_CTRUNC and len(fds) > 1:
        os.close(fds.pop())
    return data, fds


def _numbers(data: bytes) -> list[int]:
    return [int.from_bytes(data[at : at + 4], sys.byteorder) for at in range(0, len(data) // 4 * 4, 4)]


def send_status(socket: _socket.socket, status: int) -> None:
    """Send a status of waitpid(2) as a return code of subprocess (negative for a signal). Ignore a closed socket."""
    try:
        socket.send(os.waitstatus_to_exitcode(status).to_bytes(STATUS_BYTES, sys.byteorder, signed=True))
    except OSError as e:
        log.debug(f"nobody waits for a status: {e.strerror}")
