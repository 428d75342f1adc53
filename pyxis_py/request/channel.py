"""Messages between the plugin, helpers and tasks: the protocol in c_shims/spank/README.md."""

from __future__ import annotations

import _socket
import errno
import os
import select
import sys

from enroot_py.base import cgroups, log
from enroot_py.base.errors import PenrootError, cause
from enroot_py.base.fds import Fd
from pyxis_py.request.job import Job

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Pairs = list[tuple[str, str]]

# Descriptors of a helper: the socket of the first request, and the socket through which tasks and slurmstepd connect.
SOCKET, CONTROL = 3, 4
_MAX_MESSAGE_BYTES = 64 << 20
_MAX_FDS = 8
# Kill a child that this number of consecutive checks has found stopped.
_CHECK_INTERVAL_S, _MAX_STOPPED_CHECKS = 1.5, 6


def tell(text: str) -> None:
    """Send the user a line without the node's name, so that programs can parse it."""
    log.sink("TELL", text)


class Channel:
    """Messages of key and value pairs over a stream socket."""

    def __init__(self, socket: _socket.socket) -> None:
        self.socket = socket

    def receive(self) -> Pairs:
        """Return one message. Raises EOFError if the peer has ended."""
        return self._message(b"")

    def receive_with_fds(self, sender: int = 0) -> tuple[Pairs, list[int]]:
        """Return one message, and the descriptors that were sent with the first byte.

        If ``sender`` is given, a message of any other process raises PermissionError. The kernel names the process if
        the socket has SO_PASSCRED, unix(7). Raises EOFError, OSError.
        """
        room = _socket.CMSG_SPACE(_MAX_FDS * 4) + _socket.CMSG_SPACE(12)
        first, controls, _, _ = self.socket.recvmsg(1, room, _socket.MSG_CMSG_CLOEXEC)
        data = {kind: content for level, kind, content in controls if level == _socket.SOL_SOCKET}
        fds = numbers(data.get(_socket.SCM_RIGHTS, b""))
        if not first:
            raise EOFError("the peer is gone")
        if sender and numbers(data.get(_socket.SCM_CREDENTIALS, b""))[:1] != [sender]:
            for fd in fds:
                os.close(fd)
            raise PermissionError(errno.EPERM, "another process has answered")
        return self._message(first), fds

    def _message(self, begun: bytes) -> Pairs:
        size = int.from_bytes(begun + self._exactly(4 - len(begun)), "little")
        if size > _MAX_MESSAGE_BYTES:
            raise EOFError(f"message of {size} bytes")
        return _pairs(self._exactly(size))

    def _exactly(self, size: int) -> bytes:
        parts = []
        while size:
            part = self.socket.recv(min(size, 1 << 20))
            if not part:
                raise EOFError("the peer is gone")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def send(self, pairs: Iterable[tuple[str, str]], fds: tuple[int, ...] = ()) -> None:
        """Send one message, with file descriptors as SCM_RIGHTS, unix(7). Raises OSError."""
        data, sent = _framed(pairs), 0
        while sent < len(data):
            sent += self._send(data[sent:], fds if not sent else ())

    def _send(self, data: bytes | memoryview, fds: tuple[int, ...]) -> int:
        if not fds:
            return self.socket.send(data)
        rights = b"".join(fd.to_bytes(4, sys.byteorder) for fd in fds)
        return self.socket.sendmsg([data], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)])

    def log(self, level: str, text: str) -> None:
        names = {"INFO": "info", "WARN": "warn", "ERROR": "error", "HINT": "error", "TELL": "tell"}
        if level in names:
            self.send((("log", text), ("level", names[level])))

    def fail(self, error: PenrootError) -> None:
        lines = [("error", line) for line in log.printable(str(error)).split("\n")]
        self.send([*lines, *((("hint", log.printable(error.hint)),) if error.hint else ())])


def forked(act: Callable[[Channel], object], failure: str) -> tuple[Channel, int]:
    """Fork a child that calls ``act`` with one end of a channel; return the other end and the child's PID.

    ``failure`` begins the message about an unexpected exception.
    """
    from enroot_py.base import filesystems  # noqa: F401  # for unexpected(): in the container, nothing can be imported

    ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_STREAM)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            ours.close()
            channel = Channel(theirs)
            log.sink = channel.log
            act(channel)
            status = 0
        except BaseException as e:
            channel.fail(cause(e) or (e if isinstance(e, PenrootError) else unexpected(e, failure)))
        finally:
            os._exit(status)
    theirs.close()
    return Channel(ours), child


def unexpected(error: BaseException, failure: str = "") -> PenrootError:
    """Return an error that begins with ``failure``, and explains a failed system call or names the line of a bug."""
    from enroot_py.base import filesystems

    location = filesystems.place(error)
    if isinstance(error, OSError):
        message, hint = filesystems.in_words(error)
        return PenrootError(failure + message, hint=hint or location)
    return PenrootError(f"{failure}{error!r}", hint=f"a bug in penroot, {location}")


def await_answer(channel: Channel, child: int) -> tuple[Pairs, list[int]]:
    """Return the answer of ``child`` about the container that it enters. Print its log messages meanwhile.

    Raises PenrootError, also for a stopped child, and EOFError if the child has ended.
    """
    stopped, socket, poll = 0, channel.socket.fileno(), select.poll()
    with Fd(os.pidfd_open(child)) as process:
        poll.register(process, select.POLLIN)  # a process that a hook has left behind can keep the socket open
        poll.register(socket, select.POLLIN)
        while True:
            ready = [fd for fd, _ in poll.poll(_CHECK_INTERVAL_S * 1000)]
            if not ready:
                stopped = stopped + 1 if cgroups.pause_reason(child) else 0
                if stopped < _MAX_STOPPED_CHECKS:
                    continue
                os.kill(child, 9)
                raise PenrootError("the process that enters the container was stopped", hint="run the command again")
            if socket not in ready:
                raise EOFError
            pairs, fds = channel.receive_with_fds()
            if pairs[0][0] != "log":
                break
            log.sink(pairs[1][1].upper(), pairs[0][1])
    if pairs[0][0] == "error":
        lines = [value for key, value in pairs if key == "error"]
        raise PenrootError("\n".join(lines), hint=dict(pairs).get("hint", ""))
    return pairs, fds


class Client(Channel):
    """A task or step that sends a request. Reading and answering never block, so no client delays another."""

    def __init__(self, socket: _socket.socket, *, of_step: bool) -> None:
        """With ``of_step``, the client is a task of this step, or slurmstepd. Otherwise it is another step."""
        super().__init__(socket)
        socket.setblocking(False)
        self.of_step = of_step
        self.events = select.POLLIN
        self._in = bytearray()
        self._out = memoryview(b"")
        self._fds: tuple[int, ...] = ()

    def request(self) -> Job | None:
        """Read a part of the request. Return the request when it is complete, None until then.

        Raises EOFError, ValueError, KeyError, OSError.
        """
        part = self.socket.recv(1 << 20)
        if not part:
            raise EOFError("the peer is gone")
        self._in += part
        size = int.from_bytes(self._in[:4], "little")
        if size > (_MAX_MESSAGE_BYTES if self.of_step else 4096):
            raise ValueError(f"message of {size} bytes")
        if len(self._in) < 4 + size or len(self._in) < 4:
            return None
        return Job(_pairs(bytes(self._in[4 : 4 + size])))

    def send(self, pairs: Iterable[tuple[str, str]], fds: tuple[int, ...] = ()) -> None:
        """Store the answer for ``flush``."""
        self._out, self._fds, self.events = memoryview(_framed(pairs)), fds, select.POLLOUT

    def flush(self) -> bool:
        """Send as much of the answer as the socket takes. Return whether all is sent. Raises OSError."""
        self._out = self._out[self._send(self._out, self._fds) :]
        self._fds = ()
        return not self._out


def numbers(data: bytes) -> list[int]:
    """Return the numbers of a control message, unix(7): descriptors, or the sender's process, user and group."""
    return [int.from_bytes(data[at : at + 4], sys.byteorder) for at in range(0, len(data) // 4 * 4, 4)]


def _framed(pairs: Iterable[tuple[str, str]]) -> bytes:
    payload = os.fsencode("".join(f"{key}\0{value}\0" for key, value in pairs))
    return len(payload).to_bytes(4, "little") + payload


def _pairs(payload: bytes) -> Pairs:
    words = os.fsdecode(payload).split("\0")[:-1]
    return list(zip(words[::2], words[1::2], strict=True))


def assignments(pairs: Pairs, key: str) -> dict[str, str]:
    """Return the NAME=VALUE values of a key as a dict."""
    return dict(value.partition("=")[::2] for each, value in pairs if each == key)
