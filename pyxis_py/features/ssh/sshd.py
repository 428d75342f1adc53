"""An ssh server for one connection, on stdin and stdout of a step. penroot ssh-proxy starts it on a node.

The server runs outside of the container and opens no file of the image: children of the nursery (joined.py) do
everything in the container. It listens on no port, except loopback ports that the client requests with ssh -R. It exits
at the end of its connection.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import tty
from typing import NoReturn

import asyncssh

from enroot_py.base import log, trusted
from enroot_py.base.errors import ContainerError, PenrootError
from enroot_py.base.fds import Fd
from enroot_py.runtime import namespaces
from enroot_py.runtime.processes import STEPS
from pyxis_py.admin import plugstack
from pyxis_py.features.ssh.joined import Inside, Nursery
from pyxis_py.features.ssh.sshsession import JobServer, copy
from pyxis_py.features.ssh.step import NOTE
from pyxis_py.node.held import Lent
from pyxis_py.node.running import Notes, RunningContainers
from pyxis_py.request import settings

_DROPPED = re.compile("LANG|LANGUAGE|LC_.*|PWD|SHLVL|SLURM_JOB_NAME")  # they describe srun, not the container


def serve(job: int, container: str, keys: str) -> NoReturn:
    """Serve one connection to a container of a job. Raises PenrootError."""
    runtime_path = _runtime_path()
    lent = _find(job, container, RunningContainers(runtime_path, os.geteuid()))
    if lent.unsealed >= 0:  # do not keep the root file system open during the connection
        os.close(lent.unsealed)
    notes = Notes(runtime_path, os.geteuid())
    notes.add(notes.of_feature(job, NOTE), keys)
    lent.environ = {**_step_environ(), **lent.environ}
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    namespaces.hide()  # from processes in the user's containers
    nursery = os.fork()
    if nursery == 0:
        ours.close()
        for number in (0, 1):  # the nursery must not have the connection
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
        Nursery(theirs, lent).serve()
    theirs.close()
    for fd in lent.spaces.values():
        os.close(fd)
    asyncio.run(_connection(Keys(keys), lent, ours))
    ours.close()
    os.waitpid(nursery, 0)  # at the exit of this process, the step ends and Slurm kills the nursery
    os._exit(0)


class Keys:
    """The host key, and the public key of the client."""

    def __init__(self, directory: str) -> None:
        """Read the keys in ``directory``. Raises PenrootError."""
        try:
            trusted.place(directory, closed_to=0o077)
            self.host = asyncssh.import_private_key(_read(f"{directory}/host"))
            self.user = asyncssh.import_authorized_keys(_read(f"{directory}/user.pub"))
        except (OSError, ValueError) as e:
            why = e.strerror if isinstance(e, OSError) else str(e)
            hint = "set ENROOT_CONFIG_PATH to a directory of yours that login nodes and compute nodes share"
            if os.path.isdir(directory):
                hint = f"remove them, and ssh creates new ones: rm -r {directory}"
            raise PenrootError(
                f"{os.uname().nodename} does not have the keys of the job: {directory}: {why}", hint=hint
            ) from e


def _read(path: str) -> str:
    with Fd(trusted.file(path)) as fd:
        return os.read(fd, 1 << 16).decode()


def _step_environ() -> dict[str, str]:
    """Return the variables of this step that a step in the container would also have."""
    return {name: value for name, value in os.environ.items() if not _DROPPED.fullmatch(name)}


def _find(job: int, container: str, running: RunningContainers) -> Lent:
    """Return the job's container that has the step or the name ``container``. Raises ContainerError.

    If ``container`` is "", return the job's only container on this node.
    """
    node = os.uname().nodename
    try:
        names = sorted(os.listdir(running.path))
    except FileNotFoundError:
        names = []
    matching: dict[str, list[str]] = {}
    for name in names:
        for step, peer in running.peers(name):
            with peer:
                label = _label(job, step)
                if label and container in ("", label, *_names(job, name)):
                    matching.setdefault(name, []).append(step)
    if not matching:
        raise ContainerError(
            f"{node}: no container {container}{' ' * bool(container)}of job {job} runs there",
            hint=f"select a step or node of squeue --steps --job {job}: ssh JOB.STEP.cluster, or JOB.NODE.cluster",
        )
    if len(matching) > 1:
        labels = {name: f"{job}.{_label(job, steps[0])}" for name, steps in sorted(matching.items(), key=_first_step)}
        values = {name: _names(job, name)[-1] for name in matching}
        each = ", ".join(label + f" ({values[name]})" * (values[name] != label) for name, label in labels.items())
        raise ContainerError(
            f"{node}: several containers of job {job} run there: {each}",
            hint=f"select one: ssh {next(iter(labels.values()))}.cluster",
        )
    ((name, steps),) = matching.items()
    for _, peer in running.peers(name):
        with peer:
            try:
                return Lent.of(peer)
            except (EOFError, ConnectionError, ProcessLookupError):
                continue
            except OSError as e:
                hint = f"use another step: squeue --steps --job {job}"
                raise ContainerError(f"cannot join the container of step {steps[0]} on {node}: {e}", hint=hint) from e
    raise ContainerError(
        f"the container of step {steps[0]} has just ended on {node}", hint=f"squeue --steps --job {job} shows what runs"
    )


def _runtime_path() -> str:
    """Return the runtime_path of plugstack.conf, where helpers listen on this node. Raises ConfigError."""
    for path in plugstack.files({}):
        for line in plugstack.stack(path):
            if os.path.basename(line.path) == settings.PLUGIN:
                return settings.load(line.arguments).runtime_path
    return settings.load(()).runtime_path


def _first_step(container: tuple[str, list[str]]) -> int:
    """Return the lowest step number of a container. A batch script has a higher number than the steps of srun."""
    return min(int(step.partition(".")[2]) for step in container[1])


def _label(job: int, step: str) -> str:
    """Return the name of a step in squeue, or "" for a step of another job."""
    owner, _, number = step.partition(".")
    return STEPS.get(number, number) if owner == str(job) else ""


def _names(job: int, container: str) -> tuple[str, ...]:
    """Return the values of --container-name that may have created a container."""
    name = container.removeprefix("pyxis_")
    return name, name.removeprefix(f"{job}_")


async def _connection(keys: Keys, lent: Lent, control: socket.socket) -> None:
    """Serve the connection on stdin until it ends."""
    ours, theirs = socket.socketpair()
    inside = Inside(control)
    # If the reader of a pipe exits while asyncio closes the pipe, asyncio closes it a second time and reports an error.
    # Log this error and others only for debugging.
    asyncio.get_running_loop().set_exception_handler(lambda _, context: log.debug(f"ssh: {context}"))
    carried = asyncio.create_task(_carry(ours))
    try:
        connection = await asyncssh.run_server(
            theirs,
            server_factory=lambda: JobServer(inside, own_network="net" in lent.spaces),
            server_host_keys=[keys.host],
            authorized_client_keys=keys.user,
            password_auth=False,
            kbdint_auth=False,
            host_based_auth=False,
            agent_forwarding=False,
            line_editor=False,
            allow_scp=False,
            encoding=None,
        )
        await connection.wait_closed()
    except (asyncssh.Error, OSError) as e:
        log.debug(f"ssh: {e}")  # the client prints it
    carried.cancel()


async def _carry(wire: socket.socket) -> None:
    """Copy stdin to a socket, and the socket to stdout: asyncssh needs one descriptor for both directions."""
    loop = asyncio.get_running_loop()
    if os.isatty(1):
        tty.setraw(1)  # srun --unbuffered makes stdout a terminal
    from_wire, to_wire = await asyncio.open_connection(sock=wire)
    from_client = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(from_client), os.fdopen(0, "rb", 0))
    pipe, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, os.fdopen(1, "wb", 0))
    to_client = asyncio.StreamWriter(pipe, protocol, None, loop)
    await asyncio.gather(copy(from_client, to_wire), copy(from_wire, to_client))
