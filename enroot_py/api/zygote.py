"""A zygote: a child of the launcher that clones the first processes of containers of one squashfs file.

A container of a squashfs file runs in a user namespace below the namespace of the FUSE server: sharing.py. The launcher
cannot enter that namespace, because it could not return. So it forks a zygote, which enters the namespace once. For
each start, the zygote clones a process whose parent is the launcher: clone(2), CLONE_PARENT. The zygote keeps the
server running. It ends when the launcher closes its socket, or with the server.
"""

from __future__ import annotations

import _signal
import _socket
import json
import os
import select
import sys
from functools import partial

from enroot_py.api import children
from enroot_py.api.messages import Conversation, receive_with_fds, send_with_fds
from enroot_py.base import linux, log
from enroot_py.base.errors import ContainerError, NamespaceError
from enroot_py.base.fds import Fd
from enroot_py.runtime import namespaces

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

    from enroot_py.runtime.sharing import Entry

_PACKET_BYTES = 1 << 17  # the socket's buffer has more: socket(7), wmem_default
_MAX_FDS = 5
_PID_BYTES = 4
_READY = b"ready"


class Zygote:
    """The launcher's end of a zygote."""

    def __init__(self, plan: children.Plan, tools: children.Tools) -> None:
        """Fork the zygote for the containers of a prepared start. Raises OSError."""
        self._socket, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
        self._is_ready = False
        if os.fork() == 0:
            _serve(theirs, plan, tools)
        theirs.close()

    def clone(self, verb: str, fds: list[int], argument: object) -> int:
        """Return the PID of a new child of the launcher, which answers a request; see children.start().

        Returns 0 if the launcher must fork instead: the zygote is not ready or has ended, the request is too long, or
        the zygote cannot clone. Raises ContainerError if the zygote was killed meanwhile.
        """
        data = json.dumps((verb, argument, len(fds))).encode()
        if len(data) > _PACKET_BYTES or not self._is_ready and not self._await_ready():
            return 0
        try:
            send_with_fds(self._socket, data, tuple(fds))
            pid = self._socket.recv(_PID_BYTES)
        except OSError:  # the zygote has ended without reading the request
            return 0
        if not pid:
            raise ContainerError("the process that starts containers of this image was killed", hint="try again")
        return int.from_bytes(pid, sys.byteorder)

    def _await_ready(self) -> bool:
        try:
            self._is_ready = self._socket.recv(len(_READY), _socket.MSG_DONTWAIT) == _READY
        except OSError:  # not ready, or the zygote has ended
            return False
        return self._is_ready

    def close(self) -> None:
        """Let the zygote end."""
        self._socket.close()


def _serve(socket: _socket.socket, plan: children.Plan, tools: children.Tools) -> NoReturn:
    """In the zygote: clone children until the launcher closes the socket, or the server ends."""
    try:
        _signal.set_wakeup_fd(-1)
        _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)
        linux.close_others((0, 1, 2, socket.fileno(), *tools.fds()))
        log.sink = log.silent
        entry = plan.find_server()
        if entry is not None and entry.pidfd >= 0:
            _serve_beneath(entry, socket, plan, tools)
    except (OSError, NamespaceError):  # the server has just ended: the launcher forks for the next start
        pass
    finally:
        os._exit(0)


def _serve_beneath(entry: Entry, socket: _socket.socket, plan: children.Plan, tools: children.Tools) -> None:
    from enroot_py.runtime import squashfuse

    poll = select.poll()
    poll.register(socket, select.POLLIN)
    with Fd(os.dup(entry.pidfd)) as server:
        poll.register(server, select.POLLIN)
        if not entry.enter():
            return
        namespaces.unshare(linux.CLONE_NEWNS)
        with entry.open_device() as fuse, squashfuse.mount(fuse):  # this mount keeps the server running
            socket.send(_READY)
            while [fd for fd, _ in poll.poll()] == [socket.fileno()]:
                data, fds = receive_with_fds(socket, _PACKET_BYTES, _MAX_FDS)
                if not data:
                    return
                verb, argument, count = json.loads(data)
                pid = 0
                if len(fds) == count:  # else this process had no room for all descriptors
                    with squashfuse.mount(fuse) as mount:
                        pid = _clone(partial(_answer, verb, argument, fds, mount, plan, tools))
                socket.send(pid.to_bytes(_PID_BYTES, sys.byteorder))
                for fd in fds:
                    os.close(fd)


def _clone(act: Callable[[], NoReturn]) -> int:
    """Return the PID of a child of the launcher, process 1 of new namespaces, or 0 if the kernel refuses."""
    try:
        child = linux.clone3(children.NAMESPACES | linux.CLONE_PARENT)
    except OSError:  # the launcher forks, and that child reports the error
        return 0
    if child == 0:
        act()
    return child


def _answer(
    verb: str, argument: object, fds: list[int], mount: int, plan: children.Plan, tools: children.Tools
) -> NoReturn:
    conversation = Conversation(_socket.socket(fileno=fds[0]))
    plan.join_server(mount)
    act = partial(getattr(children, verb), tools, conversation, fds, plan, None, argument)
    children.answer([*fds, mount, *tools.fds()], conversation, act)
