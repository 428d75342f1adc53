"""Class Lab: a Slurm cluster on this machine."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from typing import Any, NoReturn

from . import cgroups, etc, images, network, residue

DEFAULT_ROOT = "/srv/penroot-lab"
SUBNET = "10.77.0"  # within the lab's own network namespace, so two labs never conflict
SEARCH_PATH = "/usr/local/bin:/usr/bin:/bin"

# Programs that a node of the lab needs on the machine, and their Debian packages.
PROGRAMS = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "srun": "slurm-client",
    "munged": "munge",
    "docker-registry": "docker-registry",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "openssl": "openssl",
}

DAEMONS: dict[str, list[str]] = {
    "munged": [
        *["setpriv", "--reuid=munge", "--regid=munge", "--clear-groups", "munged", "--seed-file=/run/munge/seed"],
        *["--log-file=/run/munge/munged.log", "--pid-file=/run/munge/munged.pid"],
    ],
    "slurmctld": ["slurmctld", "-c"],
    "slurmd": ["slurmd"],
    "registry-http": ["docker-registry", "serve", "/etc/penroot-lab/registry-http.yml"],
    "registry-https": ["docker-registry", "serve", "/etc/penroot-lab/registry-https.yml"],
}


# The port of each daemon.
PORTS = {"slurmctld": 6817, "slurmd": 6818, "registry-http": 5000, "registry-https": 443}

# Directories of each node on disk, and their modes. The node's tmpfs is mounted on "memory".
OWN_DIRECTORIES = {"memory": 0o755, "tmp": 0o1777, "var/tmp": 0o1777, "var/spool": 0o755, "var/log": 0o755}


class LabError(Exception):
    """The lab failed; the message has the cause and the place to look at."""


class PrerequisiteError(LabError):
    """This machine cannot run a lab: something is not installed, or the caller is not root."""


class CommandFailed(subprocess.CalledProcessError):
    """A command in the lab failed; str() shows its output."""

    def __str__(self) -> str:
        return f"{self.cmd!r} exited {self.returncode}\n--- stdout\n{self.stdout}--- stderr\n{self.stderr}"


@dataclass
class Node:
    """A machine of the lab; ``pid`` is its process 1, as numbered on this machine."""

    name: str
    address: str
    pid: int
    started: int  # starttime of proc_pid_stat(5), to recognize another process with the same pid
    baseline: dict[str, list[str]] = field(default_factory=dict)  # residue.inventory() of the idle node


class Lab:
    """A Slurm cluster: ctl, registry, n1 .. nN. Its files are under ``root``.

    ``root`` defaults to $PENROOT_LAB or /srv/penroot-lab. Labs with different
    roots do not touch each other.
    """

    def __init__(self, root: str | None = None) -> None:
        self.root = os.path.abspath(root or os.environ.get("PENROOT_LAB") or DEFAULT_ROOT)
        if any(c in self.root for c in ":,\\ ") or self.root == "/":
            raise LabError(f"{self.root}: not a usable directory for a lab")
        self.branch = "penroot-lab." + hashlib.sha256(self.root.encode()).hexdigest()[:8]
        self._state: dict[str, Any] | None = None

    # ---- up and down

    def up(
        self,
        nodes: int = 2,
        *,
        plugin: str | None = None,
        prefix: str | None = None,
        slurm_conf: Sequence[str] = (),
        configless: bool = False,
        apart: bool = False,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Start the lab, or return at once if it is up with exactly these arguments.

        ``plugin`` is the line of plugstack.conf. Without it, the lab loads the plugin of ``prefix``, an installation
        or a source tree. ``slurm_conf`` are lines to add to slurm.conf. ``configless``: only ctl has files in
        /etc/slurm, and the nodes ask slurmctld for them. ``apart``: each node has its own /etc, /usr and package
        database, so a test can install packages there. Raises PrerequisiteError, LabError.
        """
        if prefix and not plugin:
            paths = [f"{prefix}/{directory}spank_pyxis.so" for directory in ("lib/penroot/", "")]  # installed, source
            library = next(filter(os.path.exists, paths), None)
            if library is None:
                raise LabError(f"no {' or '.join(paths)}: run `make install PREFIX={prefix}` or `make dev` first")
            plugin = f"required {library} resolve_timeout=60"  # the default is too short for a busy machine
        conf = [*slurm_conf, *(["SlurmctldParameters=enable_configless"] if configless else [])]
        wanted = {"nodes": nodes, "plugin": plugin, "prefix": prefix, "slurm_conf": conf, "configless": configless}
        wanted["apart"] = apart
        check_prerequisites()
        with self._locked():
            if self.is_up():
                if self._load()["wanted"] != wanted:
                    raise LabError(f"a lab is up in {self.root} with other arguments: {self._load()['wanted']}")
                say(f"the lab is up in {self.root}")
                return
            self._clear()
            try:
                self._start(wanted, say)
            except BaseException:
                self._clear()
                raise

    def down(self) -> None:
        """End every process of the lab, and remove its cgroups and its directory, even if the lab is half started.

        Raises LabError if something remains.
        """
        if os.geteuid() != 0:
            raise PrerequisiteError("the lab needs root")
        with self._locked():
            self._clear()

    def is_up(self) -> bool:
        try:
            self._load()
        except LabError:
            return False
        return True

    def _start(self, wanted: dict[str, Any], say: Callable[[str], None]) -> None:
        storage = images.build(say=say)
        names = ["ctl", "registry", *(f"n{i}" for i in range(1, wanted["nodes"] + 1))]
        hosts = dict(zip(names, [1, 2, *range(11, 11 + wanted["nodes"])], strict=True))
        addresses = {name: f"{SUBNET}.{host}" for name, host in hosts.items()}
        say(f"lab in {self.root}: {', '.join(names)}")

        put_marker(self.root)
        for name in names:
            for directory, mode in OWN_DIRECTORIES.items():
                path = f"{self.root}/nodes/{name}/{directory}"
                os.makedirs(path)
                os.chmod(path, mode)
        os.makedirs(f"{self.root}/nodes/ctl/var/spool/slurmctld", mode=0o700)
        # A copy: images that tests push are removed with the lab.
        shutil.copytree(storage, f"{self.root}/nodes/registry/var/spool/registry")
        etc.make(self.root, addresses, wanted["plugin"], wanted["slurm_conf"])

        pids = self._start_namespaces(names, wanted)
        nodes = {n: Node(n, addresses[n], pids[n], start_time(pids[n])) for n in names}
        self._state = {"wanted": wanted, "pid": pids["."], "nodes": nodes}
        self._connect()
        for daemon in ("registry-http", "registry-https"):
            self.start_daemon("registry", daemon)
        for name in names:
            if name != "registry":
                self.start_daemon(name, "munged")
                self.start_daemon(name, "slurmctld" if name == "ctl" else "slurmd")
        self._wait_ready(wanted["nodes"])
        for name in names:
            nodes[name].baseline = residue.inventory(self._entry(name), self._cgroups(name))
        self._save()

    def _start_namespaces(self, names: list[str], wanted: dict[str, Any]) -> dict[str, int]:
        """Run node.py; return the process ids of the lab (".") and of each node."""
        spec = json.dumps({**wanted, "root": self.root, "branch": self.branch, "nodes": names})
        script = os.path.join(os.path.dirname(__file__), "node.py")
        done = subprocess.run(
            [sys.executable, "-IS", script, spec], capture_output=True, text=True, stdin=subprocess.DEVNULL, cwd="/"
        )
        words = [line.split(" ", 1) for line in done.stdout.splitlines()]
        pids = {name: int(pid) for name, pid in words if pid.isdecimal()}
        if set(pids) != {".", *names}:
            raise LabError(f"the namespaces of the lab cannot be made:\n{done.stdout}{done.stderr}")
        return pids

    def _connect(self) -> None:
        assert self._state is not None
        try:
            network.connect(self._state["pid"], self._state["nodes"].values())
        except OSError as e:
            raise LabError(f"the network cannot be made: {e}") from e

    def _wait_ready(self, nodes: int) -> None:
        def ready() -> bool:
            shown = self.run(["sinfo", "-h", "-N", "-t", "idle", "-o", "%N"], user="root", check=False).stdout
            return len(shown.split()) == nodes

        self._wait_for(ready, f"slurmctld and {nodes} nodes", 180)

    def _clear(self) -> None:
        try:
            cgroups.destroy(self.branch)
        except TimeoutError as e:
            raise LabError(str(e)) from None
        self._state = None
        if f"{self.root}/".startswith(tuple(f"/{name}/" for name in OWN_DIRECTORIES)):
            raise LabError(f"{self.root} would be covered on the nodes: set $PENROOT_LAB to a path such as /srv/lab")
        marker = f"{self.root}/{MARKER}"
        if not os.path.exists(marker):
            if os.path.isdir(self.root) and os.listdir(self.root):
                raise LabError(f"{self.root} holds something that is not a lab: choose another $PENROOT_LAB")
            return
        inside = [m for m in residue.mounts("/proc/self/mountinfo") if m.startswith(self.root + "/")]
        if inside:
            raise LabError(f"mounted inside {self.root}: {', '.join(inside)}")
        # The lock is on the directory itself: remove only its content, the marker last.
        for path in sorted((f"{self.root}/{name}" for name in os.listdir(self.root)), key=marker.__eq__):
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path)
            else:
                os.unlink(path)

    # ---- daemons

    def start_daemon(self, node: str, daemon: str) -> None:
        """Start one of DAEMONS on ``node``, inside the node's cgroups."""
        log = f"/var/log/{daemon}.out"
        # A program that daemonizes returns when its child is ready. docker-registry stays in the foreground.
        option = "--fork" if daemon.startswith("registry") else "--wait"
        command = ["sh", "-c", f'exec setsid {option} "$@" </dev/null >>{log} 2>&1', "sh", *DAEMONS[daemon]]
        if daemon == "slurmd" and self._load()["wanted"]["configless"]:
            command += ["--conf-server", "ctl"]
        done = subprocess.run(
            [*cgroups.join_command(self._cgroups(node)), *self.command(command, user="root", node=node)], **_captured
        )
        if done.returncode != 0:
            raise LabError(f"{daemon} does not start on {node}\n{self.logs()}")
        if daemon == "munged":
            self._wait_for(lambda: os.path.exists(f"{self._entry(node)}/run/munge/munge.socket.2"), f"munged on {node}")
        if daemon in PORTS:
            self._wait_for(lambda: PORTS[daemon] in listening(self.node(node).pid), f"{daemon} on {node}")

    def stop_daemon(self, node: str, daemon: str) -> None:
        """Stop one of DAEMONS on ``node`` and wait for its end."""
        word = DAEMONS[daemon][-1].encode() if daemon.startswith("registry") else daemon.encode()
        for pid in residue.processes(self._entry(node)):
            path = f"{self._entry(node)}/proc/{pid}"
            try:
                with open(f"{path}/cmdline", "rb") as file:
                    arguments = file.read().split(b"\0")
            except (FileNotFoundError, ProcessLookupError):  # a child that slurmctld has ended
                continue
            if word in (os.path.basename(arguments[0]), arguments[-2] if len(arguments) > 1 else b""):
                self.run(["kill", str(pid)], user="root", node=node)
                deadline = time.monotonic() + 60
                while os.path.exists(path):
                    if time.monotonic() > deadline:
                        raise LabError(f"{daemon} on {node} does not end")
                    time.sleep(0.02)

    def restart_daemon(self, node: str, daemon: str) -> None:
        """Restart a daemon, for example after a change of plugstack.conf, and add its processes to the baseline."""
        self.stop_daemon(node, daemon)
        self.start_daemon(node, daemon)
        if daemon.startswith("slurm"):
            self._wait_ready(self._load()["wanted"]["nodes"])
        self._take_for_granted(node)

    def reconfigure(self) -> None:
        """Make Slurm's daemons read their files again. Since Slurm 23.11, a new process replaces each daemon."""
        before = {path: read(path) for path in (f"{self._entry(node)}/run/slurmd.pid" for node in self.nodes)}
        self.run(["scontrol", "reconfigure"], user="root")
        if etc.slurm_version() >= (23, 11):
            self._wait_for(lambda: all(read(path) not in ("", old) for path, old in before.items()), "new slurmds")
        self._wait_ready(self._load()["wanted"]["nodes"])
        for node in self.nodes:
            self._take_for_granted(node)

    def _take_for_granted(self, node: str) -> None:
        """Add the running processes of a node to its baseline."""
        self.node(node).baseline["processes"] = residue.inventory(self._entry(node), self._cgroups(node))["processes"]
        self._save()

    def install_plugin(self, line: str) -> None:
        """Make ``line`` the only plugin line of plugstack.conf, for the next step, and for slurmd after a restart."""
        self.configure("plugstack.conf.d/pyxis.conf", line + "\n")

    def configure(self, name: str, text: str) -> None:
        """Replace a file of /etc/slurm atomically: processes read the old or the new text."""
        etc.put(f"{self.root}/etc/slurm/{name}", text)

    def logs(self, lines: int = 15) -> str:
        """Return the last ``lines`` lines of each daemon's log, for an error message."""
        text = ""
        for name in sorted(os.listdir(f"{self.root}/nodes")):
            directory = f"{self.root}/nodes/{name}/var/log"
            for file in sorted(os.listdir(directory)):
                with open(f"{directory}/{file}", errors="replace") as log:
                    text += f"--- {name}: {file}\n" + "".join(log.readlines()[-lines:])
        return text

    # ---- commands

    def command(
        self,
        cmd: str | Sequence[str],
        *,
        user: str = "alice",
        node: str = "ctl",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> list[str]:
        """Return the arguments for subprocess.Popen that run ``cmd`` as ``user`` on ``node``.

        The command has all groups of the user, and the environment of a login. If ``cmd`` is a string, bash runs it.
        Use start_new_session=True to be able to kill it.
        """
        pid = str(self.node(node).pid)
        uid, home, shell = self._account(user)
        path = SEARCH_PATH if uid else f"/usr/local/sbin:/usr/sbin:/sbin:{SEARCH_PATH}"
        if prefix := self._load()["wanted"]["prefix"]:
            path = f"{prefix}/bin:{path}"
        environ = {"HOME": home, "USER": user, "LOGNAME": user, "SHELL": shell, "PATH": path}
        environ |= {"TERM": os.environ.get("TERM", "dumb"), "LANG": "C.UTF-8", **(env or {})}
        words = ["bash", "-c", cmd] if isinstance(cmd, str) else list(cmd)
        return [
            *["nsenter", "--target", pid, "--all", "--"],
            *["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups", "--"],
            *["env", "-i", f"--chdir={cwd or home}", *(f"{k}={v}" for k, v in environ.items()), *words],
        ]

    def popen(self, cmd: str | Sequence[str], **where: Any) -> subprocess.Popen[str]:
        """Start ``cmd`` in the background, in its own session; arguments as for `command`."""
        branch = self._cgroups(where.get("node", "ctl"))
        return subprocess.Popen(
            [*cgroups.join_command(branch), *self.command(cmd, **where)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(
        self,
        cmd: str | Sequence[str],
        user: str = "alice",
        node: str = "ctl",
        check: bool = True,
        timeout: float = 300.0,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        input: str = "",
    ) -> subprocess.CompletedProcess[str]:
        """Run ``cmd`` as ``user`` on ``node`` to its end; stdout and stderr are captured.

        Raises CommandFailed if ``check`` is set and the command fails, subprocess.TimeoutExpired after ``timeout``
        seconds; the command then gets SIGTERM, and SIGKILL 5 s later.
        """
        process = self.popen(cmd, user=user, node=node, env=env, cwd=cwd)
        try:
            out, err = process.communicate(input, timeout=timeout)
        except BaseException as e:
            out, err = end(process)
            if isinstance(e, subprocess.TimeoutExpired):
                raise subprocess.TimeoutExpired(cmd, timeout, out, err) from None
            raise
        if check and process.returncode != 0:
            raise CommandFailed(process.returncode, cmd, out, err)
        return subprocess.CompletedProcess(cmd, process.returncode, out, err)

    def execute(self, cmd: Sequence[str], **where: Any) -> NoReturn:
        """Replace this process by ``cmd``, which gets the terminal."""
        words = [*cgroups.join_command(self._cgroups(where.get("node", "ctl"))), *self.command(cmd, **where)]
        os.execvp(words[0], words)

    def residue(self, node: str, settle: float = 120.0) -> list[str]:
        """Return the residue of jobs on ``node``, one per line: processes, mounts, cgroups, files, sockets, held files.

        Call this while no job runs. It runs nothing on the node. A step ends a moment after srun, so wait up to
        ``settle`` seconds until nothing is left.
        """
        deadline = time.monotonic() + settle
        while True:
            left = residue.left(self.node(node).baseline, self._entry(node), self._cgroups(node))
            entries = [self._entry(name) for name in self._load()["nodes"]]
            left += [f"escaped: {line}" for line in residue.escaped_mounts(self.root, entries)]
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.1)

    def slowed(self, node: str, bits: int) -> AbstractContextManager[None]:
        """Limit the cable of ``node`` to ``bits`` bits a second in each direction while the block runs."""
        return network.slowed(self._load()["pid"], self.node(node), bits)

    def unreachable(self, node: str, other: str) -> AbstractContextManager[None]:
        """Make connections from ``node`` to ``other`` fail while the block runs."""
        return network.unreachable(self.node(node), self.node(other))

    def listener(self, node: str) -> socket.socket:
        """Return a socket of this process that listens on ``node``, at a free port."""
        return network.listener(self.node(node))

    def clear(self, node: str) -> None:
        """Remove the residue of jobs on ``node``. Add what remains to the baseline, so that only one test fails."""
        for user in etc.USERS:
            self.run(["scancel", f"--user={user}"], user="root", check=False)
        self._wait_for(lambda: not self.run(["squeue", "-h"], user="root").stdout, "the end of all jobs", 120)
        for user in etc.USERS:
            self.run(["pkill", "-KILL", "-u", user], user="root", node=node, check=False)
            if self._load()["wanted"]["prefix"]:
                self.run("penroot list | xargs -r penroot remove -f", user=user, node=node, check=False)
        self.run(["scontrol", "update", f"NodeName={node}", "State=RESUME"], user="root", check=False)
        self.residue(node, settle=10)
        self.node(node).baseline = residue.inventory(self._entry(node), self._cgroups(node))
        self._save()

    # ---- state

    @property
    def nodes(self) -> list[str]:
        """Return the names of the compute nodes."""
        return [name for name in self._load()["nodes"] if name not in ("ctl", "registry")]

    def node(self, name: str) -> Node:
        nodes: dict[str, Node] = self._load()["nodes"]
        if name not in nodes:
            raise LabError(f"no node {name}: there are {', '.join(nodes)}")
        return nodes[name]

    def _entry(self, node: str) -> str:
        """Return the root directory of ``node``, as seen from this machine: proc_pid_root(5)."""
        return f"/proc/{self.node(node).pid}/root"

    def _cgroups(self, node: str) -> str:
        return f"{self.branch}/{node}"

    def _account(self, user: str) -> tuple[int, str, str]:
        with open(f"{self.root}/etc/passwd") as accounts:
            for line in accounts:
                name, _, uid, _, _, home, shell = line.rstrip("\n").split(":")
                if name == user:
                    return int(uid), home, shell
        raise LabError(f"no user {user}: there are {', '.join(etc.USERS)} and the accounts of this machine")

    def _load(self) -> dict[str, Any]:
        if self._state is None:
            try:
                with open(f"{self.root}/lab.json") as file:
                    state = json.load(file)
            except FileNotFoundError:
                raise LabError(f"no lab is up in {self.root}") from None
            state["nodes"] = {name: Node(**node) for name, node in state["nodes"].items()}
            self._state = state
        for node in self._state["nodes"].values():
            if start_time(node.pid) != node.started:
                raise LabError(f"the lab in {self.root} is broken: {node.name} has died")
        return self._state

    def _save(self) -> None:
        assert self._state is not None
        state = {**self._state, "nodes": {name: asdict(node) for name, node in self._state["nodes"].items()}}
        with open(f"{self.root}/lab.json.new", "w") as file:
            json.dump(state, file)
        os.rename(f"{self.root}/lab.json.new", f"{self.root}/lab.json")

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Allow one `up` or `down` of this lab at a time."""
        while True:
            os.makedirs(self.root, mode=0o755, exist_ok=True)
            fd = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(fd, fcntl.LOCK_EX)
            # The previous holder of the lock may have removed the directory.
            if os.path.isdir(self.root) and os.stat(self.root).st_ino == os.fstat(fd).st_ino:
                break
            os.close(fd)
        try:
            yield
        finally:
            if os.path.isdir(self.root) and not os.listdir(self.root):
                os.rmdir(self.root)
            os.close(fd)

    def _wait_for(self, happened: Callable[[], bool], what: str, seconds: int = 60) -> None:
        deadline = time.monotonic() + seconds
        while not happened():
            if time.monotonic() > deadline:
                raise LabError(f"waited {seconds} s in vain for {what}\n{self.logs()}")
            time.sleep(0.02)


MARKER = ".penroot-lab"
_captured: dict[str, Any] = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL}


def check_prerequisites() -> None:
    """Raise PrerequisiteError if this machine cannot run a lab; the message names all missing packages."""
    if os.geteuid() != 0:
        raise PrerequisiteError("the lab needs root (its jobs run as ordinary users)")
    sbin = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    programs = {**PROGRAMS, **({} if images.cached() else images.PROGRAMS)}
    missing = sorted({package for program, package in programs.items() if not shutil.which(program, path=sbin)})
    if missing:
        raise PrerequisiteError(f"not installed: {' '.join(missing)}: run tests/prerequisites")
    if not find_spec("pyroute2"):
        raise PrerequisiteError(f"{sys.executable} has no pyroute2: use .venv/bin/python")
    if not os.path.exists("/dev/fuse"):
        raise PrerequisiteError("no /dev/fuse: run `modprobe fuse`")
    try:
        pwd.getpwnam("munge")
    except KeyError:
        raise PrerequisiteError("no user munge: reinstall the package munge") from None


def read(path: str) -> str:
    """Return the text of a file that a daemon may be writing; "" if there is no file."""
    try:
        with open(path) as file:
            return file.read()
    except FileNotFoundError:
        return ""


def put_marker(root: str) -> None:
    with open(f"{root}/{MARKER}", "w") as file:
        file.write("made by tests/slurm/lab; `down` removes this directory\n")


def start_time(pid: int) -> int:
    """Return the start of ``pid`` in clock ticks after boot (proc_pid_stat(5)); 0 if it is gone or a zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])


def listening(pid: int) -> set[int]:
    """Return the listening TCP ports in the network namespace of ``pid``: proc_pid_net(5)."""
    ports: set[int] = set()
    for table in ("tcp", "tcp6"):
        with open(f"/proc/{pid}/net/{table}") as file:
            rows = [line.split() for line in file.readlines()[1:]]
        ports.update(int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A")
    return ports


def end(process: subprocess.Popen[str]) -> tuple[str, str]:
    """End the process group of ``process`` by SIGTERM, or after 5 s by SIGKILL. Return the output of ``process``."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        return process.communicate(timeout=5)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()
