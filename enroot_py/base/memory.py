"""Compute how much memory a child program may use within the limits of this process's control groups.

Sources: the kernel's cgroup-v1/memory ("memory.stat") and cgroup-v2 ("Memory Interface Files"); cgroups(7), proc(5).
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from enroot_py.base import cgroups

_THREAD_BYTES = 32 << 20  # for each compressor thread: about what the strongest compression needs
_MIN_BUFFER_BYTES = 64 << 20  # mksquashfs accepts no less
_MAX_BUFFER_BYTES = 512 << 20  # more does not help
# File of the limit, file of the usage, and the prefix of those fields of memory.stat that include child groups.
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
V2 = ("memory.max", "memory.current", "")
_RECLAIMABLE = ("active_file", "inactive_file", "slab_reclaimable")
_OVERHEAD_BYTES = 64 << 20  # in addition to the buffers: the image's tables, and this process


def refusal() -> tuple[str, str] | None:
    """Return an error message and a hint if the control groups allow too little memory to write an image, else None."""
    limit = min((limit for limit, _ in _groups() if limit), default=0)
    needed = _MIN_BUFFER_BYTES + _OVERHEAD_BYTES
    if not limit or limit >= needed:
        return None
    message = f"writing an image takes {needed >> 20} MiB of memory, but only {limit >> 20} MiB are allowed"
    return message, "in a Slurm job, ask for more --mem"


def share(left: int, processors: int) -> tuple[int, int]:
    """Return the buffer bytes and the number of threads for a program that may use ``left`` bytes."""
    buffers = max(_MIN_BUFFER_BYTES, min(_MAX_BUFFER_BYTES, (left - _OVERHEAD_BYTES) // 2))
    return buffers, max(1, min(processors, left // _THREAD_BYTES))


def left() -> int:
    """Return the bytes that this process may still use: available on the machine and in each of its control groups."""
    return min([_of_machine(), *(limit - used for limit, used in _groups() if limit)])


def _of_machine() -> int:
    return _numbers("/proc/meminfo", 1 << 10).get("MemAvailable:", 1 << 62)


def _groups() -> Iterator[tuple[int, int]]:
    """Yield limits() of each memory hierarchy, from this process's group to the topmost visible group."""
    for mount, path, is_v2 in cgroups.hierarchies("self", "memory"):
        yield from limits(mount, path, V2 if is_v2 else V1)


def limits(mount: str, path: str, names: tuple[str, str, str]) -> Iterator[tuple[int, int]]:
    """Yield (limit, unreclaimable bytes in use) of the group ``path`` and its parents; 0 means no limit."""
    while True:
        group = mount + path.rstrip("/")
        stat = _numbers(f"{group}/memory.stat", 1)
        # The kernel reclaims cached files on demand; memory.stat counts tmpfs separately.
        free = sum(stat.get(names[2] + word, 0) for word in _RECLAIMABLE)
        yield _number(f"{group}/{names[0]}"), max(0, _number(f"{group}/{names[1]}") - free)
        if path in ("", "/"):
            return
        path = os.path.dirname(path)


def _number(path: str) -> int:
    """Return the number in a control group file. Return 0 for no file or no limit (``max``; version 1: 2**60)."""
    try:
        with open(path) as f:
            text = f.read().strip()
    except OSError:
        return 0
    return int(text) if text.isdecimal() and int(text) < 1 << 60 else 0


def _numbers(path: str, unit: int) -> dict[str, int]:
    try:
        with open(path) as f:
            words = [line.split()[:2] for line in f]
    except OSError:
        return {}
    return {name: int(number) * unit for name, number in words}
