"""The launcher: a process beside each API process, which has loaded our modules and forks for each container.

The API process sends packets on one socket: a verb, numbers, and descriptors. The first descriptor is a conversation,
on which a child of the launcher reads the request and answers (children.py). The launcher reads no request, and has one
thread. Its children report PIDs to it on another socket. Process 1 of a container becomes a child of the launcher when
its parent exits, and so does a program that joins a container: PR_SET_CHILD_SUBREAPER of prctl(2).

The launcher ends with the API process. A container ends with the launcher, which holds one end of the pipe ``life``.
"""

from __future__ import annotations

import _signal
import _socket
import gc
import os
import resource
import select
import sys

from enroot_py.api import children
from enroot_py.api.messages import Conversation, receive_with_fds, send_status
from enroot_py.base import linux
from enroot_py.base.errors import ContainerError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

_PACKET_BYTES = 8192  # PATH_MAX, and some
_MAX_FDS = 5
_GRACE_S = 30  # for the end of all containers when the API process has ended


class Held:
    """A container, or another request that can be ended."""

    __slots__ = ("builder", "first", "changes", "lock", "is_ending", "waiting")

    def __init__(self, builder: int) -> None:
        self.builder = builder  # the process that answers the request, or 0
        self.first = 0  # process 1 of the container, or 0
        self.changes = ""  # the directory on disk that disappears with the container
        self.lock = -1  # an open descriptor of that directory, which is locked
        self.is_ending = False
        self.waiting: list[_socket.socket] = []  # conversations that close when nothing is left


class Launcher:
    """The event loop."""

    def __init__(self, requests: _socket.socket) -> None:
        self._requests = requests
        self._reports, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
        life, self._life = os.pipe2(os.O_CLOEXEC)
        self._wakeup, wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        _signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        _signal.signal(_signal.SIGCHLD, lambda *_: None)
        linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))  # a container may take one descriptor
        self._tools = children.Tools(theirs, life, children.open_init(), limits)
        self._held: dict[int, Held] = {}  # by the number of the container
        self._numbers: dict[int, int] = {}  # of containers, by builder or process 1
        self._joining: dict[int, int] = {}  # numbers of programs, by the process that starts the program
        self._programs: dict[int, int] = {}  # numbers of programs, by process
        self._statuses: dict[int, _socket.socket] = {}  # by the number of the program

    def serve(self) -> NoReturn:
        """Serve until the API process ends."""
        poll = select.poll()
        for fd in (self._requests.fileno(), self._reports.fileno(), self._wakeup):
            poll.register(fd, select.POLLIN)
        while True:
            ready = [fd for fd, _ in poll.poll()]
            if self._wakeup in ready:
                os.read(self._wakeup, _PACKET_BYTES)
            self._hear()
            self._reap()
            if self._requests.fileno() in ready:
                self._request()

    def _request(self) -> None:
        data, fds = receive_with_fds(self._requests, _PACKET_BYTES, _MAX_FDS)
        if not data:
            self._end_all()
        verb, *numbers = data.decode().split()
        try:
            getattr(self, f"_do_{verb}")(fds, *map(int, numbers))
        except (OSError, ContainerError) as e:
            Conversation(_socket.socket(fileno=os.dup(fds[0]))).fail(e)
        finally:
            for fd in fds:
                os.close(fd)

    def _do_act(self, fds: list[int], number: int) -> None:
        """Let a child do what the request names."""
        self._hold(number, self._fork(fds, children.act))

    def _do_start(self, fds: list[int], number: int) -> None:
        """Make a container."""
        tools = self._tools
        self._hold(number, self._fork(fds, lambda talk: children.start(tools, talk, number)))

    def _hold(self, number: int, builder: int) -> None:
        self._held[number] = Held(builder)
        self._numbers[builder] = number

    def _do_once(self, fds: list[int]) -> None:
        """Run a program as process 1 of a container. The child waits for it, and ends it with this process."""
        tools = self._tools
        self._fork(fds, lambda talk: children.run_once(tools, talk, fds[1], fds[2:]))

    def _do_join(self, fds: list[int], number: int, program: int) -> None:
        """Run a program in a container."""
        tools, first = self._tools, self._first(number)
        child = self._fork(fds, lambda talk: children.join(tools, talk, first, program, fds[2:]))
        self._joining[child] = program
        self._statuses[program] = _socket.socket(fileno=os.dup(fds[1]))

    def _do_copy(self, fds: list[int], number: int) -> None:
        """Copy files into a container or out of it."""
        first = self._first(number)
        self._fork(fds, lambda talk: children.copy(talk, first))

    def _first(self, number: int) -> int:
        """Return process 1 of a container. Raises ContainerError if the container has ended."""
        held = self._held.get(number)
        while held is not None and held.builder and not held.first:  # the builder has not reported yet
            select.select([self._reports.fileno(), self._wakeup], [], [])
            self._hear()
            self._reap()
        if held is None or not held.first or held.is_ending:
            hint = "its first process was killed (out of memory? see dmesg): make a new container"
            raise ContainerError("the container has ended", hint=hint)
        return held.first

    def _do_signal(self, _: list[int], program: int, number: int, group: int) -> None:
        """Send a signal to a program, or to its process group."""
        pid = next((pid for pid, other in self._programs.items() if other == program), 0)
        try:
            if pid:
                (os.killpg if group else os.kill)(pid, number)
        except ProcessLookupError:
            return

    def _do_end(self, fds: list[int], number: int) -> None:
        """End a container. The conversation closes when nothing of the container is left."""
        held = self._held.get(number)
        if held is not None:
            held.waiting.append(_socket.socket(fileno=os.dup(fds[0])))
            self._kill(held)

    def _kill(self, held: Held) -> None:
        held.is_ending = True
        for pid in filter(None, (held.builder, held.first)):
            os.kill(pid, _signal.SIGKILL)

    def _fork(self, fds: list[int], act: Callable[[Conversation], None]) -> int:
        """Fork a child for a request. Only ``fds`` and the tools stay open in the child. Raises OSError."""
        child = os.fork()
        if not child:
            _signal.set_wakeup_fd(-1)
            _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)
            children.answer([*fds, *self._tools.fds()], Conversation(_socket.socket(fileno=fds[0])), act)
        return child

    def _hear(self) -> None:
        """Note what children report."""
        while True:
            try:
                data, fds = receive_with_fds(self._reports, _PACKET_BYTES, 1)
            except BlockingIOError:
                return
            verb, number, text = os.fsdecode(data).split(" ", 2)
            if verb == "program":
                self._programs[int(text)] = int(number)
                continue
            held = self._held[int(number)]
            if verb == "changes":
                held.changes, held.lock = text, fds[0]
            else:
                held.first = int(text)
                self._numbers[held.first] = int(number)
                if held.is_ending:
                    self._kill(held)

    def _reap(self) -> None:
        """Reap the children that have ended."""
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                self._ended(*ended)
        except ChildProcessError:
            return

    def _ended(self, pid: int, status: int) -> None:
        self._hear()  # a child reports before it ends
        if (program := self._programs.pop(pid, None)) is not None:
            socket = self._statuses.pop(program)
            send_status(socket, status)
            socket.close()
        elif (program := self._joining.pop(pid, None)) is not None:
            if program not in self._programs.values() and (unused := self._statuses.pop(program, None)):
                unused.close()  # the program was not started
        elif (number := self._numbers.pop(pid, None)) is not None:
            held = self._held[number]
            if pid == held.builder:
                held.builder = 0
            if pid == held.first or not held.first:
                self._forget(number)

    def _forget(self, number: int) -> None:
        """Remove what is left of a container."""
        held = self._held.pop(number)
        self._numbers.pop(held.builder, None)
        waiting = held.waiting or [_socket.socket()]
        if held.changes:
            fds = [*(socket.fileno() for socket in waiting), held.lock]
            self._fork(fds, lambda talk: children.remove(talk, held.changes))
            os.close(held.lock)
        for socket in waiting:
            socket.close()

    def _end_all(self) -> NoReturn:
        """End all containers, and this process."""
        _signal.alarm(_GRACE_S)
        os.close(self._life)
        for held in self._held.values():
            self._kill(held)
        try:
            while True:
                self._ended(*os.waitpid(-1, 0))
        except ChildProcessError:
            os._exit(0)


def main(requests: int) -> NoReturn:
    """Run the launcher of the API process at the other end of the socket ``requests``."""
    _signal.pthread_sigmask(_signal.SIG_SETMASK, ())
    children.preload()
    launcher = Launcher(_socket.socket(fileno=requests))
    gc.collect()
    gc.freeze()  # the garbage collector of a child would copy all pages
    gc.disable()
    try:
        launcher.serve()
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)
