"""Show the caller's cgroups in /sys/fs/cgroup, read-only, so that a program finds its own limits.

The caller's cgroup is the root of the container's cgroup namespace, but the host's mounts show the whole hierarchy:
cgroup_namespaces(7).
"""

from __future__ import annotations

import os

from enroot_py.base.mountinfo import Mounted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from enroot_py.runtime.hooks import Context


def run(context: Context) -> None:
    mounted: dict[str, str] = {}
    for line in context.cgroups.splitlines():
        _, controllers, path = line.split(":", 2)
        # Show the step's cgroup: Slurm sets the limits there, not in the cgroups of the tasks.
        if path.rpartition("/")[2].startswith("task_"):
            path = path.rpartition("/")[0]
        mounted = mounted or hierarchies(context.mountinfo)
        target = mounted.get(controllers, "")
        source = target + path.rstrip("/")
        if target and source != target and os.path.isdir(source):
            context.mount(source, target, "rbind,ro,nosuid,nodev,noexec,nofail,silent")


def hierarchies(mountinfo: str) -> dict[str, str]:
    """Return the host's mount point of each hierarchy, by controllers: cgroups(7)."""
    mounted: dict[str, str] = {}
    for mount in (Mounted(line) for line in mountinfo.split("\n") if " - cgroup" in line):
        options = [o for o in mount.data.split(",") if o not in ("rw", "ro", "xattr", "clone_children")]
        controllers = "" if mount.fstype == "cgroup2" else ",".join(o for o in options if "release_agent=" not in o)
        mounted.setdefault(controllers, mount.target)
    return mounted
