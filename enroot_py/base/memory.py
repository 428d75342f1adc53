"""How much memory a program that we start may take: what the control groups of this process leave of theirs.

Sources: the kernel's cgroup-v1/memory ("memory.stat") and cgroup-v2 ("Memory Interface Files"); cgroups(7), proc(5).
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from enroot_py.base import cgroups

_PER_PROCESSOR = 32 << 20  # bytes that a thread of a compressor may take: the strongest ones need about so much
_FLOOR = 64 << 20  # bytes: mksquashfs takes no less
_CEILING = 512 << 20  # bytes: more makes nothing quicker
# The files of a limit and of what is used, and how the sums of a whole group begin.
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
V2 = ("memory.max", "memory.current", "")
_RECLAIMABLE = ("active_file", "inactive_file", "slab_reclaimable")
_REST = 64 << 20  # bytes for what counts beside the buffers: the tables of the image, and ourselves


def refusal() -> tuple[str, str] | None:
    """Why our control groups leave too little memory to write an image, and the way out; None if there is enough."""
    limit = min((limit for limit, _ in _groups() if limit), default=0)
    if not limit or limit >= _FLOOR + _REST:
        return None
    why = f"writing an image takes {_FLOOR + _REST >> 20} MiB of memory, and {limit >> 20} are allowed here"
    return why, "in a Slurm job, ask for more --mem"


def share(left: int, processors: int) -> tuple[int, int]:
    """Bytes of buffers, and threads, for a program that may take ``left`` bytes."""
    buffers = max(_FLOOR, min(_CEILING, (left - _REST) // 2))
    return buffers, max(1, min(processors, left // _PER_PROCESSOR))


def left() -> int:
    """Bytes that this process may still take: of the machine, and of each control group that it is in."""
    return min([_of_machine(), *(limit - used for limit, used in _groups() if limit)])


def _of_machine() -> int:
    return _numbers("/proc/meminfo", 1 << 10).get("MemAvailable:", 1 << 62)


def _groups() -> Iterator[tuple[int, int]]:
    """limits() of each hierarchy that limits memory, from our own group to the topmost one that can be seen."""
    for mount, path, is_v2 in cgroups.places("self", "memory"):
        yield from limits(mount, path, V2 if is_v2 else V1)


def limits(mount: str, path: str, names: tuple[str, str, str]) -> Iterator[tuple[int, int]]:
    """(limit, used bytes that cannot be reclaimed) of the group ``path`` and those above it; a limit of 0 is none."""
    while True:
        here = mount + path.rstrip("/")
        stat = _numbers(f"{here}/memory.stat", 1)
        # Files that are cached go as soon as room is wanted; what lies in a tmpfs is not among them.
        free = sum(stat.get(names[2] + word, 0) for word in _RECLAIMABLE)
        yield _number(f"{here}/{names[0]}"), max(0, _number(f"{here}/{names[1]}") - free)
        if path in ("", "/"):
            return
        path = os.path.dirname(path)


def _number(path: str) -> int:
    """What a file of a control group says; 0 for ``max``, for what can be no limit, and where there is none."""
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
