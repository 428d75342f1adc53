"""``pyxis-py check --nodes``: check whether nodes can connect to each other and to srun's host, as a swarm requires.

A step on these nodes tries the connections. Its stdin and stdout carry the questions and answers, so even a node that
cannot connect to any host can report the failure.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Thread

from enroot_py import LIBRARY
from enroot_py.base import versions
from enroot_py.base.errors import ConfigError, PenrootError
from enroot_py.base.run import Program, find
from enroot_py.cli.doctor import Finding
from enroot_py.features.swarm.arguments import SwarmArguments
from enroot_py.features.swarm.invitation import Swarm, missing
from enroot_py.features.swarm.ports import listener
from enroot_py.features.swarm.step import LAUNCHER
from pyxis_py.request.settings import PluginSettings

_MARK = b"pyxis-py check: "  # begins each line of a node: a TaskProlog may print other lines
_CONTEXT = "check"  # the context of the swarm's key: see Swarm
_QUEUE_TIMEOUT_S = 30  # for the step to get its nodes
_START_TIMEOUT_S = 20.0  # for all nodes to send their first line
_CONNECT_TIMEOUT_S = 5.0
_END_TIMEOUT_S = 10.0
_STEP_TIMEOUT_S = _QUEUE_TIMEOUT_S + _START_TIMEOUT_S + _CONNECT_TIMEOUT_S + 2 * _END_TIMEOUT_S
_MAX_OTHERS = 64  # each node connects to at most this many nodes, which follow it in the node list
_KEY_BYTES = 32
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
    if error := [*libraries(plugin)]:
        yield from error
        return
    command = [find("scontrol", package="slurm-client"), "show", "hostnames", nodes]
    names = Program(command, timeout=_END_TIMEOUT_S).run().split()
    port_range = slurm.get("SrunPortRange", "0-0")
    first, _, last = port_range.partition("-")
    ports = range(int(first), int(last) + 1) if first.isdecimal() and last.isdecimal() else range(1)
    swarm = Swarm(os.urandom(_KEY_BYTES), _CONTEXT, len(names), arguments.swarm_network)
    answers = _Check(names, swarm, ports).run(nodes)
    yield from judge(answers, names, Firewall(arguments.swarm_network, port_range if ports.start else ""))


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
    lacking: dict[int, tuple[str, str]] = field(default_factory=dict)  # error and hint, by node without the library
    done: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Firewall:
    """The connections that firewalls must allow, for hints. ``port_range`` is SrunPortRange, "" if it is not set."""

    networks: str
    port_range: str

    @property
    def to_srun(self) -> str:
        if self.port_range:
            return f"let nodes connect to the hosts of srun at SrunPortRange={self.port_range}"
        return "let nodes connect to all ports of the hosts of srun, or set SrunPortRange in slurm.conf and open it"

    @property
    def to_nodes(self) -> str:
        with open("/proc/sys/net/ipv4/ip_local_port_range") as f:
            first, last = f.read().split()
        return f"let nodes connect to each other at the ports {first} to {last} (sysctl net.ipv4.ip_local_port_range)"


def judge(answers: Answers, names: Sequence[str], firewall: Firewall) -> Iterator[Finding]:
    """Report nodes that do not answer or cannot connect to srun's host, and pairs of nodes that cannot connect."""
    for name in names:
        if name not in answers.names.values():
            hint = f"run srun -w {name} hostname, and check that {name} has penroot in {_LIBRARY}"
            yield Finding("bad", f"{name} has not answered", hint)
    for node, (why, hint) in sorted(answers.lacking.items()):
        effect = "it asks registries itself and cannot receive bcast: files"
        yield Finding("bad", f"{answers.names[node]}: {why}: {effect}", hint)
    for node, why in sorted(answers.tracker_errors.items()):
        failure = f"{answers.names[node]} does not reach the host of srun: {why}"
        yield Finding("bad", f"{failure}: it asks registries itself and cannot receive bcast: files", firewall.to_srun)
    for (node, other), why in sorted(answers.peer_errors.items()):
        if answers.lacking.keys() & {node, other}:
            continue
        name, other_name = answers.names[node], answers.names[other]
        if (other, node) not in answers.peer_errors:
            yield Finding("bad", f"{name} does not reach {other_name}: {why}", firewall.to_nodes)
        elif node < other:
            yield Finding("bad", f"{name} and {other_name} do not reach each other: {why}", firewall.to_nodes)
    for node in sorted(answers.names.keys() - answers.done):
        yield Finding("bad", f"{answers.names[node]} has not finished in time", "check its load and its network")
    if len(answers.done) == len(names) and not (answers.lacking or answers.tracker_errors or answers.peer_errors):
        nodes = "the node reaches" if len(names) == 1 else f"{len(names)} nodes reach each other and"
        sample = f"; each has tried {_MAX_OTHERS} others" if len(names) > _MAX_OTHERS + 1 else ""
        networks = f" over {firewall.networks}" * bool(firewall.networks)
        yield Finding("ok", f"{nodes} the host of srun{networks}{sample}")


class _Check:
    """The part of the check that runs on srun's host."""

    def __init__(self, names: Sequence[str], swarm: Swarm, ports: range) -> None:
        """Raises PenrootError if all ports are in use."""
        self._names, self._swarm = names, swarm
        self._answers = Answers()
        self._addresses: dict[int, tuple[str, int]] = {}  # by node: the address that the node reports
        self._hosts: dict[int, str] = {}  # by node: the source address of its connection
        self._rest = b""  # the last line, which is incomplete
        self._step_error: PenrootError | None = None
        try:
            self._port = _serve(swarm, ports, self._hosts)
        except OSError as e:
            hint = "check whether SrunPortRange (slurm.conf) has a free port"
            raise PenrootError(f"cannot listen at {ports.start} to {ports.stop - 1}: {e.strerror}", hint=hint) from e

    def run(self, nodes: str) -> Answers:
        """Return the answers of the nodes. Raises PenrootError if the step cannot be started."""
        step_stdin, stdin = os.pipe2(os.O_CLOEXEC)
        stdout, step_stdout = os.pipe2(os.O_CLOEXEC)
        step = Thread(target=self._run_step, args=(nodes, step_stdin, step_stdout), daemon=True)
        step.start()
        _send(stdin, {"key": self._swarm.key.hex(), "networks": self._swarm.networks, "port": self._port})
        self._collect(stdout, _QUEUE_TIMEOUT_S + _START_TIMEOUT_S, lambda: len(self._addresses) == len(self._names))
        others = [
            [node, address, port]
            for node, (host, port) in sorted(self._addresses.items())
            if (address := self._hosts.get(node) or host or _slurm_address(self._answers.names[node]))
        ]
        _send(stdin, {"others": others})
        self._collect(stdout, _CONNECT_TIMEOUT_S + _END_TIMEOUT_S, lambda: self._answers.done >= self._addresses.keys())
        os.close(stdin)
        step.join()
        os.close(stdout)
        if self._step_error and not self._answers.names:
            raise self._step_error
        return self._answers

    def _run_step(self, nodes: str, stdin: int, stdout: int) -> None:
        """Run srun. When it has ended, close its stdin and stdout."""
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

    def _collect(self, stdout: int, seconds: float, is_enough: Callable[[], bool]) -> None:
        """Handle lines of the nodes until ``is_enough()`` is true, the time is over or the step has ended."""
        deadline = time.monotonic() + seconds
        while not is_enough() and select.select([stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
            if not (data := os.read(stdout, 65536)):
                return
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                if line.startswith(_MARK):
                    with suppress(ValueError, KeyError):  # two lines are mixed: their nodes count as not finished
                        self._handle(json.loads(line.removeprefix(_MARK)))

    def _handle(self, message: Mapping[str, object]) -> None:
        node = int(str(message["node"]))
        if "port" in message:
            self._answers.names[node] = str(message["name"])
            self._addresses[node] = str(message["host"]), int(str(message["port"]))
            if message["lacks"]:
                why, hint = map(str, message["lacks"])  # type: ignore[call-overload]
                self._answers.lacking[node] = why, hint
            elif message["apart"]:
                self._answers.tracker_errors[node] = str(message["apart"])
        elif "lost" in message:
            self._answers.peer_errors[node, int(str(message["lost"]))] = str(message["why"])
        else:
            self._answers.done.add(node)


def _send(stdin: int, message: Mapping[str, object]) -> None:
    """Send a message to all nodes, unless their step has ended."""
    with suppress(BrokenPipeError):
        os.write(stdin, json.dumps(message).encode() + b"\n")


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
    """Run as a task of the step: connect to the hosts that stdin names, and print failures. Return when stdin ends."""
    signal.alarm(round(_STEP_TIMEOUT_S))
    if not (line := sys.stdin.readline()):
        return
    question = json.loads(line)
    node, launcher = int(os.environ["SLURM_NODEID"]), os.environ[LAUNCHER]
    swarm = Swarm(bytes.fromhex(question["key"]), _CONTEXT, 0, question["networks"])
    lacks = _missing(swarm)
    why = "" if lacks else _connect(swarm, node, launcher, question["port"])
    name = os.environ.get("SLURMD_NODENAME") or os.uname().nodename
    address = {"host": _source_address(launcher), "port": _serve(swarm, range(1), {})}
    _print({"node": node, "name": name, "lacks": lacks, "apart": why, **address})
    if line := sys.stdin.readline():
        others = sorted(json.loads(line)["others"], key=lambda other: (other[0] <= node, other[0]))
        others = [] if lacks else [other for other in others if other[0] != node][:_MAX_OTHERS]
        with ThreadPoolExecutor(_MAX_OTHERS) as pool:
            for other, why in zip(
                others, pool.map(lambda other: _connect(swarm, node, *other[1:]), others), strict=True
            ):
                if why:
                    _print({"node": node, "lost": other[0], "why": why})
        _print({"node": node})
        sys.stdin.read()  # until the check ends: other nodes still connect to this node


def _missing(swarm: Swarm) -> list[str]:
    """Return the error and the hint if this node lacks a library of the swarm, else []."""
    try:
        from enroot_py.features.swarm.tls import Identity

        Identity(swarm.key, swarm.context)
    except ConfigError as e:
        return [str(e), e.hint]
    return []


def _print(message: Mapping[str, object]) -> None:
    """Print a line of less than 1024 bytes, which Slurm does not split."""
    os.write(1, _MARK + json.dumps(message).encode() + b"\n")


def _source_address(host: str) -> str:
    """Return the address from which this node would connect to a host, or "". Send no packet."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as sock:
        with suppress(OSError):
            sock.connect((host, 1))
        return str(sock.getsockname()[0])


# ---------------------------------------------------------------------------
# On srun's host and on a node


def _serve(swarm: Swarm, ports: range, hosts: dict[int, str]) -> int:
    """Answer connections in a thread, and note the source address of each node. Return the port. Raises OSError."""
    sock = socket.socket(fileno=listener(ports).detach())

    def answer_one(connection: socket.socket, host: str) -> None:
        with connection, suppress(OSError, ValueError):
            connection.settimeout(_CONNECT_TIMEOUT_S)
            if swarm.admits(host):
                number = connection.makefile().readline(20)
                hosts[int(number)] = host
                connection.sendall(swarm.key)

    def serve() -> None:
        while True:
            connection, address = sock.accept()
            Thread(target=answer_one, args=(connection, address[0].removeprefix("::ffff:")), daemon=True).start()

    Thread(target=serve, daemon=True).start()
    return int(sock.getsockname()[1])


def _connect(swarm: Swarm, node: int, host: str, port: int) -> str:
    """Connect to another member as ``node``. Return why that has failed, or ""."""
    address = f"{host} port {port}"
    if not swarm.admits(host):
        return f"{address}: the address is outside swarm_network={swarm.networks}"
    try:
        with socket.create_connection((host, port), _CONNECT_TIMEOUT_S) as sock:
            sock.sendall(b"%d\n" % node)
            if sock.recv(_KEY_BYTES, socket.MSG_WAITALL) == swarm.key:
                return ""
        return f"{address}: another program answers, or the address of this node is outside swarm_network"
    except TimeoutError:
        return f"{address}: no answer within {_CONNECT_TIMEOUT_S:.0f} s"
    except OSError as e:
        return f"{address}: {e.strerror or e}"
