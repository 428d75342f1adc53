"""The process that the SPANK plugin executes: it decides for a step, builds its container and holds it.

Entered by ``main``, with a socket as fd 3; the protocol is in
c_shims/spank/README.md. One verb a process: ``check`` at submit, ``step`` for
the life of a step on a node, ``finish`` after its last task where that one was
killed, ``epilog`` after a job that left something.
"""

from __future__ import annotations

import _signal
import _socket
import errno
import gc
import os
import select
import sys

from enroot_py.base import log
from enroot_py.base.errors import ContainerError, PenrootError, RefusedError, cause
from pyxis_py import running
from pyxis_py.job import REFUSED, Job

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import NoReturn

    from enroot_py.runtime.rootfs import Source
    from pyxis_py.step import Step

_SOCKET = 3
_CONTROL = 4
_NAMESPACES = ("user", "cgroup", "mnt", "ipc", "uts", "net")
_LIMIT = 64 << 20  # bytes in one message
_FDS = 8
_PATIENCE = 30  # seconds for the helper of another step, which answers at once
_CLIENTS = 64  # who may be connected and silent at once
_MOMENT = 0.3  # seconds that the server of an image has to end


class Channel:
    """Messages of key and value pairs over a stream socket."""

    def __init__(self, socket: _socket.socket) -> None:
        self.socket = socket

    def receive(self) -> list[tuple[str, str]]:
        """One message. Raises EOFError where the peer is gone."""
        return self._message(b"")

    def receive_with_fds(self, sender: int = 0) -> tuple[list[tuple[str, str]], list[int]]:
        """One message and the descriptors that came with its first byte.

        A message of another process than ``sender``, if that is given, raises PermissionError. The kernel names the
        process where the socket has SO_PASSCRED, unix(7). Raises EOFError, OSError.
        """
        room = _socket.CMSG_SPACE(_FDS * 4) + _socket.CMSG_SPACE(12)
        first, controls, _, _ = self.socket.recvmsg(1, room, _socket.MSG_CMSG_CLOEXEC)
        data = {kind: content for level, kind, content in controls if level == _socket.SOL_SOCKET}
        fds = _numbers(data.get(_socket.SCM_RIGHTS, b""))
        if not first:
            raise EOFError("the peer is gone")
        if sender and _numbers(data.get(_socket.SCM_CREDENTIALS, b""))[:1] != [sender]:
            for fd in fds:
                os.close(fd)
            raise PermissionError(errno.EPERM, "another process has answered")
        return self._message(first), fds

    def _message(self, begun: bytes) -> list[tuple[str, str]]:
        size = int.from_bytes(begun + self._exactly(4 - len(begun)), "little")
        if size > _LIMIT:
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
        lines = [("error", line) for line in str(error).split("\n")]
        self.send([*lines, *((("hint", error.hint),) if error.hint else ())])


class Client(Channel):
    """A task or step that asks something. It is read and answered without waiting, so it holds up nobody else."""

    def __init__(self, socket: _socket.socket, *, of_step: bool) -> None:
        """``of_step``: a task of the step itself, or slurmstepd. All others are other steps, which may attach."""
        super().__init__(socket)
        socket.setblocking(False)
        self.of_step = of_step
        self.events = select.POLLIN
        self._in = bytearray()
        self._out = memoryview(b"")
        self._fds: tuple[int, ...] = ()

    def request(self) -> Job | None:
        """The request, or None while a part of it is missing. Raises EOFError, ValueError, KeyError, OSError."""
        part = self.socket.recv(1 << 20)
        if not part:
            raise EOFError("the peer is gone")
        self._in += part
        size = int.from_bytes(self._in[:4], "little")
        if size > (_LIMIT if self.of_step else 4096):
            raise ValueError(f"message of {size} bytes")
        if len(self._in) < 4 + size or len(self._in) < 4:
            return None
        return Job(_pairs(bytes(self._in[4 : 4 + size])))

    def send(self, pairs: Iterable[tuple[str, str]], fds: tuple[int, ...] = ()) -> None:
        """Keep the one answer, for ``flush``."""
        self._out, self._fds, self.events = memoryview(_framed(pairs)), fds, select.POLLOUT

    def flush(self) -> bool:
        """Send what there is room for. Returns whether that was all. Raises OSError."""
        self._out = self._out[self._send(self._out, self._fds) :]
        self._fds = ()
        return not self._out


def _numbers(data: bytes) -> list[int]:
    return [int.from_bytes(data[at : at + 4], sys.byteorder) for at in range(0, len(data) // 4 * 4, 4)]


def _framed(pairs: Iterable[tuple[str, str]]) -> bytes:
    payload = os.fsencode("".join(f"{key}\0{value}\0" for key, value in pairs))
    return len(payload).to_bytes(4, "little") + payload


def _pairs(payload: bytes) -> list[tuple[str, str]]:
    words = os.fsdecode(payload).split("\0")[:-1]
    return list(zip(words[::2], words[1::2], strict=True))


class Cancelled(PenrootError):
    """SIGTERM came while the container was being set up."""


def main() -> None:
    """Serve the verb that the command line names; the exit status is 0 when an answer was given."""
    gc.disable()  # until a pull, or the wait for others: what a start needs lives as long as that
    channel = Channel(_socket.socket(fileno=_SOCKET))
    log.sink = channel.log
    verb = sys.argv[1]
    try:
        job = Job(channel.receive())
        if verb == "step":
            hold(job, channel)
        elif verb == "check":
            check(job, channel)
        elif verb in ("finish", "epilog"):
            # The plugin gave this process another real group, so that nobody can trace it: become() in coprocess.c.
            os.setresgid(os.getegid(), os.getegid(), os.getegid())
            from pyxis_py import step

            if verb == "finish":
                step.Step(job).finish(**job.ending)
            else:
                step.clean_up(job)
            channel.send((("ok", ""),))
        else:
            raise PenrootError(f"the plugin asks for {verb!r}", hint="plugin and package differ: pyxis-py install")
    except PenrootError as e:
        channel.fail(e)
    # Not sys.exit: srun waits for this process, and there is nothing to tidy up.
    os._exit(0)


def check(job: Job, channel: Channel) -> None:
    """Look at what is submitted; then, while srun waits for its nodes, resolve the tag for all of them."""
    from pyxis_py import submit

    request = submit.check(job)
    tag = submit.tag(job, request)
    if tag is None:
        channel.send((("ok", ""),))
        return
    channel.send((("ok", ""), ("later", "" if submit.one_component() else "wait")))
    log.sink = _nowhere
    try:
        digest = submit.resolve(job, tag)
    except RefusedError as e:
        # Where the nodes have the container already, no image is needed: they know, and say it.
        digest = "" if request.name else REFUSED
        why = str(e).removeprefix(f"{request.image}: ")
        said = f"failed to import docker image: {request.image}: {why} ({request.origins['image']})"
        for line in (said, e.hint):
            if digest and line:
                channel.log("ERROR", line)
    channel.send((("ok", ""), *((("resolved", f"{request.image} {digest}"),) if digest else ())))


def hold(job: Job, channel: Channel) -> None:
    """Build the step's container, answer the first task, then let the others in until the step ends."""
    from pyxis_py.step import Step

    _signal.signal(_signal.SIGTERM, _cancel)
    step = Step(job)
    if not step.request.wants_container:
        channel.send((("ok", ""),))
        return
    step.begin()
    # Two steps with the same name at once: one makes the container, the other finds it.
    lock = step.registry.lock(step.name)
    try:
        container = Held(step)
        listener = step.registry.listen(step.name, job)
    except BaseException:
        step.registry.remove(step.name, job)
        raise
    finally:
        os.close(lock)
    # What Slurm sends to every process of a step is for the programs: one that
    # writes a checkpoint on SIGTERM still needs its root file system.
    for number in (_signal.SIGTERM, _signal.SIGINT, _signal.SIGHUP, _signal.SIGQUIT, _signal.SIGUSR1, _signal.SIGUSR2):
        _signal.signal(number, _signal.SIG_IGN)
    container.answer(channel, job)
    log.sink = _nowhere
    gc.enable()
    Service(container, listener).serve()


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
        self.control = _socket.socket(fileno=_CONTROL)
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
            step.registry.remove(step.name, step.job)
            os._exit(0)
        for _, _, data in controls:  # none where too many files are open: the task sees its socket closed
            self._welcome(_numbers(data)[0], of_step=True)

    def _stranger(self) -> None:
        fd: int = self.listener._accept()[0]  # type: ignore[attr-defined]  # of the C module
        try:
            running.Peer(_socket.socket(fileno=os.dup(fd))).close()  # what a container runs has no part in others
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
            step.finish(**asked.ending)
            asker.send((("ok", ""),))
        except PenrootError as e:
            asker.fail(e)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            asker.fail(PenrootError("the step could not be finished", hint=repr(sys.exc_info()[1])))
        let_go(self.container)
        os._exit(0)


def let_go(container: Held) -> None:
    """Close the namespaces, and wait for the server of an image, which ends with them.

    slurmstepd would find it alive, kill it, and sleep for a second before it looks again. A server that has not ended
    within a moment is left to slurmstepd: another step may be in the container, or a process that a task left behind.
    """
    _signal.pthread_sigmask(_signal.SIG_BLOCK, (_signal.SIGCHLD,))
    for fd in (*container.fds, container.shared):
        if fd >= 0:
            os.close(fd)
    try:
        while os.waitpid(-1, os.WNOHANG)[0] or _signal.sigtimedwait((_signal.SIGCHLD,), _MOMENT):
            pass
    except ChildProcessError:
        return


class Running:
    """What the helper of another step hands over of its container."""

    __slots__ = ("environ", "workdir", "names", "fds", "shared", "remap_root", "served")

    def __init__(self, pairs: list[tuple[str, str]], fds: list[int]) -> None:
        self.environ = dict(value.partition("=")[::2] for key, value in pairs if key == "environ")
        self.names = tuple(value for key, value in pairs if key == "ns")
        self.fds = tuple(fds[: len(self.names)])
        self.shared = fds[len(self.names)] if len(fds) > len(self.names) else -1
        single = dict(pairs)
        self.workdir = single["workdir"]
        self.remap_root = "root" in single
        self.served = single.get("served", "")  # the step with the process that serves its squashfs image


class Held:
    """A running container: the namespaces that keep it alive, and what a task needs to enter it."""

    def __init__(self, step: Step) -> None:
        """Join the running container that the step asks for, or build a new one. Raises PenrootError."""
        self.step = step
        self.attached = False
        self.shared = -1
        self.served = ""
        there = self._running()
        if there and step.joins_running():
            self.environ, self.workdir, self.names, self.fds = (
                there.environ,
                there.workdir,
                there.names,
                there.fds,
            )
            self.remap_root, self.served = there.remap_root, there.served
            self.lent = self.environ
            self.attached = True
            step.check_attached(self.names, self.served, remap_root=self.remap_root)
            step.bring(self.spaces, remap_root=self.remap_root)
        else:
            self.remap_root = step.settings.remap_root
            self._build(there.shared if there else -1)
        self.directory = step.directory_id()

    @property
    def spaces(self) -> dict[str, int]:
        """The namespaces by name."""
        return dict(zip(self.names, self.fds, strict=True))

    def _running(self) -> Running | None:
        """What the helper of a running container of this name hands over, or None."""
        step = self.step
        if step.request.name is None:
            return None
        for other, peer in step.registry.peers(step.name):
            channel = Channel(peer.socket)
            try:
                channel.socket.settimeout(_PATIENCE)
                channel.send((("verb", "attach"),))
                pairs, fds = channel.receive_with_fds(peer.pid)
                peer.check()
            except TimeoutError:
                raise ContainerError(
                    f"step {other} runs the container {step.request.name}, and its helper process does not answer",
                    hint=f"is it stopped? scancel {other} ends that step, :no_exec goes without it",
                ) from None
            except (EOFError, ConnectionError, ProcessLookupError):
                continue  # it has ended in this very moment, and what it said is worth nothing
            except OSError as e:
                raise _imposter(step, other, str(e.strerror)) from e
            finally:
                peer.close()
            found = Running(pairs, fds)
            if "mnt" not in found.names or is_ours("mnt", found.fds[found.names.index("mnt")]):
                raise _imposter(step, other, "it hands over no container")
            return found
        return None

    def _build(self, shared: int) -> None:
        """Build it in a child, which leaves when its namespaces are in our hands. Raises PenrootError."""
        step = self.step
        source = step.prepare()
        self.served = step.own_name if source.image else ""
        source.shared = shared if step.settings.rootfs_writable else -1
        theirs, ours = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_STREAM)
        proc = os.open("/proc", os.O_PATH | os.O_CLOEXEC)
        child = os.fork()
        if child == 0:
            ours.close()
            _build(step, source, Channel(theirs), proc)
        theirs.close()
        os.close(proc)
        channel = Channel(ours)
        try:
            pairs, fds = channel.receive_with_fds()
            while pairs[0][0] == "log":
                log.sink(pairs[1][1].upper(), pairs[0][1])
                pairs, fds = channel.receive_with_fds()
            if pairs[0][0] == "error":
                hint = dict(pairs).get("hint", "")
                raise PenrootError("\n".join(value for key, value in pairs if key == "error"), hint=hint)
            self.environ = dict(value.partition("=")[::2] for key, value in pairs if key == "environ")
            below = dict(value.partition("=")[::2] for key, value in pairs if key == "below")
            self.workdir = dict(pairs)["workdir"]
            # What this job has chosen is not for the tasks of another one.
            chosen = {name for name, value in step.chosen().items() if self.environ.get(name) == value}
            self.lent = {name: value for name, value in self.environ.items() if name not in chosen}
            self.lent.update({name: value for name, value in below.items() if name in chosen})
            kept = [(name, fd) for name, fd in zip(_NAMESPACES, fds, strict=False) if not is_ours(name, fd)]
            self.names, self.fds = tuple(name for name, _ in kept), tuple(fd for _, fd in kept)
            if len(fds) > len(_NAMESPACES):
                self.shared = fds[-1]
        except EOFError:
            _, status = os.waitpid(child, 0)
            child = 0
            raise PenrootError(
                f"the container could not be built: its process ended with status {os.waitstatus_to_exitcode(status)}",
                hint="killed for memory? see --mem and dmesg" if os.WIFSIGNALED(status) else "",
            ) from None
        finally:
            ours.close()
            if child:
                os.waitpid(child, 0)

    def answer(self, channel: Channel, task: Job) -> None:
        """Let one task in."""
        me = f"{os.getpid()} {self.step.started()}"
        assign, drop = self.step.environ(self.environ, task, remap_root=self.remap_root)
        pairs = [("ok", ""), ("helper", me), *(("ns", name) for name in self.names)]
        if self.step.request.save:
            pairs.append(("saves", ""))
        pairs.append(("workdir", self.step.request.workdir or self.workdir))
        pairs += [("set", f"{name}={value}") for name, value in assign.items()]
        pairs += [("unset", name) for name in drop]
        channel.send(pairs, self.fds)

    def hand_over(self, channel: Channel) -> None:
        """Let another step in; with it goes the root file system alone, for a container of its own on it."""
        pairs = [("workdir", self.workdir), *(("ns", name) for name in self.names)]
        pairs += [("environ", f"{name}={value}") for name, value in self.lent.items()]
        if self.remap_root:
            pairs.append(("root", ""))
        if self.served:
            pairs.append(("served", self.served))
        channel.send(pairs, (*self.fds, self.shared) if self.shared >= 0 else self.fds)


def is_ours(name: str, fd: int) -> bool:
    """Whether a descriptor is of that namespace in which this process is."""
    return os.path.samestat(os.fstat(fd), os.stat(f"/proc/self/ns/{name}"))


def _imposter(step: Step, other: str, why: str) -> PenrootError:
    return ContainerError(
        f"what answers for the running container {step.request.name} is not the helper process of step {other}: {why}",
        hint=f"scancel {other} ends that step; or use another container: --container-name={step.request.name}:no_exec",
    )


def _build(step: Step, source: Source, channel: Channel, proc: int) -> NoReturn:
    """In the child: enter a new container, say what it is like, and wait until it is held."""
    status = 1
    log.sink = channel.log
    # Else the task that waits would not see that the helper was killed.
    os.close(_SOCKET)
    os.close(_CONTROL)
    try:
        environ, below, workdir = step.enter(source)
        pairs = [("workdir", workdir), *(("environ", f"{name}={value}") for name, value in environ.items())]
        pairs += [("below", f"{name}={value}") for name, value in below.items()]
        # By the node's /proc, as an image may have none; nobody else may look at this process.
        spaces = [os.open(f"self/ns/{name}", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc) for name in _NAMESPACES]
        if source.upper and step.settings.rootfs_writable:
            spaces.append(step.root())
        channel.send(pairs, tuple(spaces))
        channel.socket.recv(1)
        status = 0
    except PenrootError as e:
        _tell(channel, cause(e) or e)
    except BaseException as e:
        if why := cause(e):
            _tell(channel, why)
            os._exit(status)
        # A bug of ours: where it is goes to the user too.
        frame = e.__traceback__
        while frame is not None and frame.tb_next is not None:
            frame = frame.tb_next
        where = f"{frame.tb_frame.f_code.co_filename}:{frame.tb_lineno}" if frame else ""
        _tell(channel, PenrootError(f"the container could not be built: {e!r}", hint=f"a bug in penroot, {where}"))
    os._exit(status)


def _tell(channel: Channel, error: PenrootError) -> None:
    try:
        channel.fail(error)
    except BrokenPipeError:
        os._exit(1)  # the helper was killed: nobody to tell
