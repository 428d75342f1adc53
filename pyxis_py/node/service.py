"""The event loop of a helper while its step runs: admit tasks and other steps, and finish the step on request.

The helper has one thread, so until the step ends, the loop never blocks on a client.
"""

from __future__ import annotations

import _socket
import os
import select
import sys

from enroot_py.base import log
from enroot_py.base.errors import PenrootError
from enroot_py.base.fds import Fd
from pyxis_py.node import leave
from pyxis_py.node.running import Peer
from pyxis_py.request.channel import CONTROL, Channel, Client, numbers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

    from pyxis_py.node.held import Held
    from pyxis_py.request.job import Job

_MAX_CLIENTS = 64  # connections that have not sent their request yet


class Service:
    """Answers tasks and other steps, until slurmstepd is gone or asks it to finish the step.

    Tasks and slurmstepd connect through an inherited socket. Other steps connect to the listener, out of reach of
    processes in containers.
    """

    def __init__(self, held: Held, listener: _socket.socket) -> None:
        self.held = held
        self.listener = listener
        self.control = _socket.socket(fileno=CONTROL)
        self.clients: dict[int, Client] = {}

    def serve(self) -> NoReturn:
        """Serve until the step ends. When no request has come for a moment, call Held.follow_host_files()."""
        timeout_ms: int | None = self.held.FOLLOW_DELAY_MS
        while True:
            poll = select.poll()
            poll.register(self.control.fileno(), select.POLLIN)
            if self.listener.fileno() >= 0:
                poll.register(self.listener.fileno(), select.POLLIN)
            if self.held.output >= 0:
                poll.register(self.held.output, select.POLLIN)
            for fd, client in self.clients.items():
                poll.register(fd, client.events)
            events = poll.poll(timeout_ms)
            if not events:
                self.held.follow_host_files()
                timeout_ms = None
            for fd, _ in events:
                if fd == self.control.fileno():
                    self._accept_task()
                elif fd == self.listener.fileno():
                    self._accept_step()
                elif fd == self.held.output:
                    self.held.drop_output()
                elif fd in self.clients and self._serve_client(self.clients[fd]):
                    self.clients.pop(fd).socket.close()

    def _accept_task(self) -> None:
        """Accept a connection of a task or of slurmstepd."""
        first, controls, _, _ = self.control.recvmsg(1, _socket.CMSG_SPACE(4), _socket.MSG_CMSG_CLOEXEC)
        if not first:  # slurmstepd has ended, so no request can follow
            step = self.held.step
            step.running.forget(step.name, step.job.step)
            os._exit(0)
        for _, _, data in controls:  # empty if too many files are open: the task sees EOF
            self._add_client(numbers(data)[0], of_step=True)

    def _accept_step(self) -> None:
        """Accept a connection of another step."""
        with Fd(self.listener._accept()[0]) as fd:  # type: ignore[attr-defined]  # of the C module
            try:
                Peer(_socket.socket(fileno=os.dup(fd))).close()  # refuse processes in containers
            except OSError:
                return
            self._add_client(fd.keep(), of_step=False)
        of_other_steps = [fd for fd, client in self.clients.items() if not client.of_step]
        if len(of_other_steps) > _MAX_CLIENTS:
            self.clients.pop(of_other_steps[0]).socket.close()

    def _add_client(self, fd: int, *, of_step: bool) -> None:
        self.clients[fd] = Client(_socket.socket(fileno=fd), of_step=of_step)

    def _serve_client(self, client: Client) -> bool:
        """Read from a client or write to it. Return whether to close its connection."""
        try:
            if client.events == select.POLLOUT:
                return client.flush()
            request = client.request()
            if request is None:
                return False
            if client.of_step and request.verb == "finish":
                self._finish(request, client)
            elif client.of_step and request.verb == "save":
                self._save(client)
                return True
            elif client.of_step and request.verb == "join":
                self.held.answer(client, request)
            # Do not attach to a container without its directory: another step has removed the directory.
            elif request.verb == "attach" and self.held.container.directory_id() == self.held.directory:
                self.held.hand_over(client, unsealed="unsealed" in request.numbers)
            else:
                return True
        except BlockingIOError:
            return False
        except (EOFError, OSError, KeyError, ValueError):
            return True  # the client was killed
        return False

    def _close_others(self, client: Client) -> Channel:
        """Close all connections except that of ``client``, as the step ends. Return the channel of ``client``.

        A step that is attaching must see EOF: its helper holds the lock of the container's name while it waits, and
        this helper may need the lock.
        """
        self.listener.close()
        for fd, other in list(self.clients.items()):
            if other is not client:
                self.clients.pop(fd).socket.close()
        client.socket.setblocking(True)
        asker = Channel(client.socket)
        log.sink = asker.log
        return asker

    def _save(self, client: Client) -> None:
        """Save the container for the last task. The task fails if the save fails."""
        asker = self._close_others(client)
        try:
            leave.save(self.held.container)
            asker.send((("ok", ""),))
        except PenrootError as e:
            asker.fail(e)
        except Exception:
            sys.excepthook(*sys.exc_info())
            asker.fail(PenrootError("the container could not be saved", hint=repr(sys.exc_info()[1])))
        finally:
            log.sink = log.silent

    def _finish(self, request: Job, client: Client) -> NoReturn:
        """Finish the step for slurmstepd, which also waits for this process to exit."""
        asker = self._close_others(client)
        try:
            if self.held.added_mounts:
                from pyxis_py.node import attached

                attached.finish(self.held, self.held.added_mounts)
            self.held.report_killed()
            leave.finish(self.held.container, **request.ending)
            asker.send((("ok", ""),))
        except PenrootError as e:
            asker.fail(e)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            asker.fail(PenrootError("the step could not be finished", hint=repr(sys.exc_info()[1])))
        self.held.let_go()
        os._exit(0)
