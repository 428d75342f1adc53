"""The launcher: a process beside each API process. It has loaded our modules, and forks a child for each container.

The API process is the program that uses enroot_py. It sends packets on one socket: a verb, numbers, and descriptors.
The first descriptor is a conversation: the launcher reads the request there, and a child answers (children.py). The
launcher has one thread. Its children report PIDs to it on another socket. Process 1 of a container and a program that
joins a container become children of the launcher when their parents exit: prctl(2), PR_SET_CHILD_SUBREAPER.

The launcher ends with the API process. A container ends with the launcher: penroot-init, or the process that
watches process 1, sees the pipe ``life`` close. Any other process 1 has PR_SET_PDEATHSIG.
"""

from __future__ import annotations

import _signal
import _socket
import errno
import gc
import os
import resource
import select
import sys
import time
from contextlib import suppress
from functools import partial

from enroot_py.api import children
from enroot_py.api.messages import Conversation, decoded, receive_with_fds, send_status
from enroot_py.api.zygote import Zygote
from enroot_py.base import linux, log
from enroot_py.base.errors import ContainerError, NamespaceError
from enroot_py.runtime import namespaces, supervise

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

    from enroot_py.base.making import Directory

_PACKET_BYTES = 8192  # more than PATH_MAX
_FDS = {"signal": 0, "once": 5, "join": 5}  # number of descriptors of a request (default: 1)
_MAX_FDS = 5
_PLAN_S = 0.5  # an equal request within this time reuses the plan of the last start: its settings and hooks
_GRACE_S = 30  # to end all containers after the API process has ended


class Held:
    """A container or another request that can be ended."""

    __slots__ = ("builder", "first", "changes", "lock", "is_ending", "waiting")

    def __init__(self, builder: int) -> None:
        self.builder = builder  # the process that answers the request, or 0
        self.first = 0  # process 1 of the container, or 0
        self.changes = ""  # a directory on disk, to remove with the container
        self.lock = -1  # an open descriptor of that directory, which is locked
        self.is_ending = False
        self.waiting: list[_socket.socket] = []  # conversations to close when the container is gone


class Launcher:
    """The launcher's event loop."""

    def __init__(self, requests: _socket.socket) -> None:
        self._requests = requests
        self._reports, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
        life, self._life = os.pipe2(os.O_CLOEXEC)
        self._wakeup, wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        _signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        _signal.signal(_signal.SIGCHLD, lambda *_: None)
        linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))  # each container may need a descriptor
        self._tools = children.Tools(theirs, life, supervise.open_init(), limits)
        self._held: dict[int, Held] = {}  # by number of the container
        self._numbers: dict[int, int] = {}  # numbers of containers, by PID of the builder or of process 1
        self._joining: dict[int, int] = {}  # numbers of programs, by the process that starts the program
        self._programs: dict[int, int] = {}  # numbers of programs, by PID
        self._statuses: dict[int, _socket.socket] = {}  # sockets of exit statuses, by number of the program
        self._plan: children.Plan | None = None  # of the last start
        self._last_line, self._plan_until = b"", 0.0
        self._zygote: Zygote | None = None  # of the plan's image
        self._mounts = select.poll()
        self._mounts.register(os.open("/proc/self/mountinfo", os.O_RDONLY | os.O_CLOEXEC), select.POLLPRI)
        self._reserve = -1  # a descriptor: see _keep_room()
        self._keep_room()
        self._can_clone = children.can_clone()
        self._has_swept = False  # whether a child has removed the leftovers of killed launchers

    def serve(self) -> NoReturn:
        """Serve until the API process ends."""
        poll = select.poll()
        for fd in (self._requests.fileno(), self._reports.fileno(), self._wakeup):
            poll.register(fd, select.POLLIN)
        while True:
            ready = [fd for fd, _ in poll.poll(1000 * _PLAN_S if self._plan else None)]
            if self._plan is not None and time.monotonic() > self._plan_until:
                self._forget_plan()
            if self._wakeup in ready:
                os.read(self._wakeup, _PACKET_BYTES)
            self._hear()
            self._reap()
            if self._requests.fileno() in ready:
                self._give_room()
                self._request()
                self._keep_room()

    def _keep_room(self) -> None:
        """Reserve a descriptor. _give_room() closes it, so that a conversation fits into a full descriptor table."""
        with suppress(OSError):
            self._reserve = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)

    def _give_room(self) -> None:
        if self._reserve >= 0:
            os.close(self._reserve)
        self._reserve = -1

    def _request(self) -> None:
        data, fds = receive_with_fds(self._requests, _PACKET_BYTES, _MAX_FDS)
        if not data:
            self._end_all()
        verb, *numbers = data.decode().split()
        act, expected = getattr(self, f"_do_{verb}"), _FDS.get(verb, 1)
        if not expected:
            act(*map(int, numbers))
        if not expected or not fds:  # a full descriptor table: the kernel has closed the conversation
            return
        conversation = Conversation(_socket.socket(fileno=fds[0]))
        try:
            log.sink = conversation.log
            if len(fds) < expected:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            act(conversation, fds, *map(int, numbers))
        except Exception as e:
            conversation.fail(e)
        finally:
            log.sink = log.silent
            conversation.socket.detach()
            for fd in fds:
                os.close(fd)

    def _do_act(self, conversation: Conversation, fds: list[int], number: int) -> None:
        """Let a child handle a request that needs no container."""
        request = children.take_environment(next(conversation.receive()))
        self._hold(number, self._fork(conversation, fds, partial(children.act, conversation, request)))

    def _do_start(self, conversation: Conversation, fds: list[int], number: int) -> None:
        """Create a container."""
        plan = self._planned(next(conversation.lines()))
        changes = plan.make_changes()
        child, is_first = self._build("start", conversation, fds, plan, changes, number)
        self._hold(number, 0 if is_first else child, changes)
        if is_first:
            self._note_first(number, child)

    def _build(
        self,
        verb: str,
        conversation: Conversation,
        fds: list[int],
        plan: children.Plan,
        changes: Directory | None,
        argument: object,
    ) -> tuple[int, bool]:
        """Start a child that creates a container. Return its PID, and whether it is process 1 of the container."""
        if self._zygote is not None and (child := self._zygote.clone(verb, fds, argument)):
            return child, True
        act = partial(getattr(children, verb), self._tools, conversation, fds, plan, changes, argument)
        return self._fork(conversation, fds, act, plan.flags), bool(plan.flags)

    def _planned(self, line: bytes) -> children.Plan:
        """Return the plan of a start. If the request equals the last one, reuse the last plan for a short time."""
        if self._plan is not None and line == self._last_line and self._is_valid(self._plan):
            if self._plan.is_served and self._zygote is None:
                with suppress(OSError):  # no process or descriptor is left for a zygote
                    self._zygote = Zygote(self._plan, self._tools)
        else:
            self._forget_plan()
            request = children.take_environment(decoded(line))
            may_prepare = self._can_clone and (self._has_swept or not request["writable"])
            plan = children.Plan(request, may_prepare=may_prepare)
            self._has_swept |= plan.is_writable  # the child of this start removes the leftovers
            self._last_line, self._plan, self._plan_until = line, plan, time.monotonic() + _PLAN_S
        assert self._plan is not None
        return self._plan

    def _is_valid(self, plan: children.Plan) -> bool:
        has_same_mounts = not self._mounts.poll(0)  # POLLPRI after a change: proc_pid_mounts(5)
        return time.monotonic() <= self._plan_until and plan.is_current() and has_same_mounts

    def _forget_plan(self) -> None:
        if self._plan is not None:
            self._plan.release()
        if self._zygote is not None:
            self._zygote.close()
        self._plan = self._zygote = None
        self._last_line = b""

    def _hold(self, number: int, builder: int, changes: Directory | None = None) -> None:
        held = self._held[number] = Held(builder)
        if changes:
            held.changes, held.lock = changes.path, changes.fd
        if builder:
            self._numbers[builder] = number

    def _note_first(self, number: int, pid: int) -> None:
        self._held[number].first = pid
        self._numbers[pid] = number

    def _do_once(self, conversation: Conversation, fds: list[int], number: int) -> None:
        """Run a program as process 1 of a container. The launcher or a child waits for it."""
        lines = conversation.lines()
        plan, request = self._planned(next(lines)), decoded(next(lines))
        changes, status = plan.make_changes(), _copy(fds[1])
        pid, is_first = self._build("run_once", conversation, fds, plan, changes, request)
        if is_first:
            self._hold(number, 0, changes)
            self._programs[pid] = number
            self._statuses[number] = status
            conversation.send({"ok": {"pid": pid, "is_watched": False}})

    def _do_join(self, conversation: Conversation, fds: list[int], number: int, program: int) -> None:
        """Run a program in a container."""
        tools, first, request = self._tools, self._first(number), next(conversation.receive())
        act, status = partial(children.join, tools, conversation, first, program, fds[2:], request), _copy(fds[1])
        self._joining[self._fork(conversation, fds, act)] = program
        self._statuses[program] = status

    def _do_copy(self, conversation: Conversation, fds: list[int], number: int) -> None:
        """Copy files into a container, or out of it."""
        first, request = self._first(number), next(conversation.receive())
        self._fork(conversation, fds, partial(children.copy, conversation, first, request))

    def _first(self, number: int) -> int:
        """Return process 1 of a container. Raises ContainerError if the container has ended."""
        held = self._held.get(number)
        while held is not None and held.builder and not held.first:  # wait for the builder's report
            select.select([self._reports.fileno(), self._wakeup], [], [])
            self._hear()
            self._reap()
        if held is None or not held.first or held.is_ending:
            hint = "its first process was killed (out of memory? see dmesg): make a new container"
            raise ContainerError("the container has ended", hint=hint)
        return held.first

    def _do_signal(self, program: int, number: int, group: int) -> None:
        """Send a signal to a program, or to its process group."""
        pid = next((pid for pid, other in self._programs.items() if other == program), 0)
        try:
            if pid and group:
                os.killpg(pid, number)
            elif pid:
                os.kill(pid, number)
        except ProcessLookupError:  # the process has no group yet
            os.kill(pid, number)

    def _do_end(self, _: Conversation, fds: list[int], number: int) -> None:
        """End a container. Close the conversation when the container is gone."""
        held = self._held.get(number)
        if held is not None:
            self._kill(held)
            held.waiting.append(_copy(fds[0]))

    def _kill(self, held: Held) -> None:
        held.is_ending = True
        for pid in filter(None, (held.builder, held.first)):
            os.kill(pid, _signal.SIGKILL)

    def _fork(self, conversation: Conversation, fds: list[int], act: Callable[[], NoReturn], flags: int = 0) -> int:
        """Fork a child for a request, into new namespaces given by ``flags``. Raises OSError.

        Only ``fds``, the conversation and the tools stay open in the child.
        """
        try:
            child = linux.clone3(flags) if flags else os.fork()
        except OSError as e:
            if not flags:
                raise
            hint = namespaces.advice(e)
            raise NamespaceError(f"cannot create namespaces: {e.strerror}", hint=hint) from e
        if not child:
            _signal.set_wakeup_fd(-1)
            _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)
            children.answer([conversation.socket.fileno(), *fds, *self._tools.fds()], conversation, act)
        return child

    def _hear(self) -> None:
        """Handle the reports of children."""
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
                self._note_first(int(number), int(text))
                if held.is_ending:
                    self._kill(held)

    def _reap(self) -> None:
        """Reap children that have ended."""
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                self._ended(*ended)
        except ChildProcessError:
            return

    def _ended(self, pid: int, status: int) -> None:
        self._hear()  # a child reports before it ends
        if self._zygote is not None and self._zygote.pid == pid:
            self._zygote.pid = 0
        if (program := self._programs.pop(pid, None)) is not None:
            socket = self._statuses.pop(program)
            self._clear(self._held.pop(program, None), [socket], partial(send_status, socket, status))
        elif (program := self._joining.pop(pid, None)) is not None:
            if program not in self._programs.values() and (unused := self._statuses.pop(program, None)):
                unused.close()  # the program was not started
        elif (number := self._numbers.pop(pid, None)) is not None:
            held = self._held[number]
            if pid == held.builder:
                held.builder = 0
            if pid == held.first or not held.first:
                self._numbers.pop(held.builder, None)
                self._clear(self._held.pop(number), held.waiting, lambda: None)

    def _clear(self, held: Held | None, waiting: list[_socket.socket], then: Callable[[], None]) -> None:
        """Remove the leftovers of a container, call ``then``, and close the sockets of waiting requests."""
        if held and held.changes:
            fds = [held.lock, *(socket.fileno() for socket in waiting)]
            spare = Conversation(_socket.socket())
            self._fork(spare, fds, partial(children.remove, held.changes, then))
            os.close(held.lock)
        else:
            then()
        for socket in waiting:
            socket.close()

    def _end_all(self) -> NoReturn:
        """End all containers, and this process."""
        _signal.alarm(_GRACE_S)
        os.close(self._life)
        self._forget_plan()
        for held in self._held.values():
            self._kill(held)
        for pid in self._programs:
            os.kill(pid, _signal.SIGKILL)
        try:
            while True:
                self._ended(*os.waitpid(-1, 0))
        except ChildProcessError:
            os._exit(0)


def _copy(fd: int) -> _socket.socket:
    """Return a copy of a socket. Raises OSError. Call this before a fork: after the fork, an error loses the child."""
    return _socket.socket(fileno=os.dup(fd))


def main(requests: int) -> NoReturn:
    """Run the launcher for the API process at the other end of the socket ``requests``."""
    _signal.pthread_sigmask(_signal.SIG_SETMASK, ())
    children.preload()
    launcher = Launcher(_socket.socket(fileno=requests))
    gc.collect()
    gc.freeze()  # garbage collection in a child would copy all pages
    gc.disable()
    try:
        launcher.serve()
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)
