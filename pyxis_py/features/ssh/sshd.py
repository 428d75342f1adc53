"""A server of ssh for one connection, on stdin and stdout of a step: what penroot ssh-proxy starts on a node.

It runs on the node, outside of the container, and opens nothing that an image holds: whatever happens in the
container is done by children of the nursery in `joined`. It listens nowhere, and ends with its connection.
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
from pyxis_py.admin import plugstack
from pyxis_py.features.ssh.joined import Inside, Nursery
from pyxis_py.features.ssh.sshsession import JobServer, copy
from pyxis_py.features.ssh.step import NOTE
from pyxis_py.node.held import Lent
from pyxis_py.node.running import Notes, RunningContainers
from pyxis_py.request import settings

_NOT_HERE = re.compile("LANG|LANGUAGE|LC_.*|PWD|SHLVL|SLURM_JOB_NAME")  # of srun, and its locale
_STEPS = {"4294967291": "batch", "4294967290": "interactive"}  # SLURM_BATCH_SCRIPT and its like of slurm.h


def serve(job: int, asked: str, keys: str) -> NoReturn:
    """Be the server for one connection to a container of a job. Raises PenrootError."""
    runtime_path = _runtime_path()
    lent = _find(job, asked, RunningContainers(runtime_path, os.geteuid()))
    if lent.unsealed >= 0:  # it would last as long as the connection
        os.close(lent.unsealed)
    notes = Notes(runtime_path, os.geteuid())
    notes.add(notes.of_feature(job, NOTE), keys)
    lent.environ = {**_own(), **lent.environ}
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    namespaces.hide()  # from what runs in containers of the user
    nursery = os.fork()
    if nursery == 0:
        ours.close()
        for number in (0, 1):  # the connection is none of its business
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
        Nursery(theirs, lent).serve()
    theirs.close()
    for fd in lent.spaces.values():
        os.close(fd)
    asyncio.run(_connection(Keys(keys), lent, ours))
    ours.close()
    os.waitpid(nursery, 0)  # with this process the step ends, and what it still runs is killed
    os._exit(0)


class Keys:
    """The server's own key, and that of whom it lets in."""

    def __init__(self, directory: str) -> None:
        """Raises PenrootError."""
        try:
            trusted.place(directory, closed_to=0o077)
            self.host = asyncssh.import_private_key(_read(f"{directory}/host"))
            self.user = asyncssh.import_authorized_keys(_read(f"{directory}/user.pub"))
        except (OSError, ValueError) as e:
            why = e.strerror if isinstance(e, OSError) else str(e)
            hint = "ENROOT_CONFIG_PATH must be a directory that login nodes and compute nodes see, and yours"
            if os.path.isdir(directory):
                hint = f"rm -r {directory}, and the next ssh makes them anew"
            raise PenrootError(
                f"{os.uname().nodename} does not have the keys of the job: {directory}: {why}", hint=hint
            ) from e


def _read(path: str) -> str:
    with Fd(trusted.file(path)) as fd:
        return os.read(fd, 1 << 16).decode()


def _own() -> dict[str, str]:
    """The variables of this step that a step in the container would have too."""
    return {name: value for name, value in os.environ.items() if not _NOT_HERE.fullmatch(name)}


def _find(job: int, asked: str, running: RunningContainers) -> Lent:
    """The container of the job that is asked for by step or name, or the only one. Raises ContainerError."""
    node = os.uname().nodename
    try:
        names = sorted(os.listdir(running.path))
    except FileNotFoundError:
        names = []
    found: dict[str, list[str]] = {}
    for name in names:
        for step, peer in running.peers(name):
            with peer:
                label = _label(job, step)
                if label and asked in ("", label, *_names(job, name)):
                    found.setdefault(name, []).append(step)
    if not found:
        raise ContainerError(
            f"{node}: no container {asked}{' ' * bool(asked)}of job {job} runs there",
            hint=f"squeue --steps --job {job} shows what runs where: ssh JOB.STEP.cluster, or JOB.NODE.cluster",
        )
    if len(found) > 1:
        labels = {name: f"{job}.{_label(job, steps[0])}" for name, steps in sorted(found.items(), key=_age)}
        named = {name: _names(job, name)[-1] for name in found}
        each = ", ".join(label + f" ({named[name]})" * (named[name] != label) for name, label in labels.items())
        raise ContainerError(
            f"{node}: several containers of job {job} run there: {each}",
            hint=f"say which: ssh {next(iter(labels.values()))}.cluster",
        )
    ((name, steps),) = found.items()
    for _, peer in running.peers(name):
        with peer:
            try:
                return Lent.of(peer)
            except (EOFError, ConnectionError, ProcessLookupError):
                continue
            except OSError as e:
                hint = f"ssh to another step of job {job}"
                raise ContainerError(f"step {steps[0]} does not lend its container on {node}: {e}", hint=hint) from e
    raise ContainerError(
        f"the container of step {steps[0]} has just ended on {node}", hint=f"squeue --steps --job {job} shows what runs"
    )


def _runtime_path() -> str:
    """Where helpers listen on this node, as plugstack.conf says. Raises ConfigError."""
    for path in plugstack.files({}):
        for line in plugstack.stack(path):
            if os.path.basename(line.path) == settings.PLUGIN:
                return settings.load(line.arguments).runtime_path
    return settings.load(()).runtime_path


def _age(found: tuple[str, list[str]]) -> int:
    """The number of the first step that runs a container; that of the batch script is the highest."""
    return min(int(step.partition(".")[2]) for step in found[1])


def _label(job: int, step: str) -> str:
    """What squeue calls a step of the job; "" for one of another job."""
    of, _, number = step.partition(".")
    return _STEPS.get(number, number) if of == str(job) else ""


def _names(job: int, container: str) -> tuple[str, ...]:
    """What --container-name may have been for a container."""
    name = container.removeprefix("pyxis_")
    return name, name.removeprefix(f"{job}_")


async def _connection(keys: Keys, lent: Lent, control: socket.socket) -> None:
    """Serve what comes on stdin, to its end."""
    ours, theirs = socket.socketpair()
    inside = Inside(control)
    # asyncio closes a pipe twice whose reader goes just then; whatever else it says is not for a terminal either.
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
        log.debug(f"ssh: {e}")  # the client says it
    carried.cancel()


async def _carry(wire: socket.socket) -> None:
    """Between stdin, stdout and a socket: asyncssh takes one descriptor for both ways."""
    loop = asyncio.get_running_loop()
    if os.isatty(1):
        tty.setraw(1)  # srun --unbuffered gives one
    from_wire, to_wire = await asyncio.open_connection(sock=wire)
    from_client = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(from_client), os.fdopen(0, "rb", 0))
    pipe, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, os.fdopen(1, "wb", 0))
    to_client = asyncio.StreamWriter(pipe, protocol, None, loop)
    await asyncio.gather(copy(from_client, to_wire), copy(from_wire, to_client))
