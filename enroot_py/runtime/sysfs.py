"""Mount a /sys for the caller's network, if the mounted /sys shows another network namespace.

`unshare -Urn` and rootless networking enter a user and a network namespace, while /sys is still the node's. Only root
of that user namespace can mount a /sys for its network, and only before this process enters the container's user
namespace. Starts of a caller without privileges do not import this module.
"""

from __future__ import annotations

import os

from enroot_py.base import linux
from enroot_py.base.errors import NamespaceError
from enroot_py.runtime import mounting, namespaces
from enroot_py.runtime.mounting import Mount

_OPTIONS = ("x-create=dir", "ro", "nosuid", "nodev", "noexec", "private")


def of_caller() -> Mount | None:
    """Return a mount of /sys for the caller's network, or None if the present /sys shows it or the mount fails."""
    try:
        if set(os.listdir("/sys/class/net")) <= _devices():
            return None
    except OSError:
        return None
    for enter in (None, linux.CLONE_NEWNS):
        try:
            if enter:  # the mount needs a mount namespace that this user namespace owns: mount_namespaces(7)
                namespaces.unshare(enter)
            sysfs = Mount("sysfs", "/sys", "sysfs", _OPTIONS, -1, "the caller's network namespace")
            sysfs.detached = mounting.mount_filesystem("sysfs", "sysfs", [], sysfs.attributes)
            return sysfs
        except (OSError, NamespaceError):
            continue
    return None


def _devices() -> set[str]:
    """Return the network devices of this process, and the control file in /sys/class/net."""
    with open("/proc/self/net/dev") as f:
        return {line.partition(":")[0].strip() for line in f if ":" in line} | {"bonding_masters"}
