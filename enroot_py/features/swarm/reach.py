"""``pyxis-py check --nodes``: check whether nodes can connect to each other and to srun's host, as a swarm requires.

A step on these nodes tries the handshake of a swarm. Questions and answers go by stdin and stdout of the step,
so a node without any connection can report the failure.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Thread

from enroot_py import LIBRARY
from enroot_py.base import versions
from enroot_py.base.errors import ConfigError, PenrootError
from enroot_py.base.run import Program, find
from enroot_py.cli.doctor import Finding
from enroot_py.features.swarm.arguments import SwarmArguments
from enroot_py.features.swarm.invitation import Swarm, missing
from enroot_py.features.swarm.loop import TO_PEER, TO_TRACKER, Connection, Loop
from enroot_py.features.swarm.ports import listener
from enroot_py.features.swarm.step import LAUNCHER
from enroot_py.features.swarm.tracker_process import TRACKER
from pyxis_py.request.settings import PluginSettings

_MARK = b"pyxis-py check: "  # begins each line of a node: a TaskProlog may print other lines
_CONTEXT = "check"  # of the swarm's key
_QUEUE_TIMEOUT_S = 30  # for the step
_START_TIMEOUT_S = 20.0  # for all nodes to send their first line
_CONNECT_TIMEOUT_S = 5.0
_END_TIMEOUT_S = 10.0
_STEP_TIMEOUT_S = _QUEUE_TIMEOUT_S + _START_TIMEOUT_S + _CONNECT_TIMEOUT_S + 2 * _END_TIMEOUT_S
_MAX_OTHERS = 64  # nodes to which each node connects: those that follow it
_LIBRARY = versions.link(LIBRARY)
_START = (
    "import os, sys; sys.path.insert(0, os.path.realpath(sys.argv[1]))\n"
    "from enroot_py.features.swarm.reach import answer; answer()"
)


# ---------------------------------------------------------------------------
# On srun's host


def findings(nodes: str, plugin: PluginSettings, slurm: Mapping[str, str]) -> Iterator[Finding]:
    """Report the nodes of a Slurm node list that cannot connect to each other. Raises PenrootError."""
    arguments = SwarmArguments(plugin)
    if not arguments.swarm:
        yield Finding("ok", "swarm=no in plugstack.conf: nodes share no images")
        return
    yield from libraries(plugin)
    command = [find("scontrol", package="slurm-client"), "show", "hostnames", nodes]
    names = Program(command, timeout=_END_TIMEOUT_S).run().split()
    port_range = slurm.get("SrunPortRange", "0-0")
    first, _, last = port_range.partition("-")
    ports = range(int(first), int(last) + 1) if first.isdecimal() and last.isdecimal() else range(1)
    check = _Check(names, Swarm(os.urandom(32), _CONTEXT, len(names), arguments.swarm_network), ports)
    check.run(nodes)
    yield from judge(check.answers, names, Firewall(arguments.swarm_network, port_range if ports.start else ""))


def libraries(plugin: PluginSettings) -> Iterator[Finding]:
    """Report a library of the swarm that this host lacks."""
    if SwarmArguments(plugin).swarm and (error := missing()):
        yield Finding("warn", f"{error}: each node asks the registry, and bcast: files cannot be sent", error.hint)


@dataclass(slots=True)
class Answers:
    """The answers of the nodes."""

    names: dict[int, str] = field(default_factory=dict)
    tracker_errors: dict[int, str] = field(default_factory=dict)  # by node that cannot connect to srun's host
    peer_errors: dict[tuple[int, int], str] = field(default_factory=dict)  # by node and the other node
    done: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Firewall:
    """The connections to allow. ``port_range`` is SrunPortRange, "" if it is not set."""

    networks: str
    port_range: str

    @property
    def to_srun(self) -> str:
        if self.port_range:
            return f"let nodes connect to the hosts of srun at SrunPortRange={self.port_range}"
        return "let nodes connect to the hosts of srun at all ports, or set SrunPortRange in slurm.conf and open those"

    @property
    def to_nodes(self) -> str:
        with open("/proc/sys/net/ipv4/ip_local_port_range") as f:
            first, last = f.read().split()
        return f"let nodes connect to each other at the ports {first} to {last} (sysctl net.ipv4.ip_local_port_range)"


def judge(answers: Answers, names: Sequence[str], firewall: Firewall) -> Iterator[Finding]:
    """Report nodes that do not answer or cannot connect to srun's host, and pairs of nodes that cannot connect."""
    for name in names:
        if name not in answers.names.values():
            yield Finding(
                "bad", f"{name} has not answered", f"srun -w {name} hostname; is penroot in {_LIBRARY} there?"
            )
    for node, why in sorted(answers.tracker_errors.items()):
        failure = f"{answers.names[node]} does not reach the host of srun: {why}"
        yield Finding("bad", f"{failure}: it asks registries itself and cannot receive bcast: files", firewall.to_srun)
    for (node, other), why in sorted(answers.peer_errors.items()):
        name, other_name = answers.names[node], answers.names[other]
        if (other, node) not in answers.peer_errors:
            yield Finding("bad", f"{name} does not reach {other_name}: {why}", firewall.to_nodes)
        elif node < other:
            yield Finding("bad", f"{name} and {other_name} do not reach each other: {why}", firewall.to_nodes)
    for node in sorted(answers.names.keys() - answers.done):
        yield Finding("bad", f"{answers.names[node]} has not finished in time", "check its load and its network")
    if len(answers.done) == len(names) and not (answers.tracker_errors or answers.peer_errors):
        nodes = "the node reaches" if len(names) == 1 else f"{len(names)} nodes reach each other and"
        sample = f"; each has tried {_MAX_OTHERS} others" if len(names) > _MAX_OTHERS + 1 else ""
        networks = f" over {firewall.networks}" * bool(firewall.networks)
        yield Finding("ok", f"{nodes} the host of srun{networks}{sample}")


class _Check:
    """The check's process on srun's host."""

    def __init__(self, names: Sequence[str], swarm: Swarm, ports: range) -> None:
        """Raises PenrootError if all ports are in use."""
        self.answers = Answers()
        self._names = names
        self._addresses: dict[int, tuple[str, int]] = {}  # by node, as the node reports it
        self._hosts: dict[int, str] = {}  # by node: the source address of its connection
        self._rest = b""  # of the last line
        self._step_error: PenrootError | None = None
        self._loop = Loop(swarm, TRACKER)
        try:
            sock = listener(ports)
        except OSError as e:
            hint = "are all of SrunPortRange in use?"
            raise PenrootError(f"cannot listen at {ports.start} to {ports.stop - 1}: {e.strerror}", hint=hint) from e
        port = self._loop.listen(TO_TRACKER, sock, self._accept)
        self._question = {"key": swarm.key.hex(), "nodes": swarm.nodes, "networks": swarm.networks, "port": port}
        self._loop.tick = self._tick
        self._deadline = time.monotonic() + _QUEUE_TIMEOUT_S + _START_TIMEOUT_S
        self._others_sent = False

    def run(self, nodes: str) -> None:
        """Raises PenrootError if the step cannot be started."""
        step_stdin, self._input = os.pipe2(os.O_CLOEXEC)
        output, step_stdout = os.pipe2(os.O_CLOEXEC)
        step = Thread(target=self._run_step, args=(nodes, step_stdin, step_stdout), daemon=True)
        step.start()
        self._send(self._question)
        self._loop.watch(output, selectors.EVENT_READ, lambda events: self._read(output))
        self._loop.run()
        os.close(self._input)
        step.join()
        os.close(output)
        if self._step_error and not self.answers.names:
            raise self._step_error

    def _run_step(self, nodes: str, stdin: int, stdout: int) -> None:
        """Run srun, and then close its descriptors."""
        count = len(self._names)
        options = [
            *(f"--nodelist={nodes}", f"--nodes={count}", f"--ntasks={count}"),
            *("--ntasks-per-node=1", "--cpus-per-task=1", f"--immediate={_QUEUE_TIMEOUT_S}", "--time=2"),
            *("--job-name=pyxis-check", "--unbuffered", "--kill-on-bad-exit=0", "--mpi=none", "--chdir=/", "--quiet"),
            *("--input=all", "--output=all", "--error=all"),
            *(("--overlap",) if "SLURM_JOB_ID" in os.environ else ()),
        ]
        environ = {name: value for name, value in os.environ.items() if not name.startswith("PYXIS_")}
        try:
            command = [find("srun", package="slurm-client"), *options, sys.executable, "-IS", "-c", _START, _LIBRARY]
            Program(command, environ=environ, stdin=stdin, stdout=stdout, timeout=_STEP_TIMEOUT_S).run()
        except PenrootError as e:
            self._step_error = e
        finally:
            os.close(stdin)
            os.close(stdout)

    def _send(self, message: Mapping[str, object]) -> None:
        """Send a message to all nodes, unless their step has ended."""
        try:
            os.write(self._input, json.dumps(message).encode() + b"\n")
        except BrokenPipeError:
            self._loop.running = False

    def _accept(self, peer: Connection) -> None:
        self._hosts[peer.node] = peer.host

    def _read(self, output: int) -> None:
        data = os.read(output, 65536)
        if not data:
            self._loop.watch(output, 0, lambda events: None)
            self._loop.running = False
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(_MARK):
                with contextlib.suppress(ValueError, KeyError):  # two mixed lines: their nodes count as not finished
                    self._handle(json.loads(line.removeprefix(_MARK)))

    def _handle(self, message: Mapping[str, object]) -> None:
        node = int(str(message["node"]))
        if "port" in message:
            self.answers.names[node] = str(message["name"])
            self._addresses[node] = str(message["host"]), int(str(message["port"]))
            if message["apart"]:
                self.answers.tracker_errors[node] = str(message["apart"])
        elif "lost" in message:
            self.answers.peer_errors[node, int(str(message["lost"]))] = str(message["why"])
        else:
            self.answers.done.add(node)

    def _tick(self, now: float) -> None:
        if not self._others_sent and (len(self._addresses) == len(self._names) or now > self._deadline):
            self._others_sent = True
            self._deadline = now + _CONNECT_TIMEOUT_S + _END_TIMEOUT_S
            others = [
                [node, address, port]
                for node, (host, port) in self._addresses.items()
                if (address := self._hosts.get(node) or host or _slurm_address(self.answers.names[node]))
            ]
            self._send({"others": sorted(others)})
        elif self._others_sent and (self.answers.done >= self._addresses.keys() or now > self._deadline):
            self._loop.running = False


def _slurm_address(name: str) -> str:
    """Return the NodeAddr of a node in Slurm, "" if unknown."""
    try:
        command = [find("scontrol", package="slurm-client"), "show", "node", "-o", name]
        words = Program(command, timeout=_END_TIMEOUT_S).run().split()
        addresses = [word.partition("=")[2] for word in words if word.startswith("NodeAddr=")]
        return str(socket.getaddrinfo(addresses[0], None, type=socket.SOCK_STREAM)[0][4][0])
    except (PenrootError, OSError, IndexError):
        return ""


# ---------------------------------------------------------------------------
# On a node


def answer() -> None:
    """Be a task of the step: connect to the hosts that stdin names, and print each failure, until stdin ends."""
    signal.alarm(round(_STEP_TIMEOUT_S))
    if not (question := _read_line()):
        return
    try:
        _Node(json.loads(question)).run()
    except ConfigError as e:  # no line has been printed yet
        node = {"node": int(os.environ["SLURM_NODEID"])}
        _print({**node, "name": _node_name(), "apart": f"{e}: {e.hint}", "host": "", "port": 1})
        _print(node)


class _Node:
    """The check's process on a node."""

    def __init__(self, question: Mapping[str, object]) -> None:
        self._node, self._nodes = int(os.environ["SLURM_NODEID"]), int(str(question["nodes"]))
        self._networks = str(question["networks"])
        swarm = Swarm(bytes.fromhex(str(question["key"])), _CONTEXT, self._nodes, self._networks)
        self._loop = Loop(swarm, self._node)
        self._loop.tick = self._tick
        self._connections: dict[int, tuple[Connection, float]] = {}  # by node, with their deadlines
        self._others_known = False
        self._port = self._loop.listen(TO_PEER, listener(), lambda peer: None)
        self._launcher = os.environ[LAUNCHER]
        self._connect(TRACKER, TO_TRACKER, self._launcher, int(str(question["port"])))

    def run(self) -> None:
        self._loop.watch(0, selectors.EVENT_READ, lambda events: self._read())
        self._loop.run()

    def _read(self) -> None:
        if not (line := _read_line()):
            self._loop.running = False
            return
        others = [other for other in json.loads(line)["others"] if other[0] != self._node]
        others.sort(key=lambda other: (other[0] - self._node) % self._nodes)
        self._others_known = True
        for node, host, port in others[:_MAX_OTHERS]:
            self._connect(node, TO_PEER, host, port)

    def _connect(self, node: int, role: str, host: str, port: int) -> None:
        connection = self._loop.connect(role, (host, port))
        self._connections[node] = connection, time.monotonic() + _CONNECT_TIMEOUT_S
        connection.on_ready = lambda: self._ended(node, "")
        connection.on_close = lambda why: self._ended(node, f"{host} port {port}: {_without_errno(why)}")
        if not self._loop.admits(host):
            connection.fail(f"the address is outside swarm_network={self._networks}")
        elif why := _route(host)[1]:
            connection.fail(why)

    def _ended(self, node: int, why: str) -> None:
        """A connection is established, or has failed."""
        if self._connections.pop(node, None) is None:
            return
        if node == TRACKER:
            address = {"host": _route(self._launcher)[0], "port": self._port}
            _print({"node": self._node, "name": _node_name(), "apart": why, **address})
        elif why:
            _print({"node": self._node, "lost": node, "why": why})

    def _tick(self, now: float) -> None:
        for connection, deadline in list(self._connections.values()):
            if now > deadline:
                connection.fail(f"no answer within {_CONNECT_TIMEOUT_S:.0f} s")
        if self._others_known and not self._connections:
            self._others_known = False
            _print({"node": self._node})


def _read_line() -> bytes:
    """Read a line of stdin and no byte more, so that poll(2) sees the next line. Return b"" at the end."""
    with open(0, "rb", buffering=0, closefd=False) as stdin:
        return stdin.readline()


def _print(message: Mapping[str, object]) -> None:
    """Print a line of less than 1024 bytes, which Slurm does not split."""
    os.write(1, _MARK + json.dumps(message).encode() + b"\n")


def _node_name() -> str:
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename


def _without_errno(why: str) -> str:
    return why.partition("] ")[2] if why.startswith("[Errno ") else why


def _route(host: str) -> tuple[str, str]:
    """Return the address from which this node would connect to a host, or the error. Send no packet."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect((host, 1))
        except OSError as e:
            return "", str(e.strerror)
        return str(sock.getsockname()[0]), ""
