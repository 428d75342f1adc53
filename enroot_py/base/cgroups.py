"""Find the control groups of a process on this machine: cgroups(7).

Sources: the kernel's cgroup-v1/freezer-subsystem and cgroup-v2 ("Core Interface Files"); proc(5).
"""

from __future__ import annotations

from enroot_py.base import mountinfo, proc


def hierarchies(pid: int | str, controller: str) -> list[tuple[str, str, bool]]:
    """Return the mount point, the group's path and ``is_v2`` for each cgroup hierarchy that can hold ``controller``.

    A v2 hierarchy is returned even if it lacks the controller. Raises OSError if the process has ended.
    """
    groups = {}
    with open(f"/proc/{pid}/cgroup", errors="surrogateescape") as f:
        for line in f:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            groups.update(dict.fromkeys(controllers.split(","), path))
    found = []
    for mount in mountinfo.read():
        is_v2 = mount.fstype == "cgroup2" and "" in groups
        if not is_v2 and (mount.fstype != "cgroup" or controller not in {*groups} & {*mount.data.split(",")}):
            continue
        path = groups["" if is_v2 else controller].removeprefix(mount.root.rstrip("/"))
        # "/..": the group is outside the cgroup namespace, so return the mount point itself.
        found.append((mount.target, "" if "/.." in path else path, is_v2))
    return found


def pause_reason(pid: int) -> str:
    """Return "its job is suspended", "it is stopped", or "" if the process is neither or is not visible."""
    try:
        if _is_frozen(pid):
            return "its job is suspended"
        return "it is stopped" if proc.Stat(pid).is_stopped else ""
    except OSError:
        return ""


def _is_frozen(pid: int) -> bool:
    """Return whether a process is in a frozen group, as in a suspended Slurm job. Raises OSError if it has ended."""
    for mount, path, is_v2 in hierarchies(pid, "freezer"):
        try:
            with open(f"{mount}{path}/{'cgroup.events' if is_v2 else 'freezer.state'}") as f:
                state = f.read()
        except OSError:
            continue
        if "frozen 1\n" in state if is_v2 else state != "THAWED\n":
            return True
    return False
