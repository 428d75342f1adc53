"""List the leftovers of jobs on a node, as the machine sees them.

An inventory maps kinds to lines. The lab takes an inventory of each node after its start; additional lines in a later
inventory are residue. ``entry`` is the node's root as /proc/PID/root, so nothing is executed in the node.
"""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Iterator

from . import cgroups

# Files that a finished job must not leave. Caches may stay, and so may each user's empty directories. Named containers
# in the data path count as residue: a test removes the containers that it names.
FILES = (
    "/tmp/*",
    "/tmp/enroot-run-*/*",
    "/dev/shm/*",
    "/run/*",
    "/run/pyxis/*",
    "/run/pyxis/*/*",
    "/run/user/*/*",
    "/var/tmp/*",
    "/var/tmp/enroot-data-*/*",
    "/var/tmp/enroot-cache-*/tmp/*",
    "/var/tmp/enroot-cache-*/trash/*",
    "/var/tmp/enroot-cache-*/*/.*",
    "/var/tmp/enroot-cache-*/*/*.partial",
    "/tmp/penroot-*.trees/tmp/*",
    "/tmp/penroot-*.trees/images/*",
    "/tmp/penroot-*.trees/layers/*",
    "/var/spool/slurmd/job*",
)
# Directories that may stay when they are empty: one per user, created once.
KEPT = (
    "/tmp/enroot-run-*",
    "/tmp/penroot-*.trees",
    "/run/pyxis",
    "/run/pyxis/*",
    "/var/tmp/enroot-data-*",
    "/var/tmp/enroot-cache-*",
)
# Small files that later starts of the same user reuse: runtime/named.py, runtime/sharing.py.
HINTS = ("/tmp/enroot-run-*/named-*", "/tmp/enroot-run-*/servers")


def inventory(entry: str, branch: str) -> dict[str, list[str]]:
    return {
        "processes": [describe_process(entry, pid) for pid in processes(entry)],
        "mounts": mounts(f"{entry}/proc/1/mountinfo"),
        "cgroups": list(job_cgroups(branch)),
        "files": list(files(entry)),
        "sockets": sockets(entry),
        "held": [line for pid in processes(entry) for line in held(entry, pid)],
    }


def left(baseline: dict[str, list[str]], entry: str, branch: str) -> list[str]:
    """Return the lines of the current inventory that are not in ``baseline``."""
    now = inventory(entry, branch)
    found = []
    for kind, lines in now.items():
        more = list(lines)
        for line in baseline[kind]:
            if line in more:
                more.remove(line)  # one by one: the same place mounted twice is residue
        found += [f"{kind}: {line}" for line in more if line]
    return found


def processes(entry: str) -> list[int]:
    """Return the process ids on the node, including nested PID namespaces, as the node numbers them."""
    return sorted(int(name) for name in os.listdir(f"{entry}/proc") if name.isdecimal())


def describe_process(entry: str, pid: int) -> str:
    """Return one line for a process: number, start, state, owner, command; "" if it is gone."""
    try:
        with open(f"{entry}/proc/{pid}/stat", errors="replace") as file:
            before, _, after = file.read().rpartition(")")
        with open(f"{entry}/proc/{pid}/cmdline", "rb") as file:
            command = file.read().replace(b"\0", b" ").decode(errors="replace").strip()
        owner = os.stat(f"{entry}/proc/{pid}").st_uid
    except (FileNotFoundError, ProcessLookupError):
        return ""
    fields = after.split()
    dead = " zombie" if fields[0] == "Z" else ""
    return f"process {pid} since tick {fields[19]} uid {owner}{dead}: {command or before.partition('(')[2]}"


def mounts(mountinfo: str) -> list[str]:
    """Return lines ``target kind source root``: proc_pid_mountinfo(5)."""
    lines = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, OSError), open(mountinfo, errors="replace") as file:
        for line in file:
            before, _, after = line.rstrip("\n").partition(" - ")
            root, target = before.split(" ")[3:5]
            kind, source, _ = after.split(" ", 2)
            lines.append(f"{target} {kind} {source} {root}")
    return lines


def job_cgroups(branch: str) -> Iterator[str]:
    """Return Slurm's cgroups per job and per step, except those that Slurm leaves by itself.

    With cgroup v1, slurmstepd is in its job's freezer cgroup. At its end, slurmstepd waits for its last thread
    (pthread_join(3)), moves itself to another cgroup, and gives up if rmdir(2) fails with EBUSY. An exiting thread does
    not move, and pthread_join(3) can return before the kernel has removed the thread from the cgroup. So an empty job_N
    remains now and then, with or without a plugin: Slurm's common_cgroup_delete and xcgroup_wait_pid_moved. The
    processes of a step are in step_N, which counts as residue.
    """
    for hierarchy in cgroups.hierarchies():
        top = f"{hierarchy.mountpoint}/{branch}"
        for path, names, _ in os.walk(top):
            for name in names:
                cgroup = f"{path}/{name}"
                if (
                    name.startswith(("step_", "task_", "penroot", "pyxis"))
                    or name.startswith("job_")
                    and not is_empty(cgroup)
                ):
                    yield cgroup


def is_empty(cgroup: str) -> bool:
    """Return whether a cgroup has neither processes nor children."""
    with cgroups.unless_gone(), open(f"{cgroup}/cgroup.procs") as file:
        return not file.read() and not any(entry.is_dir() for entry in os.scandir(cgroup))
    return True


def files(entry: str) -> Iterator[str]:
    kept = {path for pattern in KEPT for path in glob.glob(entry + pattern)}
    hints = {path for pattern in HINTS for path in glob.glob(entry + pattern)}
    for path in sorted({path for pattern in FILES for path in dotglob(entry + pattern)} - hints):
        # .records identifies a data path. It outlives the containers, as the directory does.
        if (path not in kept or not os.path.isdir(path)) and os.path.basename(path) != ".records":
            yield path[len(entry) :]


def dotglob(pattern: str) -> list[str]:
    """Expand a glob(7) pattern. If it ends in /*, names with a leading dot match, too."""
    directory, _, name = pattern.rpartition("/")
    return glob.glob(pattern) + (glob.glob(f"{directory}/.*") if name == "*" else [])


def sockets(entry: str) -> list[str]:
    """Return Unix sockets of penroot or pyxis, including abstract ones, in any network namespace of the node."""
    found: set[str] = set()
    for pid in processes(entry):
        with contextlib.suppress(OSError), open(f"{entry}/proc/{pid}/net/unix") as file:
            names = (line.rstrip("\n").split(" ")[-1] for line in file.readlines()[1:])
            found.update(name for name in names if name.startswith(("@penroot", "@pyxis")))
    return sorted(found)


def held(entry: str, pid: int) -> Iterator[str]:
    """Return the namespaces, locks and container files that ``pid`` keeps open.

    An open descriptor keeps a lock or a namespace alive, so this also finds a daemon of ours that still serves a
    finished job.
    """
    directory = f"{entry}/proc/{pid}/fd"
    try:
        numbers = os.listdir(directory)
    except OSError:
        return
    for number in numbers:
        try:
            target = os.readlink(f"{directory}/{number}")
        except OSError:
            continue
        if target.startswith(("mnt:[", "user:[", "/var/tmp/enroot-", "/tmp/enroot-run-", "/run/pyxis", "/dev/fuse")):
            yield f"{describe_process(entry, pid)} holds {target}"


def escaped_mounts(root: str, entries: list[str]) -> Iterator[str]:
    """Return mounts of the lab's directory ``root`` in mount namespaces other than those of ``entries``."""
    seen = {os.stat(f"{entry}/proc/1/ns/mnt").st_ino for entry in entries}
    for name in os.listdir("/proc"):
        if not name.isdecimal():
            continue
        try:
            namespace = os.stat(f"/proc/{name}/ns/mnt").st_ino
            nested = len(nspids(name)) > 1
        except OSError:
            continue
        if nested or namespace in seen:  # a process of a node, which `processes` finds, or a namespace that was listed
            continue
        seen.add(namespace)
        for line in mounts(f"/proc/{name}/mountinfo"):
            if line.startswith(root + "/") or f" {root}/" in line:
                yield f"{line} (in the mount namespace of process {name})"


def nspids(pid: str) -> list[str]:
    """Return the process ids of ``pid`` in each of its PID namespaces, the machine's first: proc_pid_status(5)."""
    with open(f"/proc/{pid}/status", errors="replace") as file:
        for line in file:
            if line.startswith("NSpid:"):
                return line.split()[1:]
    return []
