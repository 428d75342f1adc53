"""A container that a helper holds: joined where another step runs it, else built by a child that leaves it to us."""

from __future__ import annotations

import _signal
import _socket
import errno
import os
import select

from enroot_py.base import capture, cgroups, linux, log, recording
from enroot_py.base.errors import ContainerError, PenrootError, cause
from enroot_py.base.fds import Fd
from enroot_py.runtime import mounts, processes
from pyxis_py.channel import SOCKET, Channel, assignments

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

    from enroot_py.runtime.rootfs import Source
    from pyxis_py.channel import Pairs
    from pyxis_py.job import Job
    from pyxis_py.running import Peer
    from pyxis_py.step import Step

_NAMESPACES = ("user", "cgroup", "mnt", "ipc", "uts", "net")
_PATIENCE = 30  # seconds for the helper of another step, which answers at once
_OUTPUT = 1 << 16  # bytes that are dropped at once
_MOMENT = 0.3  # seconds that the server of an image has to end


class Lent:
    """What the helper of another step hands over of its container."""

    __slots__ = ("environ", "spaces", "shared", "workdir", "remap_root", "served")

    def __init__(self, pairs: Pairs, fds: list[int]) -> None:
        single = dict(pairs)
        self.environ = assignments(pairs, "environ")
        self.spaces = dict(zip((value for key, value in pairs if key == "ns"), fds, strict=False))
        self.shared = fds[len(self.spaces)] if len(fds) > len(self.spaces) else -1
        self.workdir = single["workdir"]
        self.remap_root = "root" in single
        self.served = single.get("served", "")  # the step with the process that serves its squashfs image

    @classmethod
    def of(cls, peer: Peer) -> Lent:
        """What a helper hands over when it is asked. Raises EOFError where it has ended, OSError, TimeoutError."""
        channel = Channel(peer.socket)
        channel.socket.settimeout(_PATIENCE)
        channel.send((("verb", "attach"),))
        lent = cls(*channel.receive_with_fds(peer.pid))
        peer.check()
        if "mnt" not in lent.spaces or _is_ours("mnt", lent.spaces["mnt"]):
            raise PermissionError(errno.EPERM, "it hands over no container")
        return lent


class Held:
    """A running container: the namespaces that keep it alive, and what a task needs to enter it."""

    def __init__(self, step: Step) -> None:
        """Join the running container that the step asks for, or build a new one. Raises PenrootError."""
        self.step = step
        self.shared = -1  # its root file system alone, where it is writable
        self.output = -1  # what processes that hooks or the entrypoint have left behind write: read and dropped
        self._builder = 0
        running = self._running()
        self.attached = running is not None and step.joins_running()
        if running is not None and self.attached:
            self._join(running)
            recording.phase("attach")
        else:
            self._build(running.shared if running else -1)
        self.directory = step.directory_id()

    def _running(self) -> Lent | None:
        """What the helper of a running container of this name hands over, or None. Raises ContainerError."""
        step = self.step
        if step.request.name is None:
            return None
        peers = dict(step.running.peers(step.name))
        try:
            asleep = {other: why for other, peer in peers.items() if (why := cgroups.asleep(peer.pid))}
            for other, peer in peers.items():
                lent = None if other in asleep else self._ask(other, peer)
                if lent is None:
                    continue
                if lent.served in asleep:  # whoever looks at a file waits
                    raise _silent(step, lent.served, asleep[lent.served])
                return lent
            for other, why in asleep.items():
                raise _silent(step, other, why)
        finally:
            for peer in peers.values():
                peer.close()
        return None

    def _ask(self, other: str, peer: Peer) -> Lent | None:
        """What the helper of the step ``other`` hands over; None where it has just ended. Raises ContainerError."""
        step = self.step
        try:
            return Lent.of(peer)
        except TimeoutError:
            raise _silent(step, other, cgroups.asleep(peer.pid) or "it does not answer") from None
        except (EOFError, ConnectionError, ProcessLookupError):
            return None  # its answer is worth nothing
        except OSError as e:
            raise _imposter(step, other, str(e.strerror)) from e

    def _join(self, running: Lent) -> None:
        """Raises ContainerError, ConfigError."""
        self.spaces, self.environ, self.workdir = running.spaces, running.environ, running.workdir
        self.remap_root, self.served = running.remap_root, running.served
        self.lent = self.environ
        self.environ = self._with_file({**self.environ, **self.step.pmix_stores()})
        self.step.check_attached(self)
        self.step.bring(self.spaces, remap_root=self.remap_root)

    def _build(self, shared: int) -> None:
        """Build it in a child, which leaves when its namespaces are in our hands. Raises PenrootError."""
        step = self.step
        source = step.prepare()
        recording.phase("image")
        self.remap_root = step.settings.remap_root
        source.shared = shared if step.settings.rootfs_writable else -1
        theirs, ours = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_STREAM)
        with Fd(os.open("/proc", os.O_PATH | os.O_CLOEXEC)) as proc:
            child = os.fork()
            if child == 0:
                ours.close()
                _enter(step, source, Channel(theirs), proc)
        theirs.close()
        from pyxis_py import service  # noqa: F401  # not while a program of the step wants this processor

        try:
            pairs, fds = _built(Channel(ours), child)
        except EOFError:
            _, status = os.waitpid(child, 0)
            raise PenrootError(
                f"the container could not be built: its process ended with status {os.waitstatus_to_exitcode(status)}",
                hint="killed for memory? see --mem and dmesg" if os.WIFSIGNALED(status) else "",
            ) from None
        finally:
            ours.close()
        self._builder = child  # it ends now
        if recording.event is not None:
            for name, seconds in assignments(pairs, "phase").items():
                recording.event.add(name, float(seconds))
        single = dict(pairs)
        self.environ, self.workdir = assignments(pairs, "environ"), single["workdir"]
        self.served = step.job.step if "served" in single else ""
        # What this job has chosen is not for the tasks of another one.
        below = assignments(pairs, "below")
        chosen = {name for name, value in step.chosen().items() if self.environ.get(name) == value}
        chosen |= step.in_file()
        self.lent = {name: value for name, value in self.environ.items() if name not in chosen}
        self.lent.update({name: value for name, value in below.items() if name in chosen})
        if "output" in single:
            self.output = fds.pop()
        spaces = zip(_NAMESPACES, fds, strict=False)
        self.spaces = {name: fd for name, fd in spaces if not _is_ours(name, fd)}
        if len(fds) > len(_NAMESPACES):
            self.shared = fds[-1]

    def _with_file(self, environ: dict[str, str]) -> dict[str, str]:
        """The environment of a running container, with what this step's environment file sets and unsets."""
        said = self.step.of_file(environ)
        kept = {name: value for name, value in environ.items() if name not in said}
        return {**kept, **{name: value for name, (value, _) in said.items() if value is not None}}

    def answer(self, channel: Channel, task: Job) -> None:
        """Let one task in."""
        # Together with its PID the time when this process began tells it from all others.
        me = f"{os.getpid()} {processes.started(os.getpid())}"
        workdir = self.step.request.workdir or self.workdir
        environ = {**self.environ, "PWD": os.path.normpath(workdir)}
        assign, drop = self.step.environ(environ, task, remap_root=self.remap_root)
        pairs = [("ok", ""), ("helper", me), *(("ns", name) for name in self.spaces)]
        if self.step.request.save:
            pairs.append(("saves", ""))
        pairs.append(("workdir", workdir))
        if by := self.step.request.origins.get("workdir"):
            pairs.append(("workdir_by", by))
        pairs += [("set", f"{name}={value}") for name, value in assign.items()]
        pairs += [("unset", name) for name in drop]
        channel.send(pairs, tuple(self.spaces.values()))

    def reap(self) -> None:
        """See the process end that has built it."""
        if self._builder:
            os.waitpid(self._builder, 0)

    def hand_over(self, channel: Channel) -> None:
        """Let another step in; with it goes the root file system alone, for a container of its own on it."""
        pairs = [("workdir", self.workdir), *(("ns", name) for name in self.spaces)]
        pairs += [("environ", f"{name}={value}") for name, value in self.lent.items()]
        if self.remap_root:
            pairs.append(("root", ""))
        if self.served:
            pairs.append(("served", self.served))
        channel.send(pairs, self._fds())

    def _fds(self) -> tuple[int, ...]:
        return *self.spaces.values(), *((self.shared,) if self.shared >= 0 else ())

    def report_killed(self) -> None:
        """Warn if the server of the container was killed while its step ran."""
        if self.served == self.step.job.step:
            from enroot_py.runtime import squashfuse

            squashfuse.report_killed(self.step.request.image or self.step.name)

    def drop_output(self) -> None:
        """Read what processes of the container write to nobody, and wait for none."""
        if not os.read(self.output, _OUTPUT):
            os.close(self.output)
            self.output = -1

    def let_go(self) -> None:
        """Close the namespaces, and wait for the server of an image, which ends with them.

        slurmstepd would find it alive, kill it, and sleep for a second before it looks again. A server that has not
        ended within a moment is left to slurmstepd: another step may be in the container, or a process that a task
        left behind.
        """
        _signal.pthread_sigmask(_signal.SIG_BLOCK, (_signal.SIGCHLD,))
        for fd in self._fds():
            os.close(fd)
        try:
            while os.waitpid(-1, os.WNOHANG)[0] or _signal.sigtimedwait((_signal.SIGCHLD,), _MOMENT):
                pass
        except ChildProcessError:
            return


def _is_ours(name: str, fd: int) -> bool:
    """Whether a descriptor is of that namespace in which this process is."""
    return os.path.samestat(os.fstat(fd), os.stat(f"/proc/self/ns/{name}"))


def _silent(step: Step, other: str, why: str) -> PenrootError:
    return ContainerError(
        f"step {other} runs the container {step.request.name}, and its helper process does nothing: {why}",
        hint=f"scontrol resume {other.partition('.')[0]} lets a suspended job go on, scancel {other} ends that step; "
        "or use another container",
    )


def _imposter(step: Step, other: str, why: str) -> PenrootError:
    return ContainerError(
        f"what answers for the running container {step.request.name} is not the helper process of step {other}: {why}",
        hint=f"scancel {other} ends that step; or use another container",
    )


def _built(channel: Channel, child: int) -> tuple[Pairs, list[int]]:
    """Return what ``child`` says of the container that it has built. Raises PenrootError, EOFError if it has ended."""
    with Fd(os.pidfd_open(child)) as process:
        while True:
            # A process that a hook has left behind may hold the socket open.
            if channel.socket.fileno() not in select.select([channel.socket.fileno(), process], (), ())[0]:
                raise EOFError
            pairs, fds = channel.receive_with_fds()
            if pairs[0][0] != "log":
                break
            log.sink(pairs[1][1].upper(), pairs[0][1])
    if pairs[0][0] == "error":
        lines = [value for key, value in pairs if key == "error"]
        raise PenrootError("\n".join(lines), hint=dict(pairs).get("hint", ""))
    return pairs, fds


def _enter(step: Step, source: Source, channel: Channel, proc: int) -> NoReturn:
    """In the child: enter a new container, say what it is like, and wait until it is held."""
    log.sink = channel.log
    # The task that waits must see it if the helper is killed, and a process that a hook leaves behind must not keep
    # the helper's locks.
    kept = sorted((channel.socket.fileno(), proc, *((source.shared,) if source.shared >= 0 else ())))
    for low, high in zip((SOCKET - 1, *kept), (*kept, 0xFFFFFFFF), strict=True):
        if low + 1 < high:
            linux.close_range(low + 1, high - 1, 0)
    if recording.event is not None:
        recording.event.again()
    try:
        environ, below, workdir = step.enter(source)
        pairs = [("workdir", workdir), *(("environ", f"{name}={value}") for name, value in environ.items())]
        pairs += [("below", f"{name}={value}") for name, value in below.items()]
        if recording.event is not None:
            pairs += [("phase", f"{name}={seconds}") for name, seconds in recording.event.phases.items()]
        if source.image or mounts.served:
            pairs.append(("served", ""))
        # By the node's /proc, as an image may have none; nobody else may look at this process.
        spaces = [os.open(f"self/ns/{name}", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc) for name in _NAMESPACES]
        if source.upper and step.settings.rootfs_writable:
            spaces.append(_root())
        if (output := capture.left_open()) >= 0:
            pairs.append(("output", ""))
            spaces.append(output)
        channel.send(pairs, tuple(spaces))
        channel.socket.recv(1)
        os._exit(0)
    except BaseException as e:
        try:
            channel.fail(cause(e) or (e if isinstance(e, PenrootError) else _bug(e)))
        finally:
            os._exit(1)


def _root() -> int:
    """In the container: its root file system without what is mounted in it, for other containers on it.

    Two overlays with one upperdir are undefined (the kernel's filesystems/overlayfs,
    "Sharing and copying layers"); one overlay mounted twice is not. Raises OSError.
    """
    return linux.open_tree(linux.AT_FDCWD, "/", linux.OPEN_TREE_CLONE | linux.OPEN_TREE_CLOEXEC)


def _bug(error: BaseException) -> PenrootError:
    """Return what a failed system call means, or where our bug is."""
    if isinstance(error, OSError):
        from enroot_py.base import filesystems

        message, hint = filesystems.in_words(error)
        return PenrootError(f"the container could not be built: {message}", hint=hint)
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    where = f"{frame.tb_frame.f_code.co_filename}:{frame.tb_lineno}" if frame else ""
    return PenrootError(f"the container could not be built: {error!r}", hint=f"a bug in penroot, {where}")
