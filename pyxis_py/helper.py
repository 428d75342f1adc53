"""The process that the SPANK plugin executes: it decides for a step, builds its container and holds it.

Entered by ``main``, with a socket as fd 3; the protocol is in
c_shims/spank/README.md. One verb a process: ``check`` at submit, ``step`` for
the life of a step on a node, ``finish`` after its last task where that one was
killed, ``epilog`` after a job that left something.
"""

from __future__ import annotations

import _signal
import _socket
import gc
import os
import select
import sys

from enroot_py.base import log, signals
from enroot_py.base.errors import PenrootError, RefusedError
from pyxis_py.channel import CONTROL, SOCKET, Channel, Client, numbers
from pyxis_py.job import REFUSED, Job
from pyxis_py.running import Peer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

    from pyxis_py.held import Held

_CLIENTS = 64  # who may be connected and silent at once


class Cancelled(PenrootError):
    """SIGTERM came while the container was being set up."""


def main() -> None:
    """Serve the verb that the command line names; the exit status is 0 when an answer was given."""
    gc.disable()  # until a pull, or the wait for others: what a start needs lives as long as that
    channel = Channel(_socket.socket(fileno=SOCKET))
    log.sink = channel.log
    try:
        job = Job(channel.receive())
        serve = _VERBS.get(sys.argv[1])
        if serve is None:
            raise PenrootError(
                f"the plugin asks for {sys.argv[1]!r}", hint="plugin and package differ: pyxis-py install"
            )
        serve(job, channel)
    except PenrootError as e:
        channel.fail(e)
    # Not sys.exit: srun waits for this process, and there is nothing to tidy up.
    os._exit(0)


def check(job: Job, channel: Channel) -> None:
    """Look at what is submitted; then, while srun waits for its nodes, resolve the tag for all of them."""
    from pyxis_py import submit

    request, tag = submit.check(job)
    if tag is None:
        channel.send((("ok", ""),))
        return
    channel.send((("ok", ""), ("later", "" if submit.one_component() else "wait")))
    log.sink = _nowhere
    try:
        digest = submit.resolve(job, tag)
    except RefusedError as e:
        digest = ""
        if not request.name:  # else nodes that have the container need no image: they know, and say it
            digest = REFUSED
            why = str(e).removeprefix(f"{request.image}: ")
            line = f"failed to import docker image: {request.image}: {why} ({request.origins['image']})"
            channel.log("ERROR", line)
            if e.hint:
                channel.log("ERROR", e.hint)
    channel.send((("ok", ""), *((("resolved", f"{tag.uri()} {digest}"),) if digest else ())))


def hold(job: Job, channel: Channel) -> None:
    """Build the step's container, answer the first task, then let the others in until the step ends."""
    from pyxis_py.held import Held
    from pyxis_py.step import Step

    _signal.signal(_signal.SIGTERM, _cancel)
    step = Step(job)
    if not step.request.wants_container:
        channel.send((("ok", ""),))
        return
    step.begin()
    # Two steps with the same name at once: one makes the container, the other finds it.
    with step.running.lock(step.name):
        try:
            container = Held(step)
            listener = step.running.listen(step.name, job.step)
        except BaseException:
            step.running.forget(step.name, job.step)
            raise
    # What Slurm sends to every process of a step is for the programs: one that
    # writes a checkpoint on SIGTERM still needs its root file system.
    for number in signals.FOR_PROGRAMS:
        _signal.signal(number, _signal.SIG_IGN)
    container.answer(channel, job)
    log.sink = _nowhere
    gc.enable()
    Service(container, listener).serve()


def finish(job: Job, channel: Channel) -> None:
    """Finish a step whose helper was killed."""
    _own_group()
    from pyxis_py import leave
    from pyxis_py.step import Step

    leave.finish(Step(job), **job.ending)
    channel.send((("ok", ""),))


def epilog(job: Job, channel: Channel) -> None:
    """Remove what a job has left."""
    _own_group()
    from pyxis_py import leave

    leave.clean_up(job)
    channel.send((("ok", ""),))


_VERBS = {"check": check, "step": hold, "finish": finish, "epilog": epilog}


def _own_group() -> None:
    """Take back the real group: by another one the plugin kept others from tracing this process, coprocess.c."""
    os.setresgid(os.getegid(), os.getegid(), os.getegid())


def _cancel(number: int, frame: object) -> None:
    raise Cancelled("cancelled while the container was being set up")


def _nowhere(level: str, text: str) -> None:
    """Nobody listens between two tasks."""


class Service:
    """What a helper does while its step runs: it answers tasks and other steps, until slurmstepd is gone or says so.

    Tasks and slurmstepd come by a socket that only they have. Other steps come by the listener, which
    no process in a container can reach.
    """

    def __init__(self, container: Held, listener: _socket.socket) -> None:
        self.container = container
        self.listener = listener
        self.control = _socket.socket(fileno=CONTROL)
        self.clients: dict[int, Client] = {}

    def serve(self) -> NoReturn:
        while True:
            poll = select.poll()
            poll.register(self.control.fileno(), select.POLLIN)
            poll.register(self.listener.fileno(), select.POLLIN)
            for fd, client in self.clients.items():
                poll.register(fd, client.events)
            for fd, _ in poll.poll():
                if fd == self.control.fileno():
                    self._task()
                elif fd == self.listener.fileno():
                    self._stranger()
                elif fd in self.clients and self._attend(self.clients[fd]):
                    self.clients.pop(fd).socket.close()

    def _task(self) -> None:
        first, controls, _, _ = self.control.recvmsg(1, _socket.CMSG_SPACE(4), _socket.MSG_CMSG_CLOEXEC)
        if not first:  # slurmstepd is gone, and with it who could still ask
            step = self.container.step
            step.running.forget(step.name, step.job.step)
            os._exit(0)
        for _, _, data in controls:  # none where too many files are open: the task sees its socket closed
            self._welcome(numbers(data)[0], of_step=True)

    def _stranger(self) -> None:
        fd: int = self.listener._accept()[0]  # type: ignore[attr-defined]  # of the C module
        try:
            Peer(_socket.socket(fileno=os.dup(fd))).close()  # what a container runs has no part in others
        except OSError:
            os.close(fd)
            return
        self._welcome(fd, of_step=False)
        strangers = [fd for fd, client in self.clients.items() if not client.of_step]
        if len(strangers) > _CLIENTS:
            self.clients.pop(strangers[0]).socket.close()

    def _welcome(self, fd: int, *, of_step: bool) -> None:
        self.clients[fd] = Client(_socket.socket(fileno=fd), of_step=of_step)

    def _attend(self, client: Client) -> bool:
        """Go on with a client. Returns whether it is done with."""
        try:
            if client.events == select.POLLOUT:
                return client.flush()
            asked = client.request()
            if asked is None:
                return False
            if client.of_step and asked.verb == "finish":
                self._finish(asked, client)
            elif client.of_step and asked.verb == "join":
                self.container.answer(client, asked)
            # A container that was removed while it runs is nobody's to attach to.
            elif asked.verb == "attach" and self.container.step.directory_id() == self.container.directory:
                self.container.hand_over(client)
            else:
                return True
        except BlockingIOError:
            return False
        except (EOFError, OSError, KeyError, ValueError):
            return True  # it was killed while it asked: there is nobody to answer
        return False

    def _finish(self, asked: Job, client: Client) -> NoReturn:
        """Finish the step for slurmstepd, which waits for the end of this process too."""
        from pyxis_py import leave

        # Another step that is about to attach has to see that this one ends: it holds the lock of the name, and
        # finish() may have to wait for that.
        self.listener.close()
        for other in self.clients.values():
            if other is not client:
                other.socket.close()
        client.socket.setblocking(True)
        asker = Channel(client.socket)
        log.sink = asker.log
        step = self.container.step
        try:
            if self.container.attached:
                step.take_back(self.container.spaces)
            leave.finish(step, **asked.ending)
            asker.send((("ok", ""),))
        except PenrootError as e:
            asker.fail(e)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            asker.fail(PenrootError("the step could not be finished", hint=repr(sys.exc_info()[1])))
        self.container.let_go()
        os._exit(0)
