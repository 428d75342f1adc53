"""A container that a helper holds: joined where another step runs it, else built by a child that leaves it to us."""

from __future__ import annotations

import _socket
import os

from enroot_py.base import log
from enroot_py.base.errors import ContainerError, PenrootError, cause
from pyxis_py.channel import CONTROL, SOCKET, Channel

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

    from enroot_py.runtime.rootfs import Source
    from pyxis_py.job import Job
    from pyxis_py.step import Step

_NAMESPACES = ("user", "cgroup", "mnt", "ipc", "uts", "net")
_PATIENCE = 30  # seconds for the helper of another step, which answers at once


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
        for other, peer in step.running.peers(step.name):
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
        self.served = step.job.step if source.image else ""
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
        workdir = self.step.request.workdir or self.workdir
        environ = {**self.environ, "PWD": os.path.normpath(workdir)}
        assign, drop = self.step.environ(environ, task, remap_root=self.remap_root)
        pairs = [("ok", ""), ("helper", me), *(("ns", name) for name in self.names)]
        if self.step.request.save:
            pairs.append(("saves", ""))
        pairs.append(("workdir", workdir))
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
    os.close(SOCKET)
    os.close(CONTROL)
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
