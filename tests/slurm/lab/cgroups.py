"""The lab's own branch of every mounted cgroup hierarchy, v1 or v2.

Each node gets one cgroup per hierarchy and a cgroup namespace rooted there, so job 1 step 0 of n1 and of n2 have
different cgroups on one machine. The branch is also the lab's identity: it contains every process that the lab started,
so ``down`` can find them after a crash.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass

# Options of a cgroup v1 superblock that do not identify the hierarchy: cgroups(7).
_NOT_A_NAME = {"rw", "ro", "xattr", "noprefix", "clone_children", "cpuset_v2_mode"}


@dataclass(frozen=True)
class Hierarchy:
    """One mounted hierarchy; ``options`` is empty for cgroup2."""

    mountpoint: str
    options: str

    @property
    def is_v2(self) -> bool:
        return not self.options


def hierarchies() -> list[Hierarchy]:
    """Return every mounted hierarchy once: proc_pid_mountinfo(5)."""
    found: dict[str, Hierarchy] = {}
    with open("/proc/self/mountinfo") as lines:
        for line in lines:
            before, _, after = line.rstrip("\n").partition(" - ")
            root, target = before.split(" ")[3:5]
            kind, _, superblock = after.split(" ")
            if kind == "cgroup2":
                options = ""
            elif kind == "cgroup":
                words = (w for w in superblock.split(",") if w not in _NOT_A_NAME)
                options = ",".join(w for w in words if not w.startswith("release_agent="))
            else:
                continue
            if root == "/" or root.startswith("/.."):
                found.setdefault(options, Hierarchy(target, options))
    return list(found.values())


def slurm_plugin() -> str:
    """Return the CgroupPlugin of cgroup.conf(5) for the mounted hierarchies."""
    with_freezer = any("freezer" in h.options.split(",") for h in hierarchies())
    return "cgroup/v1" if with_freezer else "cgroup/v2"


def create(branch: str) -> None:
    """Create ``branch`` (such as ``penroot-lab.1/n1``) in every hierarchy. Raises OSError."""
    for hierarchy in hierarchies():
        path = hierarchy.mountpoint
        for name in branch.split("/"):
            if hierarchy.is_v2:
                _delegate(path)
            parent, path = path, f"{path}/{name}"
            os.makedirs(path, exist_ok=True)
            if "cpuset" in hierarchy.options.split(","):
                # An empty cpuset accepts no process: cpuset(7).
                for key in ("cpuset.cpus", "cpuset.mems"):
                    _write(f"{path}/{key}", _read(f"{parent}/{key}"))


def join(branch: str) -> None:
    """Move the calling process into ``branch`` in every hierarchy. If `enter_leaf` made a leaf there, use the leaf."""
    for path in _process_files(branch):
        _write(path, "0")


def join_command(branch: str) -> list[str]:
    """Return the words to put before a command, so that it joins ``branch`` first.

    subprocess could call `join` in the child instead, but a preexec function would copy the tests' memory.
    """
    script = "".join(f"echo 0 > {shlex.quote(path)} && " for path in _process_files(branch))
    return ["sh", "-c", script + 'exec "$@"', "sh"]


def _process_files(branch: str) -> Iterator[str]:
    for hierarchy in hierarchies():
        path = f"{hierarchy.mountpoint}/{branch}"
        leaf = f"{path}/init" if os.path.isdir(f"{path}/init") else path
        yield f"{leaf}/cgroup.procs"


def enter_leaf(mountpoint: str) -> None:
    """Move this process from the root of a v2 cgroup namespace to a leaf, so that the root's children get controllers.

    The kernel's cgroup-v2 document calls this rule "no internal processes". slurmd expects a cgroup system.slice for
    its steps, as systemd creates it. Enable every controller in the root and in system.slice: if "memory" is the last
    controller in the list, Slurm 22.05 overlooks it.
    """
    for name in ("init", "system.slice"):
        os.makedirs(f"{mountpoint}/{name}", exist_ok=True)
    _write(f"{mountpoint}/init/cgroup.procs", "0")
    _delegate(mountpoint)
    _delegate(f"{mountpoint}/system.slice")


def processes(branch: str) -> set[int]:
    """Return the process ids in ``branch`` and below, in any hierarchy."""
    found: set[int] = set()
    for path in _tree(branch):
        with unless_gone():
            found.update(int(pid) for pid in _read(f"{path}/cgroup.procs").split())
    return found


def exists(branch: str) -> bool:
    return any(True for _ in _tree(branch))


def destroy(branch: str, *, timeout: float = 60.0) -> None:
    """Kill the processes in ``branch``, then remove it; ``timeout`` in seconds.

    Raises TimeoutError with the remaining processes.
    """
    deadline = time.monotonic() + timeout
    while True:
        for pid in processes(branch) - {0}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for path in _tree(branch):
            _thaw(path)
            with contextlib.suppress(OSError):  # busy until its last process is reaped: the loop retries
                os.rmdir(path)
        if not exists(branch):
            return
        if time.monotonic() > deadline:
            left = ", ".join(_tree(branch))
            raise TimeoutError(f"cgroups do not empty: {left} (processes {sorted(processes(branch))})")
        time.sleep(0.02)


def _tree(branch: str) -> Iterator[str]:
    """Return the directories of ``branch`` in every hierarchy, children first."""
    for hierarchy in hierarchies():
        for path, _, _ in os.walk(f"{hierarchy.mountpoint}/{branch}", topdown=False):
            yield path


@contextlib.contextmanager
def unless_gone() -> Iterator[None]:
    """Ignore errors of a cgroup that disappears before or after its file is opened."""
    try:
        yield
    except OSError as e:
        if e.errno not in (errno.ENOENT, errno.ENODEV):
            raise


def _thaw(path: str) -> None:
    # With cgroup v1, not even SIGKILL ends a frozen process.
    with unless_gone():
        if _read(f"{path}/freezer.state").strip() != "THAWED":
            _write(f"{path}/freezer.state", "THAWED")


def _delegate(path: str) -> None:
    """Enable every controller of a v2 cgroup for its children."""
    for controller in _read(f"{path}/cgroup.controllers").split():
        with contextlib.suppress(OSError):  # a controller may be bound to v1, or busy: the others still work
            _write(f"{path}/cgroup.subtree_control", f"+{controller}")


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
