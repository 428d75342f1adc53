"""``pyxis-py check --nodes``: whether nodes reach each other, and srun's host, as they have to for a swarm.

A step on these nodes tries it, with the handshake of a swarm. What is asked and told goes by stdin and stdout,
which Slurm carries: nodes are heard that reach nobody.
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

from enroot_py import LIBRARY
from enroot_py.base import versions, workers
from enroot_py.base.errors import ConfigError, PenrootError
from enroot_py.base.run import Program, find
from enroot_py.cli.doctor import Finding
from enroot_py.features.swarm.arguments import SwarmArguments
from enroot_py.features.swarm.invitation import Swarm, missing
from enroot_py.features.swarm.loop import Connection, Loop, listener
from enroot_py.features.swarm.tracker_process import TRACKER
from pyxis_py.request.settings import PluginSettings

_MARK = "pyxis-py check: "  # before each line of ours: a TaskProlog may print others
_STEP = "check"  # what the key is for
_QUEUED = 30  # seconds that the step may wait for its nodes
_BEGINS = 20.0  # seconds more until all have said that they are there
_TRIES = 5.0  # seconds for a connection
_ENDS = 10.0  # seconds for what follows on that
_OTHERS = 64  # nodes that one connects to: of more it is those that come after it
_LIBRARY = versions.link(LIBRARY)
_START = (
    "import os, sys; sys.path.insert(0, os.path.realpath(sys.argv[1]))\n"
    "from enroot_py.features.swarm.reach import answer; answer()"
)
_LAUNCHER = "SLURM_LAUNCH_NODE_IPADDR"  # see swarm.py


# ---------------------------------------------------------------------------
# Where it is asked


def findings(nodes: str, plugin: PluginSettings, slurm: Mapping[str, str]) -> Iterator[Finding]:
    """Which of some nodes, as Slurm writes lists of them, do not reach each other. Raises PenrootError."""
    arguments = SwarmArguments(plugin)
    if not arguments.swarm:
        yield Finding("ok", "swarm=no in plugstack.conf: nodes give nothing to each other")
        return
    yield from libraries(plugin)
    names = Program([find("scontrol", package="slurm-client"), "show", "hostnames", nodes], timeout=_ENDS).run().split()
    span = slurm.get("SrunPortRange", "0-0")
    first, _, last = span.partition("-")
    at = range(int(first), int(last) + 1) if first.isdecimal() and last.isdecimal() else range(1)
    inquiry = _Inquiry(names, Swarm(os.urandom(32), _STEP, len(names), arguments.swarm_network), at)
    inquiry.run(nodes)
    yield from judge(inquiry.told, names, Ways(arguments.swarm_network, span if at.start else ""))


def libraries(plugin: PluginSettings) -> Iterator[Finding]:
    """Report a library of the swarm that this host lacks."""
    if SwarmArguments(plugin).swarm and (error := missing()):
        yield Finding("warn", f"{error}: each node asks the registry, and bcast: files cannot be sent", error.hint)


@dataclass(slots=True)
class Told:
    """What the nodes have said: their names, why they do not reach srun's host, and why one does not reach another."""

    names: dict[int, str] = field(default_factory=dict)
    apart: dict[int, str] = field(default_factory=dict)
    lost: dict[tuple[int, int], str] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Ways:
    """What is to be opened: SrunPortRange is "" where it is not set."""

    networks: str
    span: str

    @property
    def to_srun(self) -> str:
        if self.span:
            return f"let nodes connect to the hosts of srun at SrunPortRange={self.span}"
        return "let nodes connect to the hosts of srun at all ports, or set SrunPortRange in slurm.conf and open those"

    @property
    def to_nodes(self) -> str:
        with open("/proc/sys/net/ipv4/ip_local_port_range") as f:
            first, last = f.read().split()
        return f"let nodes connect to each other at the ports {first} to {last} (sysctl net.ipv4.ip_local_port_range)"


def judge(told: Told, names: Sequence[str], ways: Ways) -> Iterator[Finding]:
    """A line for each node that is not heard or does not reach srun's host, and for each two that are apart."""
    for name in names:
        if name not in told.names.values():
            yield Finding(
                "bad", f"{name} has not answered", f"srun -w {name} hostname; is penroot in {_LIBRARY} there?"
            )
    for node, why in sorted(told.apart.items()):
        what = f"{told.names[node]} does not reach the host of srun: {why}"
        yield Finding("bad", f"{what}: it asks registries itself, and gets no file by bcast:", ways.to_srun)
    for (node, other), why in sorted(told.lost.items()):
        one, two = told.names[node], told.names[other]
        if (other, node) not in told.lost:
            yield Finding("bad", f"{one} does not reach {two}: {why}", ways.to_nodes)
        elif node < other:
            yield Finding("bad", f"{one} and {two} do not reach each other: {why}", ways.to_nodes)
    for node in sorted(told.names.keys() - told.done):
        yield Finding(
            "bad", f"{told.names[node]} has not said in time what it reaches", "look at its load and its network"
        )
    if len(told.done) == len(names) and not (told.apart or told.lost):
        those = "the node reaches" if len(names) == 1 else f"{len(names)} nodes reach each other and"
        some = f"; each has tried {_OTHERS} others" if len(names) > _OTHERS + 1 else ""
        yield Finding("ok", f"{those} the host of srun{f' over {ways.networks}' * bool(ways.networks)}{some}")


class _Inquiry:
    """The process that asks, on the host of srun."""

    def __init__(self, names: Sequence[str], swarm: Swarm, at: range) -> None:
        """Raises PenrootError where it cannot listen at one of some ports."""
        self.told = Told()
        self._names = names
        self._addresses: dict[int, tuple[str, int]] = {}  # of the nodes, as they say
        self._seen: dict[int, str] = {}  # where they connect from
        self._lines = _Lines()
        self._loop = Loop(swarm, TRACKER)
        try:
            sock = listener(at)
        except OSError as e:
            hint = "are all of SrunPortRange in use?"
            raise PenrootError(f"cannot listen at {at.start} to {at.stop - 1}: {e.strerror}", hint=hint) from e
        self._first = {
            "key": swarm.key.hex(),
            "nodes": swarm.nodes,
            "networks": swarm.networks,
            "port": sock.getsockname()[1],
        }
        self._loop.listen("t", sock, self._accept)
        self._loop.tick = self._tick
        self._deadline = time.monotonic() + _QUEUED + _BEGINS
        self._asked = False

    def run(self, nodes: str) -> None:
        """Raises PenrootError where there is no such step."""
        theirs, self._input = os.pipe2(os.O_CLOEXEC)
        output, others = os.pipe2(os.O_CLOEXEC)
        failure, failed = os.pipe2(os.O_CLOEXEC)
        process = os.fork()
        if process == 0:
            workers.die_with_parent(signal.SIGKILL)
            os.close(self._input)
            os._exit(_step(nodes, len(self._names), (theirs, others, failed)))
        for fd in (theirs, others, failed):
            os.close(fd)
        self._say(self._first)
        self._loop.watch(output, selectors.EVENT_READ, lambda events: self._hear(output))
        self._loop.run()
        os.close(self._input)
        with open(failure, errors="replace") as f:
            why = f.read()
        os.waitpid(process, 0)
        os.close(output)
        if why and not self.told.names:
            text, _, hint = why.partition("\0")
            raise PenrootError(text, hint=hint)

    def _say(self, message: Mapping[str, object]) -> None:
        """To all nodes, unless their step has ended."""
        try:
            os.write(self._input, json.dumps(message).encode() + b"\n")
        except BrokenPipeError:
            self._loop.running = False

    def _accept(self, peer: Connection) -> None:
        self._seen[peer.node] = peer.host

    def _hear(self, output: int) -> None:
        data = os.read(output, 65536)
        if not data:
            self._loop.watch(output, 0, lambda events: None)
            self._loop.running = False
        for line in self._lines.feed(data):
            if line.startswith(_MARK):
                with contextlib.suppress(ValueError, KeyError):  # a line in a line: that node is asked for in vain
                    self._take(json.loads(line.removeprefix(_MARK)))

    def _take(self, message: Mapping[str, object]) -> None:
        node = int(str(message["node"]))
        if "port" in message:
            self.told.names[node] = str(message["name"])
            self._addresses[node] = str(message["host"]), int(str(message["port"]))
            if message["apart"]:
                self.told.apart[node] = str(message["apart"])
        elif "lost" in message:
            self.told.lost[node, int(str(message["lost"]))] = str(message["why"])
        else:
            self.told.done.add(node)

    def _tick(self, now: float) -> None:
        if not self._asked and (len(self._addresses) == len(self._names) or now > self._deadline):
            self._asked = True
            self._deadline = now + _TRIES + _ENDS
            others = [
                [node, address, port]
                for node, (host, port) in self._addresses.items()
                if (address := self._seen.get(node) or host or _address(self.told.names[node]))
            ]
            self._say({"others": sorted(others)})
        elif self._asked and (self.told.done >= self._addresses.keys() or now > self._deadline):
            self._loop.running = False


def _address(name: str) -> str:
    """The address of a node as Slurm knows it; "" where it is none that is known here."""
    try:
        shown = Program([find("scontrol", package="slurm-client"), "show", "node", "-o", name], timeout=_ENDS).run()
        known = [word.partition("=")[2] for word in shown.split() if word.startswith("NodeAddr=")]
        return str(socket.getaddrinfo(known[0], None, type=socket.SOCK_STREAM)[0][4][0])
    except (PenrootError, OSError, IndexError):
        return ""


def _step(nodes: str, count: int, fds: tuple[int, int, int]) -> int:
    """Be the srun, whose stdin and stdout are given; the third descriptor is for why it failed."""
    stdin, stdout, failed = fds
    options = [
        *(f"--nodelist={nodes}", f"--nodes={count}", f"--ntasks={count}"),
        *("--ntasks-per-node=1", "--cpus-per-task=1", f"--immediate={_QUEUED}", "--time=2", "--job-name=pyxis-check"),
        *("--unbuffered", "--kill-on-bad-exit=0", "--mpi=none", "--chdir=/", "--quiet"),
        *("--input=all", "--output=all", "--error=all"),
        *(("--overlap",) if "SLURM_JOB_ID" in os.environ else ()),
    ]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYXIS_")}
    limit = _QUEUED + _BEGINS + _TRIES + 2 * _ENDS
    try:
        command = [find("srun", package="slurm-client"), *options, sys.executable, "-IS", "-c", _START, _LIBRARY]
        Program(command, environ=environ, stdin=stdin, stdout=stdout, timeout=limit).run()
    except PenrootError as e:
        os.write(failed, f"{e}\0{e.hint}".encode(errors="replace"))
    return 0


class _Lines:
    """Whole lines of what comes in parts."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line.decode("utf-8", "replace") for line in lines]


# ---------------------------------------------------------------------------
# On a node


def answer() -> None:
    """Be a task of the step: try what stdin names, and print what cannot be reached, until stdin ends."""
    signal.alarm(round(_QUEUED + _BEGINS + _TRIES + 2 * _ENDS))
    lines = _Lines()
    waiting: list[str] = []
    while not waiting:
        data = os.read(0, 65536)
        if not data:
            return
        waiting = lines.feed(data)
    try:
        _Answer(json.loads(waiting[0]), lines, waiting[1:]).run()
    except ConfigError as e:  # before it has said anything
        node = {"node": int(os.environ["SLURM_NODEID"])}
        _say({**node, "name": _own_name(), "apart": f"{e}: {e.hint}", "host": "", "port": 1})
        _say(node)


class _Answer:
    """One node."""

    def __init__(self, asked: Mapping[str, object], lines: _Lines, waiting: Sequence[str]) -> None:
        self._lines, self._waiting = lines, waiting
        self._node, self._nodes = int(os.environ["SLURM_NODEID"]), int(str(asked["nodes"]))
        self._networks = str(asked["networks"])
        swarm = Swarm(bytes.fromhex(str(asked["key"])), _STEP, self._nodes, self._networks)
        self._loop = Loop(swarm, self._node)
        self._loop.tick = self._tick
        self._trying: dict[int, tuple[Connection, float]] = {}  # and until when
        self._others_known = False
        self._sock = listener()
        self._loop.listen("p", self._sock, lambda peer: None)
        self._launcher = os.environ[_LAUNCHER]
        self._try(TRACKER, "t", self._launcher, int(str(asked["port"])))

    def run(self) -> None:
        self._loop.watch(0, selectors.EVENT_READ, lambda events: self._read())
        for line in self._waiting:
            self._hear(line)
        self._loop.run()

    def _read(self) -> None:
        data = os.read(0, 65536)
        if not data:
            self._loop.running = False
        for line in self._lines.feed(data):
            self._hear(line)

    def _hear(self, line: str) -> None:
        others = [other for other in json.loads(line)["others"] if other[0] != self._node]
        others.sort(key=lambda other: (other[0] - self._node) % self._nodes)
        self._others_known = True
        for node, host, port in others[:_OTHERS]:
            self._try(node, "p", host, port)

    def _try(self, node: int, role: str, host: str, port: int) -> None:
        connection = self._loop.connect(role, (host, port))
        self._trying[node] = connection, time.monotonic() + _TRIES
        connection.ready = lambda: self._ended(node, "")
        connection.gone = lambda why: self._ended(node, f"{host} port {port}: {_plain(why)}")
        if (why := "" if self._loop.admits(host) else f"it is in none of swarm_network={self._networks}") or (
            why := _route(host)[1]
        ):
            connection.fail(why)

    def _ended(self, node: int, why: str) -> None:
        """A connection is there, or will not be."""
        if self._trying.pop(node, None) is None:
            return
        if node == TRACKER:
            where = {"host": _route(self._launcher)[0], "port": self._sock.getsockname()[1]}
            _say({"node": self._node, "name": _own_name(), "apart": why, **where})
        elif why:
            _say({"node": self._node, "lost": node, "why": why})

    def _tick(self, now: float) -> None:
        for connection, deadline in list(self._trying.values()):
            if now > deadline:
                connection.fail(f"no answer within {_TRIES:.0f} s")
        if self._others_known and not self._trying:
            self._others_known = False
            _say({"node": self._node})


def _say(message: Mapping[str, object]) -> None:
    """In one line of less than the 1024 bytes that Slurm leaves together."""
    os.write(1, f"{_MARK}{json.dumps(message)}\n".encode())


def _own_name() -> str:
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename


def _plain(why: str) -> str:
    """What went wrong without the number of an error."""
    return why.partition("] ")[2] if why.startswith("[Errno ") else why


def _route(host: str) -> tuple[str, str]:
    """The address from which this node would connect to another one, or why it cannot; no packet is sent."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect((host, 1))
        except OSError as e:
            return "", str(e.strerror)
        return str(sock.getsockname()[0]), ""
