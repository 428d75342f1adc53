"""Run shells, commands, sftp and socket connections for ssh in a container.

The ssh server forks a separate process for this work, the nursery, before the server reads any key. The nursery stays
outside of the container. Each child of the nursery enters the container, and executes a program, serves sftp or
connects a socket. So programs of the image never see a key or the connection, and the ssh server opens no path of the
image. A request is a message with descriptors, and the reply is the exit status.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from typing import Any, NoReturn

from enroot_py.base.errors import PenrootError
from enroot_py.runtime import execute, namespaces, processes
from pyxis_py.features.ssh import sftp
from pyxis_py.node.held import Lent

_MAX_MESSAGE_BYTES = 1 << 17  # the limit of a command line: MAX_ARG_STRLEN of execve(2)
_GRACE_S = 2.0
_SHELLS = ("/bin/bash", "/bin/sh")


class Inside:
    """The ssh server's end of the socket to the nursery. It sends requests, and receives exit statuses."""

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self._ended: dict[int, asyncio.Future[int]] = {}
        self._last = 0
        asyncio.get_running_loop().add_reader(control.fileno(), self._hear)

    def start(self, fds: tuple[int, ...], **request: object) -> tuple[int, asyncio.Future[int]]:
        """Start a child with these descriptors. Return its number and a future for its exit status.

        Raises OSError.
        """
        self._last += 1
        self._send({"number": self._last, **request}, fds)
        self._ended[self._last] = asyncio.get_running_loop().create_future()
        return self._last, self._ended[self._last]

    def signal(self, number: int, name: str) -> None:
        if number in self._ended:
            self._send({"number": number, "signal": name}, ())

    async def connect(self, addresses: list[str] | list[tuple[str, int]]) -> socket.socket:
        """Return a socket connected to one of these paths or ports in the container. Raises OSError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            _, ended = self.start((theirs.fileno(),), kind="connect", addresses=addresses)
            if failure := await ended:
                raise OSError(failure, os.strerror(failure))
            _, fds, _, _ = socket.recv_fds(ours, 1, 1)
        return socket.socket(fileno=fds[0])

    def _send(self, message: dict[str, object], fds: tuple[int, ...]) -> None:
        data = json.dumps(message).encode()
        if len(data) > _MAX_MESSAGE_BYTES:
            raise OSError(errno.E2BIG, os.strerror(errno.E2BIG))
        socket.send_fds(self.control, [data], fds)

    def _hear(self) -> None:
        message = self.control.recv(_MAX_MESSAGE_BYTES)
        if not message:  # the nursery was killed, so no child can be started or tracked any more
            os._exit(1)
        answer = json.loads(message)
        ended = self._ended.pop(answer["number"])
        if not ended.cancelled():
            ended.set_result(answer["status"])


class Nursery:
    """The process whose children join the container."""

    def __init__(self, control: socket.socket, lent: Lent) -> None:
        self.control = control
        self.lent = lent
        self._children: dict[int, tuple[int, int]] = {}  # by pidfd: PID and request number of a child

    def serve(self) -> NoReturn:
        """Serve requests until the server exits, then end all children."""
        while True:
            poll = select.poll()
            for fd in (self.control.fileno(), *self._children):
                poll.register(fd, select.POLLIN)
            for fd, _ in poll.poll():
                if fd in self._children:
                    self._bury(fd)
                elif not self._attend():
                    self._end()

    def _attend(self) -> bool:
        message, fds, _, _ = socket.recv_fds(self.control, _MAX_MESSAGE_BYTES, 3)
        if not message:
            return False
        request = json.loads(message)
        if "signal" in request:
            for pid, number in self._children.values():
                if number == request["number"]:
                    _signal_group(pid, getattr(signal, f"SIG{request['signal']}", signal.SIGTERM))
            return True
        for fd in fds:
            os.set_inheritable(fd, False)
        try:
            pid = os.fork()
        except OSError as e:  # such as the job's limit of processes; the other children continue
            if request["kind"] == "run":
                os.write(fds[-1], f"[ERROR] cannot start a process: {e.strerror}\n".encode())
            self._answer(request["number"], e.errno or 1)
        else:
            if pid == 0:
                self._become(request, fds)
            self._children[os.pidfd_open(pid)] = pid, request["number"]
        for fd in fds:
            os.close(fd)
        return True

    def _answer(self, number: int, status: int) -> None:
        self.control.send(json.dumps({"number": number, "status": status}).encode())

    def _end(self) -> NoReturn:
        """End all children by SIGHUP, as a closed terminal does, and kill the rest after a grace period."""
        deadline = time.monotonic() + _GRACE_S
        for number in (signal.SIGHUP, signal.SIGCONT):
            for pid, _ in self._children.values():
                _signal_group(pid, number)
        while self._children and (remaining_s := deadline - time.monotonic()) > 0:
            for fd in select.select(list(self._children), (), (), remaining_s)[0]:
                os.waitpid(self._children.pop(fd)[0], 0)
        for pid, _ in self._children.values():
            _signal_group(pid, signal.SIGKILL)
        os._exit(0)

    def _bury(self, fd: int) -> None:
        pid, number = self._children.pop(fd)
        os.close(fd)
        _, status = os.waitpid(pid, 0)
        self._answer(number, os.waitstatus_to_exitcode(status))

    def _become(self, request: dict[str, Any], fds: list[int]) -> NoReturn:
        """In a child: enter the container and serve the request."""
        status = 1
        try:
            self.control.close()
            os.setsid()
            self._enter()
            if request["kind"] == "connect":
                status = _connect(request["addresses"], fds[0])
            elif request["kind"] == "sftp":
                status = sftp.serve(fds[0], request["client"])
            else:
                for number in (0, 1, 2):
                    os.dup2(fds[min(number, len(fds) - 1)], number)
                _run(request["command"], {**self.lent.environ, **request["environ"]}, tty=request["tty"])
        except PenrootError as e:
            sys.stderr.write(f"[ERROR] {e}\n")
            status = e.exit_code
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)

    def _enter(self) -> None:
        """Enter the container, and the home or working directory there. Raises PenrootError."""
        superuser = "user" not in self.lent.spaces
        processes.enter(self.lent.spaces, os.getpid(), new_keyring=self.lent.new_keyring)
        if not superuser:
            namespaces.confine(remap_root=self.lent.remap_root)
        for directory in (self.lent.environ.get("HOME", ""), self.lent.workdir):
            try:
                return os.chdir(directory)
            except OSError:
                continue
        os.chdir("/")


def _signal_group(pid: int, number: int) -> None:
    """Send a signal to the process group of a child, or only to the child if it has not called setsid(2) yet."""
    for send in (os.killpg, os.kill):
        try:
            return send(pid, number)
        except ProcessLookupError:
            continue


def _connect(addresses: list[Any], answer: int) -> int:
    """Send back a socket connected to one of the addresses. Return 0, or the errno if none can be reached."""
    failure = 1
    for address in addresses:
        path = isinstance(address, str)
        family = socket.AF_UNIX if path else socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as connection:
            try:
                connection.connect(address if path else tuple(address))
            except OSError as e:
                failure = e.errno or 1
            else:
                with socket.socket(fileno=answer) as asker:
                    socket.send_fds(asker, [b"."], [connection.fileno()])
                return 0
    return failure


def _run(command: str | None, environ: dict[str, str], *, tty: bool) -> NoReturn:
    """Become a login shell, or a shell that runs ``command``. Raises CommandError."""
    if tty:
        import fcntl
        import termios

        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    shell = environ.get("SHELL", "")
    shell = next((path for path in (shell, *_SHELLS) if path and os.access(path, os.X_OK)), _SHELLS[-1])
    environ["SHELL"] = shell
    environ["PWD"] = os.getcwd()
    if command is None:
        execute.execute((shell,), environ, argv0="-" + os.path.basename(shell))
    execute.execute((shell, "-c", command), environ)
