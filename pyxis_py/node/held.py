"""A container that a helper holds: the running container of another step, or a new container, built by a child."""

from __future__ import annotations

import _signal
import errno
import os

from enroot_py.base import capture, cgroups, linux, log, operations, proc
from enroot_py.base.errors import ContainerError, PenrootError
from enroot_py.base.fds import Fd
from enroot_py.runtime import hostfiles, interpreters, mounting, namespaces, rootfs
from enroot_py.runtime.environ import warn_of_missing_paths
from pyxis_py.request.channel import SOCKET, Channel, assignments, await_answer, forked, tell

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from enroot_py.runtime.rootfs import Source
    from pyxis_py.node.container import Container
    from pyxis_py.node.running import Peer
    from pyxis_py.node.step import Step
    from pyxis_py.request.channel import Pairs
    from pyxis_py.request.job import Job

    Answer = tuple[list[tuple[str, str]], list[int]]  # what a child sends: pairs and descriptors

_NAMESPACES = ("user", "cgroup", "mnt", "ipc", "uts", "net")
_KINDS = {"net": "network", "ipc": "IPC", "uts": "UTS"}
_ANSWER_TIMEOUT_S = 30  # for the helper of another step to answer
_DROP_BYTES = 1 << 16  # to read and drop in one call
_SERVER_EXIT_S = 0.3  # time for the server of an image to exit


class Lent:
    """The container of another step, as the helper of the other step has sent it."""

    __slots__ = ("environ", "spaces", "shared", "unsealed", "workdir", "remap_root", "new_keyring", "served")

    def __init__(self, pairs: Pairs, fds: list[int]) -> None:
        single = dict(pairs)
        self.environ = assignments(pairs, "environ")
        self.spaces = dict(zip((value for key, value in pairs if key == "ns"), fds, strict=False))
        self.unsealed = fds[len(self.spaces)] if len(fds) > len(self.spaces) else -1
        self.shared = -1 if "sealed" in single else self.unsealed
        self.workdir = single["workdir"]
        self.remap_root = "root" in single
        self.new_keyring = "keyring" in single
        self.served = single.get("served", "")  # the step whose process serves the squashfs image

    @classmethod
    def of(cls, peer: Peer) -> Lent:
        """Ask a helper for its container. Raises EOFError if the helper has ended, OSError, TimeoutError."""
        channel = Channel(peer.socket)
        channel.socket.settimeout(_ANSWER_TIMEOUT_S)
        channel.send((("verb", "attach"), ("unsealed", "1")))
        lent = cls(*channel.receive_with_fds(peer.pid))
        peer.check()
        if "mnt" not in lent.spaces or _is_ours("mnt", lent.spaces["mnt"]):
            raise PermissionError(errno.EPERM, "it returned no container")
        return lent

    def close(self) -> None:
        """Close all descriptors: they keep the container alive."""
        for fd in (*self.spaces.values(), *((self.unsealed,) if self.unsealed >= 0 else ())):
            os.close(fd)


class AddedMounts:
    """The mounts that a step has added to a running container.

    ``attached`` maps a target to the descriptor of its mount, ``failed`` maps a target to the reason of the failure.
    """

    __slots__ = ("attached", "failed")

    def __init__(self, attached: dict[str, int], failed: dict[str, str]) -> None:
        self.attached = attached
        self.failed = failed

    def leave(self, target: str) -> None:
        """Leave a mount in the container until the container ends."""
        if target in self.attached:
            os.close(self.attached.pop(target))


class Held:
    """A running container: its namespaces, and the data for tasks to enter them."""

    FOLLOW_DELAY_MS = hostfiles.DELAY_MS

    def __init__(self, container: Container, meanwhile: Callable[[], None]) -> None:
        """Join the running container of the step's name, or build a new container. Raises PenrootError.

        ``meanwhile`` is called while a child builds the container.
        """
        self.container = container
        self.step = container.step
        # ``unsealed`` is a writable mount of the root file system, without the mounts beneath it. ``shared`` is the
        # same mount if steps may start separate containers on it, else -1.
        self.unsealed = self.shared = -1
        self.added_mounts: AddedMounts | None = None
        self.output = -1  # output of processes that hooks or the entrypoint left behind: read and dropped
        self._builder = 0
        self._lifetime = -1  # a pipe: when it is closed, the child of follow_host_files() ends
        self._host_files = hostfiles.digests()
        self._broken: dict[tuple[str, str], str] = {}  # why a command cannot run, by command and PATH
        running = self._running()
        self.joined = running is not None and container.joins_running()
        if running is not None and self.joined:
            self._join(running)
        else:
            self._build(running.shared if running else -1, meanwhile)
            if running is not None:
                running.close()
        self.directory = container.directory_id()

    def _running(self) -> Lent | None:
        """Return the running container of this name, or None. Raises ContainerError."""
        step = self.step
        if step.request.name is None:
            return None
        peers = dict(step.running.peers(step.name))
        try:
            asleep = {other: why for other, peer in peers.items() if (why := cgroups.pause_reason(peer.pid))}
            for other, peer in peers.items():
                lent = None if other in asleep else self._ask(other, peer)
                if lent is None:
                    continue
                if lent.served in asleep:  # every access to a file would block
                    raise _silent(step, lent.served, asleep[lent.served])
                return lent
            for other, why in asleep.items():
                raise _silent(step, other, why)
        finally:
            for peer in peers.values():
                peer.close()
        return None

    def _ask(self, other: str, peer: Peer) -> Lent | None:
        """Return the container of the step ``other``, or None if its helper has just ended. Raises ContainerError."""
        step = self.step
        try:
            return Lent.of(peer)
        except TimeoutError:
            raise _silent(step, other, cgroups.pause_reason(peer.pid) or "it does not answer") from None
        except (EOFError, ConnectionError, ProcessLookupError):
            return None  # the helper has ended
        except OSError as e:
            raise _imposter(step, other, str(e.strerror)) from e

    def _join(self, running: Lent) -> None:
        """Use the container of another step. Raises ContainerError, ConfigError."""
        self.spaces, self.environ, self.workdir = running.spaces, running.environ, running.workdir
        self.remap_root, self.served = running.remap_root, running.served
        self.unsealed, self.shared = running.unsealed, running.shared
        self.lent = self.environ
        self.environ = self._with_file({**self.environ, **self.container.environment.pmix_stores()})
        self._check_join()

    def _check_join(self) -> None:
        """Warn about options without effect on a running container. Raises ContainerError if a namespace is missing."""
        request = self.step.request
        for kind in request.unshare:
            if kind not in self.spaces:
                raise ContainerError(
                    f"--container-unshare={kind}: the running container {request.name} is "
                    f"not in a separate {_KINDS[kind]} namespace",
                    hint=f"remove the option, or use another container: --container-name={request.name}:no_exec",
                )
        origins = [mount.origin or request.origins["mounts"] for mount in request.mounts]
        for origin in dict.fromkeys(origins):
            tell(f"ignoring {origin} when attaching to a running container")
        if request.remap_root not in (None, self.remap_root):
            origin = request.origins["remap_root"]
            tell(f"ignoring {origin} when attaching to a running container: its user does not change")
        if self.served:
            # Slurm kills the server with its step, and a user cannot move a process into another step's cgroup.
            log.warn(
                f"files of the running container {request.name} come from a process of step {self.served} "
                "and disappear when that step ends; use a named container, or :no_exec for private mounts"
            )

    def _build(self, shared: int, meanwhile: Callable[[], None]) -> None:
        """Build the container in a child, which ends when this process holds the namespaces. Raises PenrootError."""
        step, container = self.step, self.container
        source = container.prepare()
        operations.phase("image")
        self.remap_root = step.settings.remap_root
        source.shared = shared if step.settings.rootfs_writable else -1
        with Fd(os.open("/proc", os.O_PATH | os.O_CLOEXEC)) as proc:
            channel, child = forked(
                lambda channel: _enter(container, source, channel, proc), "the container could not be built: "
            )
        meanwhile()
        try:
            pairs, fds = await_answer(channel, child)
        except EOFError:
            _, status = os.waitpid(child, 0)
            raise PenrootError(
                f"the container could not be built: its process ended with status {os.waitstatus_to_exitcode(status)}",
                hint="killed for memory? see --mem and dmesg" if os.WIFSIGNALED(status) else "",
            ) from None
        finally:
            channel.socket.close()
        self._builder = child  # ends soon: reap() waits for it
        if operations.event is not None:
            for name, seconds in assignments(pairs, "phase").items():
                operations.event.add(name, float(seconds))
        single = dict(pairs)
        self.environ, self.workdir = assignments(pairs, "environ"), single["workdir"]
        self.served = step.job.step if "served" in single else ""
        self._broken[step.job.command, container.environment.search(self.environ)] = single["broken"]
        # ``lent`` is for steps that join: they do not get the values that this step has chosen.
        below = assignments(pairs, "below")
        environment = container.environment
        chosen = {name for name, value in environment.chosen().items() if self.environ.get(name) == value}
        chosen |= environment.in_file()
        self.lent = {name: value for name, value in self.environ.items() if name not in chosen}
        self.lent.update({name: value for name, value in below.items() if name in chosen})
        if "output" in single:
            self.output = fds.pop()
        spaces = zip(_NAMESPACES, fds, strict=False)
        self.spaces = {name: fd for name, fd in spaces if not _is_ours(name, fd)}
        if len(fds) > len(_NAMESPACES):
            self.unsealed = fds[-1]
            self.shared = -1 if "sealed" in single else self.unsealed

    def _with_file(self, environ: dict[str, str]) -> dict[str, str]:
        """Return the environment of a running container, changed by this step's environment file."""
        of_file = self.container.environment.of_file(environ)
        kept = {name: value for name, value in environ.items() if name not in of_file}
        return {**kept, **{name: value for name, (value, _) in of_file.items() if value is not None}}

    def answer(self, channel: Channel, task: Job) -> None:
        """Send the namespaces and the environment to a task."""
        # PID and start time identify this process.
        me = f"{os.getpid()} {proc.Stat(os.getpid()).started}"
        workdir = self.step.request.workdir or self.workdir
        environ = {**self.environ, "PWD": os.path.normpath(workdir)}
        assign, drop = self.container.environment.of_task(environ, task, remap_root=self.remap_root)
        pairs = [("ok", ""), ("helper", me), *(("ns", name) for name in self.spaces)]
        if self.step.request.save:
            pairs.append(("saves", ""))
        if self.step.settings.unshare_keyring:
            pairs.append(("keyring", "new"))
        if self.remap_root:
            pairs.append(("root", ""))
        pairs.append(("workdir", workdir))
        if by := self.step.request.origins.get("workdir"):
            pairs.append(("workdir_by", by))
        if broken := self._explain(task.command, workdir, self.container.environment.search(environ)):
            pairs.append(("broken", broken))
        pairs += [("set", f"{name}={value}") for name, value in assign.items()]
        pairs += [("unset", name) for name in drop]
        channel.send(pairs, tuple(self.spaces.values()))

    def _explain(self, command: str, workdir: str, search: str) -> str:
        """Return why a task cannot run its command in the container, or "" if it can or the reason is unknown."""
        if command and (command, search) not in self._broken:
            self._broken[command, search] = _explain(self.spaces, command, workdir, search)
        return self._broken.get((command, search), "")

    def reap(self) -> None:
        """Wait for the process that has built the container."""
        if self._builder:
            os.waitpid(self._builder, 0)

    def follow_host_files(self) -> None:
        """Start a child that shows the container later changes of /etc/resolv.conf and so on, until let_go()."""
        try:
            end, self._lifetime = os.pipe()
            with Fd(end):
                hostfiles.follow_spaces(self.spaces, end, self._host_files)
        except OSError:  # no descriptor is left: the container keeps the files of its start
            return

    def hand_over(self, channel: Channel, *, unsealed: bool) -> None:
        """Send another step the namespaces, and the root file system without the mounts beneath it.

        Without ``unsealed``, send only a writable root file system, on which the other step can start a separate
        container. Helpers of earlier versions do not set ``unsealed``.
        """
        root = (self.unsealed,) if (self.unsealed if unsealed else self.shared) >= 0 else ()
        pairs = [("workdir", self.workdir), *(("ns", name) for name in self.spaces)]
        pairs += [("environ", f"{name}={value}") for name, value in self.lent.items()]
        if self.remap_root:
            pairs.append(("root", ""))
        if self.step.settings.unshare_keyring:
            pairs.append(("keyring", "new"))
        if self.served:
            pairs.append(("served", self.served))
        if root and self.shared < 0:
            pairs.append(("sealed", ""))
        channel.send(pairs, (*self.spaces.values(), *root))

    def report_killed(self) -> None:
        """Warn if the server of the container was killed while its step ran."""
        if self.served == self.step.job.step:
            from enroot_py.runtime import squashfuse

            squashfuse.report_killed(self.step.request.image or self.step.name)

    def drop_output(self) -> None:
        """Read and drop output that nobody reads, without waiting."""
        if not os.read(self.output, _DROP_BYTES):
            os.close(self.output)
            self.output = -1

    def let_go(self) -> None:
        """Close the namespaces, and wait for the server of an image, which ends with them.

        If a process still lived, slurmstepd would kill it, and check again only after a second. If the server does not
        end within a moment, leave it to slurmstepd: another step, or a process that a task left behind, may be in the
        container.
        """
        _signal.pthread_sigmask(_signal.SIG_BLOCK, (_signal.SIGCHLD,))
        for fd in (*self.spaces.values(), *(fd for fd in (self.unsealed, self._lifetime) if fd >= 0)):
            os.close(fd)
        try:
            while os.waitpid(-1, os.WNOHANG)[0] or _signal.sigtimedwait((_signal.SIGCHLD,), _SERVER_EXIT_S):
                pass
        except ChildProcessError:
            return


def _explain(spaces: Mapping[str, int], command: str, workdir: str, search: str) -> str:
    def look() -> Answer:
        proc = os.open("/proc", os.O_PATH | os.O_CLOEXEC)  # of the node
        enter_user(spaces)
        rootfs.import_no_files()
        linux.setns(spaces["mnt"], linux.CLONE_NEWNS)
        return [("broken", interpreters.explain_in(workdir, command, search, proc))], []

    try:
        return dict(in_child(look)[0])["broken"]
    except PenrootError:
        return ""  # slurmstepd prints its own message


def in_child(act: Callable[[], Answer]) -> Answer:
    """Run ``act`` in a forked child, and return its answer. Raises PenrootError."""

    def answer(channel: Channel) -> None:
        pairs, fds = act()
        channel.send([("ok", ""), *pairs], tuple(fds))

    channel, child = forked(answer, "")
    try:
        return await_answer(channel, child)
    except EOFError:
        raise PenrootError("the process that enters the container was killed", hint="see --mem and dmesg") from None
    finally:
        channel.socket.close()
        os.waitpid(child, 0)


def enter_user(spaces: Mapping[str, int]) -> None:
    """In a child: enter the user namespace of a container."""
    namespaces.hide()
    if "user" in spaces:  # a superuser's container has no user namespace of its own
        linux.setns(spaces["user"], linux.CLONE_NEWUSER)


def _is_ours(name: str, fd: int) -> bool:
    """Return whether a descriptor refers to the namespace of this process."""
    return os.path.samestat(os.fstat(fd), os.stat(f"/proc/self/ns/{name}"))


def _silent(step: Step, other: str, why: str) -> PenrootError:
    return ContainerError(
        f"step {other} runs the container {step.request.name}, and its helper process does nothing: {why}",
        hint=f"resume a suspended job: scontrol resume {other.partition('.')[0]}; or end that step: scancel {other}; "
        "or use another container",
    )


def _imposter(step: Step, other: str, why: str) -> PenrootError:
    return ContainerError(
        f"the process that answers for the running container {step.request.name} "
        f"is not the helper process of step {other}: {why}",
        hint=f"end that step: scancel {other}; or use another container",
    )


def _enter(container: Container, source: Source, channel: Channel, proc: int) -> None:
    """In the child: enter a new container, describe it to the helper, and wait until the helper holds it."""
    # Close the helper's descriptors: the waiting task must see an end of file if the helper is killed, and a process
    # that a hook leaves behind must not keep the helper's locks.
    kept = sorted((channel.socket.fileno(), proc, *((source.shared,) if source.shared >= 0 else ())))
    for low, high in zip((SOCKET - 1, *kept), (*kept, 0xFFFFFFFF), strict=True):
        if low + 1 < high:
            linux.close_range(low + 1, high - 1, 0)
    if operations.event is not None:
        operations.event.again()
    environ, below, workdir = container.enter(source)
    _warn_of_missing_paths(container, environ)
    broken = interpreters.explain_in(
        container.step.request.workdir or workdir,
        container.step.job.command,
        container.environment.search(environ),
        proc,
    )
    pairs = [("workdir", workdir), ("broken", broken)]
    pairs += [("environ", f"{name}={value}") for name, value in environ.items()]
    pairs += [("below", f"{name}={value}") for name, value in below.items()]
    if operations.event is not None:
        pairs += [("phase", f"{name}={seconds}") for name, seconds in operations.event.phases.items()]
    if source.image or mounting.served:
        pairs.append(("served", ""))
    # Use the node's /proc: an image may have no /proc, and only this process may read these links.
    spaces = [os.open(f"self/ns/{name}", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc) for name in _NAMESPACES]
    if source.shared >= 0:
        spaces.append(source.shared)
    if not (source.upper and container.step.settings.rootfs_writable):
        pairs.append(("sealed", ""))
    if (output := capture.left_open()) >= 0:
        pairs.append(("output", ""))
        spaces.append(output)
    channel.send(pairs, tuple(spaces))
    channel.socket.recv(1)


def _warn_of_missing_paths(container: Container, inside: Mapping[str, str]) -> None:
    """In the container: warn of missing paths in the tasks' environment, on one node of the step.

    Nothing can be imported here, and Environment.of_task() would import modules. The variables that it adds name no
    paths, so they can be omitted.
    """
    job, environment = container.step.job, container.environment
    if job.tasks <= 1 or job.is_first_of_several_tasks:
        chosen = environment.chosen()
        tasks = {**job.environ, **inside, **chosen}
        for name in environment.in_file() - inside.keys() - chosen.keys():
            tasks.pop(name, None)  # the environment file unsets it
        warn_of_missing_paths(tasks)
