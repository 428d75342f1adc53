"""The process that the SPANK plugin executes: it decides for a step, builds its container and holds it.

Entered by ``main``, with a socket as fd 3; the protocol is in
c_shims/spank/README.md. One verb a process: ``check`` at submit, ``step`` for
the life of a step on a node, ``finish`` after its last task where that one was
killed, ``epilog`` after a job that left something.
"""

import _signal
import _socket
import os
import select
import sys

from enroot_py import log
from enroot_py.errors import PenrootError, RefusedError
from pyxis_py.job import REFUSED, Job

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import NoReturn

    from enroot_py.rootfs import Source
    from pyxis_py.step import Step

_SOCKET = 3
_LIFELINE = 4
_NAMESPACES = ("user", "cgroup", "mnt", "ipc", "uts", "net")
_LIMIT = 64 << 20  # bytes in one message
_FDS = 8
_MOMENT = 0.3  # seconds that the server of an image has to end


class Channel:
    """Messages of key and value pairs over a stream socket."""

    def __init__(self, socket: _socket.socket) -> None:
        self.socket = socket

    def receive(self) -> "list[tuple[str, str]]":
        """One message. Raises EOFError where the peer is gone."""
        return self._message(b"")

    def receive_with_fds(self) -> "tuple[list[tuple[str, str]], list[int]]":
        """One message and the descriptors that came with its first byte. Raises EOFError, OSError."""
        room = _socket.CMSG_SPACE(_FDS * 4)
        flags = _socket.MSG_CMSG_CLOEXEC
        first, controls, _, _ = self.socket.recvmsg(1, room, flags)
        if not first:
            raise EOFError("the peer is gone")
        data = b"".join(c for level, kind, c in controls if (level, kind) == (_socket.SOL_SOCKET, _socket.SCM_RIGHTS))
        fds = [int.from_bytes(data[at : at + 4], sys.byteorder) for at in range(0, len(data) // 4 * 4, 4)]
        return self._message(first), fds

    def _message(self, begun: bytes) -> "list[tuple[str, str]]":
        size = int.from_bytes(begun + self._exactly(4 - len(begun)), "little")
        if size > _LIMIT:
            raise EOFError(f"message of {size} bytes")
        words = os.fsdecode(self._exactly(size)).split("\0")[:-1]
        return list(zip(words[::2], words[1::2], strict=True))

    def _exactly(self, size: int) -> bytes:
        parts = []
        while size:
            part = self.socket.recv(min(size, 1 << 20))
            if not part:
                raise EOFError("the peer is gone")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def send(self, pairs: "Iterable[tuple[str, str]]", fds: "tuple[int, ...]" = ()) -> None:
        """Send one message, with file descriptors as SCM_RIGHTS, unix(7). Raises OSError."""
        payload = os.fsencode("".join(f"{key}\0{value}\0" for key, value in pairs))
        data = len(payload).to_bytes(4, "little") + payload
        sent = 0
        if fds:
            rights = b"".join(fd.to_bytes(4, sys.byteorder) for fd in fds)
            sent = self.socket.sendmsg([data], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)])
        while sent < len(data):
            sent += self.socket.send(data[sent:])

    def log(self, level: str, text: str) -> None:
        names = {"INFO": "info", "WARN": "warn", "ERROR": "error", "HINT": "error", "TELL": "tell"}
        if level in names:
            self.send((("log", text), ("level", names[level])))

    def fail(self, error: PenrootError) -> None:
        lines = [("error", line) for line in str(error).split("\n")]
        self.send([*lines, *((("hint", error.hint),) if error.hint else ())])


class Cancelled(PenrootError):
    """SIGTERM came while the container was being set up."""


def main() -> None:
    """Serve the verb that the command line names; the exit status is 0 when an answer was given."""
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
            from pyxis_py import step

            if verb == "finish":
                step.Step(job).finish(job.numbers["failed"] != 0)
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
        for line in (f"{request.origins['image']}={request.image}: {e}", e.hint):
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
        listener, address = listen()
        step.registry.add(step.name, job, address)
    except BaseException:
        step.registry.remove(step.name, job)
        raise
    finally:
        os.close(lock)
    # What Slurm sends to every process of a step is for the programs: one that
    # writes a checkpoint on SIGTERM still needs its root file system.
    for number in (_signal.SIGTERM, _signal.SIGINT, _signal.SIGHUP, _signal.SIGQUIT, _signal.SIGUSR1, _signal.SIGUSR2):
        _signal.signal(number, _signal.SIG_IGN)
    container.answer(channel, job, address)
    log.sink = _nowhere
    serve(container, listener, address)


def listen() -> "tuple[_socket.socket, str]":
    """A listening socket and its address, a free abstract one of the kernel's choice: unix(7), "autobind"."""
    listener = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)
    listener.bind("")
    listener.listen(128)
    return listener, os.fsdecode(listener.getsockname()[1:])


def _cancel(number: int, frame: object) -> None:
    raise Cancelled("cancelled while the container was being set up")


def _nowhere(level: str, text: str) -> None:
    """Nobody listens between two tasks."""


def serve(container: "Held", listener: _socket.socket, address: str) -> "NoReturn":
    """Answer tasks and other steps until slurmstepd is gone, or says that the step has ended."""
    step = container.step
    poll = select.poll()
    poll.register(listener.fileno(), select.POLLIN)
    poll.register(_LIFELINE, 0)  # POLLHUP comes unasked
    while True:
        ready = dict(poll.poll())
        if listener.fileno() in ready:
            fd, _ = listener._accept()  # type: ignore[attr-defined]  # of the C module, socket.socket builds on it
            asker = Channel(_socket.socket(fileno=fd))
            try:
                if peer(asker.socket)[1] not in (step.job.uid, 0):
                    continue
                asked = Job(asker.receive())
                if asked.verb == "finish":
                    end(container, asked, asker, listener)
                elif asked.verb == "attach":
                    # A container that was removed while it runs is nobody's to attach to.
                    if step.directory_id() == container.directory:
                        container.hand_over(asker)
                else:
                    container.answer(asker, asked, address)
            except (EOFError, OSError):
                continue  # a task that was killed while it asked: nobody to answer
            finally:
                asker.socket.close()
        elif _LIFELINE in ready:
            step.registry.remove(step.name, step.job)
            os._exit(0)


def end(container: "Held", asked: Job, asker: Channel, listener: _socket.socket) -> "NoReturn":
    """Finish the step for slurmstepd, which waits for the end of this process too."""
    log.sink = asker.log
    try:
        if container.attached:
            container.step.take_back(container.spaces)
        container.step.finish(asked.numbers["failed"] != 0, lambda: refuse(listener))
        asker.send((("ok", ""),))
    except PenrootError as e:
        asker.fail(e)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        asker.fail(PenrootError("the step could not be finished", hint=repr(sys.exc_info()[1])))
    let_go(container)
    os._exit(0)


def let_go(container: "Held") -> None:
    """Close the namespaces, and wait for the server of an image, which ends with them.

    slurmstepd would find it alive, kill it, and sleep for a second before it looks again. Who is not done within a
    moment is left to it: another step may be in the container, or a process that a task left behind.
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


def refuse(listener: _socket.socket) -> None:
    """Turn away who asks to attach within a moment: the step is ending, and that one would wait for us, we for it."""
    if select.select([listener.fileno()], (), (), 0.05)[0]:
        os.close(listener._accept()[0])  # type: ignore[attr-defined]  # as in serve


def peer(socket: _socket.socket) -> "tuple[int, int]":
    """Process and user at the other end, SO_PEERCRED of unix(7)."""
    credentials = socket.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, 12)
    return int.from_bytes(credentials[:4], sys.byteorder), int.from_bytes(credentials[4:8], sys.byteorder)


class Running:
    """What the helper of another step hands over of its container."""

    __slots__ = ("environ", "workdir", "names", "fds", "shared", "remap_root", "served")

    def __init__(self, pairs: "list[tuple[str, str]]", fds: "list[int]") -> None:
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

    def __init__(self, step: "Step") -> None:
        """Join the running container that the step asks for, or build a new one. Raises PenrootError."""
        self.step = step
        self.attached = False
        self.shared = -1
        self.served = ""
        running = self._running()
        if running and step.joins_running():
            self.environ, self.workdir, self.names, self.fds = (
                running.environ,
                running.workdir,
                running.names,
                running.fds,
            )
            self.remap_root, self.served = running.remap_root, running.served
            self.attached = True
            step.check_attached(self.names, self.served, remap_root=self.remap_root)
            step.bring(self.spaces, remap_root=self.remap_root)
        else:
            self.remap_root = step.settings.remap_root
            self._build(running.shared if running else -1)
        self.directory = step.directory_id()

    @property
    def spaces(self) -> "dict[str, int]":
        """The namespaces by name."""
        return dict(zip(self.names, self.fds, strict=True))

    def _running(self) -> "Running | None":
        """What the helper of a running container of this name hands over, or None."""
        step = self.step
        if step.request.name is None:
            return None
        for other, address in step.registry.addresses(step.name):
            channel = Channel(_socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC))
            try:
                channel.socket.connect("\0" + address)
                if peer(channel.socket)[1] != step.job.uid:
                    continue
                channel.send((("verb", "attach"),))
                pairs, fds = channel.receive_with_fds()
            except ConnectionRefusedError:
                step.registry.forget_dead(step.name, other)
                continue
            except (EOFError, OSError):
                continue  # it has ended in this very moment
            finally:
                channel.socket.close()
            return Running(pairs, fds)
        return None

    def _build(self, shared: int) -> None:
        """Build it in a child, which leaves when its namespaces are in our hands. Raises PenrootError."""
        step = self.step
        source = step.prepare()
        self.served = step.own_name if source.image else ""
        source.shared = shared if step.settings.rootfs_writable else -1
        theirs, ours = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_STREAM)
        child = os.fork()
        if child == 0:
            ours.close()
            _build(step, source, Channel(theirs))
        theirs.close()
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
            self.workdir = dict(pairs)["workdir"]
            self.names, self.fds = _namespaces(child)
            if fds:
                self.shared = fds[0]
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

    def answer(self, channel: Channel, task: Job, address: str) -> None:
        """Let one task in."""
        assign, drop = self.step.environ(self.environ, task, remap_root=self.remap_root)
        pairs = [("ok", ""), ("helper", address), *(("ns", name) for name in self.names)]
        pairs.append(("workdir", self.step.request.workdir or self.workdir))
        pairs += [("set", f"{name}={value}") for name, value in assign.items()]
        pairs += [("unset", name) for name in drop]
        channel.send(pairs, self.fds)

    def hand_over(self, channel: Channel) -> None:
        """Let another step in; with it goes the root file system alone, for a container of its own on it."""
        pairs = [("workdir", self.workdir), *(("ns", name) for name in self.names)]
        pairs += [("environ", f"{name}={value}") for name, value in self.environ.items()]
        if self.remap_root:
            pairs.append(("root", ""))
        if self.served:
            pairs.append(("served", self.served))
        channel.send(pairs, (*self.fds, self.shared) if self.shared >= 0 else self.fds)


def _build(step: "Step", source: "Source", channel: Channel) -> "NoReturn":
    """In the child: enter a new container, say what it is like, and wait until it is held."""
    status = 1
    log.sink = channel.log
    # Else the task that waits would not see that the helper was killed.
    os.close(_SOCKET)
    os.close(_LIFELINE)
    try:
        environ, workdir = step.enter(source)
        pairs = [("workdir", workdir), *(("environ", f"{name}={value}") for name, value in environ.items())]
        channel.send(pairs, (step.root(),) if source.upper and step.settings.rootfs_writable else ())
        channel.socket.recv(1)
        status = 0
    except PenrootError as e:
        _tell(channel, e)
    except BaseException as e:
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


def _namespaces(pid: int) -> "tuple[tuple[str, ...], tuple[int, ...]]":
    """Those namespaces of ``pid`` that are not ours, by name and as file descriptors."""
    names, fds = [], []
    for name in _NAMESPACES:
        path = f"/proc/{pid}/ns/{name}"
        if os.readlink(path) != os.readlink(f"/proc/self/ns/{name}"):
            names.append(name)
            fds.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
    return tuple(names), tuple(fds)
