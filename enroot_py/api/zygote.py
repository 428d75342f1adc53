"""A zygote: a child of the launcher that clones process 1 of each container of one squashfs file.

A container of a squashfs file runs in a user namespace below the user namespace of the FUSE server (see
runtime/sharing.py). The launcher cannot enter the server's namespace, because it could not return. So it forks a
zygote, which enters the namespace once. For each start, the zygote clones a process whose parent is the launcher:
clone(2), CLONE_PARENT. The zygote keeps the server running. The zygote ends with the server, or when the launcher
forgets the plan of the start (children.Plan) and kills the zygote.
"""

from __future__ import annotations

import _signal
import _socket
import json
import os
import select
import sys
from contextlib import suppress

from enroot_py.api import children
from enroot_py.api.messages import Conversation, receive_with_fds, send_with_fds
from enroot_py.base import linux, log, proc
from enroot_py.base.errors import NamespaceError
from enroot_py.base.fds import Fd
from enroot_py.runtime import namespaces

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

    from enroot_py.runtime.sharing import Entry

_PACKET_BYTES = 1 << 17  # the socket's buffer is larger: socket(7), wmem_default
_MAX_FDS = 6
_PID_BYTES = 4
_READY = b"ready"
_ANSWER_TIMEOUT_S = 2  # then the launcher kills the zygote, which is stopped or waits for a server


class Zygote:
    """The launcher's end of a zygote."""

    def __init__(self, plan: children.Plan, tools: children.Tools) -> None:
        """Fork the zygote for the containers of a prepared start. Raises OSError."""
        self._socket, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
        self._is_ready = False
        launcher = os.getpid()
        self.pid = os.fork()  # 0 after the launcher has reaped the zygote
        if self.pid == 0:
            _serve(theirs, plan, tools, launcher)
        theirs.close()

    def clone(self, verb: str, fds: list[int], argument: object) -> int:
        """Return the PID of a new child of the launcher, which answers a request; see children.start().

        Returns 0 if the launcher must fork instead, because no child handles the request: the zygote is not ready, has
        ended, does not answer or cannot clone, or the request is too long. Raises OSError without a free descriptor.
        """
        data = json.dumps((verb, argument, len(fds) + 1)).encode()
        if len(data) > _PACKET_BYTES or not self._is_ready and not self._await_ready():
            return 0
        ours, gate = os.pipe2(os.O_CLOEXEC)
        with Fd(gate):  # the child waits for a byte on this pipe, which means that the launcher knows its PID
            with Fd(ours):
                pid = self._ask(data, (*fds, ours))
            if pid:
                with suppress(BrokenPipeError):  # the child was killed
                    os.write(gate, b"1")
        return pid

    def _ask(self, data: bytes, fds: tuple[int, ...]) -> int:
        """Return the PID in the zygote's answer, or 0."""
        answer = b""
        try:
            send_with_fds(self._socket, data, fds)
            poll = select.poll()
            poll.register(self._socket, select.POLLIN)
            if poll.poll(1000 * _ANSWER_TIMEOUT_S):
                answer = self._socket.recv(_PID_BYTES)
        except OSError:  # the zygote has ended without reading the request
            pass
        if not answer:
            self.kill()
        return int.from_bytes(answer, sys.byteorder)

    def _await_ready(self) -> bool:
        try:
            self._is_ready = self._socket.recv(len(_READY), _socket.MSG_DONTWAIT) == _READY
        except OSError:  # not ready, or the zygote has ended
            return False
        return self._is_ready

    def kill(self) -> None:
        """End the zygote, even if it is stopped."""
        self._is_ready = False
        if self.pid:
            os.kill(self.pid, _signal.SIGKILL)

    def close(self) -> None:
        """End the zygote and close its socket."""
        self.kill()
        self._socket.close()


def _serve(socket: _socket.socket, plan: children.Plan, tools: children.Tools, launcher: int) -> NoReturn:
    """In the zygote: clone children until the launcher kills this process, or the server ends."""
    try:
        _signal.set_wakeup_fd(-1)
        _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)
        linux.close_others((0, 1, 2, socket.fileno(), *tools.fds()))
        log.sink = log.silent
        _end_with(launcher)
        entry = plan.find_server()
        if entry is not None and entry.pidfd >= 0:
            _serve_beneath(entry, socket, plan, tools, launcher)
    except (OSError, NamespaceError):  # the server has just ended: the launcher forks for the next start
        pass
    finally:
        os._exit(1)


def _end_with(launcher: int) -> None:
    """Let the kernel kill this process when the launcher ends. setns(2) cancels this: prctl(2)."""
    linux.prctl(linux.PR_SET_PDEATHSIG, _signal.SIGKILL)
    if os.getppid() != launcher:
        os._exit(1)


def _serve_beneath(
    entry: Entry, socket: _socket.socket, plan: children.Plan, tools: children.Tools, launcher: int
) -> None:
    from enroot_py.runtime import squashfuse

    poll = select.poll()
    poll.register(socket, select.POLLIN)
    with Fd(os.dup(entry.pidfd)) as server:
        poll.register(server, select.POLLIN)
        if not entry.enter():
            return
        _end_with(launcher)
        namespaces.unshare(linux.CLONE_NEWNS)
        with entry.open_device() as fuse, squashfuse.mount(fuse):  # this mount keeps the server running
            socket.send(_READY)
            while [fd for fd, _ in poll.poll()] == [socket.fileno()]:
                data, fds = receive_with_fds(socket, _PACKET_BYTES, _MAX_FDS)
                if not data or proc.Stat(entry.pid).is_stopped:
                    return
                verb, argument, count = json.loads(data)
                pid = 0
                if len(fds) == count:  # else this process had no room for all descriptors
                    pid = _clone(verb, argument, fds, fuse, plan, tools)
                socket.send(pid.to_bytes(_PID_BYTES, sys.byteorder))
                for fd in fds:
                    os.close(fd)


def _clone(verb: str, argument: object, fds: list[int], fuse: int, plan: children.Plan, tools: children.Tools) -> int:
    """Clone a child of the launcher as process 1 of new namespaces. Return its PID, or 0 if the kernel refuses."""
    from enroot_py.runtime import squashfuse

    try:
        with squashfuse.mount(fuse) as mount:
            child = linux.clone3(children.NAMESPACES | linux.CLONE_PARENT)
            if child == 0:
                _answer(verb, argument, fds, mount, plan, tools)
    except OSError:  # the launcher forks, and that child reports the error
        return 0
    return child


def _answer(
    verb: str, argument: object, fds: list[int], mount: int, plan: children.Plan, tools: children.Tools
) -> NoReturn:
    """In the child: handle the request when the launcher knows this process's PID. Exit if that never happens."""
    *fds, gate = fds

    def act() -> NoReturn:
        if not os.read(gate, 1):
            os._exit(1)
        os.close(gate)
        plan.join_server(mount)
        getattr(children, verb)(tools, conversation, fds, plan, None, argument)
        os._exit(1)

    try:
        conversation = Conversation(_socket.socket(fileno=fds[0]))
        children.answer([*fds, gate, mount, *tools.fds()], conversation, act)
    finally:
        os._exit(1)
