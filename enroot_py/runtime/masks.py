"""Hide files in /proc with which root could change the kernel or read its data, in containers that root starts.

The files belong to root of the host, and their owner can write to them without any capability. So a container that root
starts in a user namespace could set sysctls, or restart the node. Sources: the OCI runtime specification, "Masked
Paths" and "Readonly Paths"; proc(5).
"""

from __future__ import annotations

import os
import stat

from enroot_py.base import linux, log, paths
from enroot_py.runtime import mounting

_READ_ONLY = ("/proc/sys", "/proc/sysrq-trigger", "/proc/irq", "/proc/bus", "/proc/fs")
_HIDDEN = (
    "/proc/acpi",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/proc/timer_list",
)
_ATTRIBUTES = linux.MOUNT_ATTR_RDONLY | linux.MOUNT_ATTR_NOSUID | linux.MOUNT_ATTR_NODEV | linux.MOUNT_ATTR_NOEXEC


def cover(root: int) -> None:
    """Hide files of /proc, or make them read-only. Later mounts can still cover /proc. Raises OSError."""
    for path in (*_READ_ONLY, *_HIDDEN):
        try:
            descriptor = paths.open_in(root, path)
        except OSError:
            continue  # this kernel lacks the file
        with descriptor as fd:
            if not paths.is_own(root, fd):
                _cover(fd, path, path in _HIDDEN)


def _cover(fd: int, path: str, hide: bool) -> None:
    if log.explain:
        log.explain(f"mount    {path} {'hidden' if hide else 'read-only'}  (from root)")
    flags = linux.OPEN_TREE_CLONE | linux.OPEN_TREE_CLOEXEC
    if not hide:
        tree = linux.open_tree(fd, "", flags | linux.AT_EMPTY_PATH | linux.AT_RECURSIVE)
    elif stat.S_ISDIR(os.fstat(fd).st_mode):
        tree = mounting.mount_filesystem("tmpfs", "tmpfs", ["mode=755", "size=4k"], _ATTRIBUTES)
    else:
        tree = linux.open_tree(linux.AT_FDCWD, "/dev/null", flags)
    with tree:
        linux.mount_setattr(tree, "", linux.AT_EMPTY_PATH | linux.AT_RECURSIVE, _ATTRIBUTES, 0, 0)
        mounting.attach(tree, fd)
