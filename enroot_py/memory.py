"""How much memory a program that we start may take: what the control groups of this process leave of theirs.

Sources: the kernel's cgroup-v1/memory ("memory.stat") and cgroup-v2 ("Memory Interface Files"); cgroups(7), proc(5).
"""

import os

_PER_PROCESSOR = 32 << 20  # bytes that a thread of a compressor may take: the strongest ones need about so much
_FLOOR = 64 << 20  # bytes: mksquashfs takes no less
_CEILING = 512 << 20  # bytes: more makes nothing quicker
_REST = 64 << 20  # bytes for what counts beside the buffers: the tables of the image, and ourselves


def needed() -> int:
    """Bytes without which no image is written."""
    return _FLOOR + _REST


def share(left: int, processors: int) -> "tuple[int, int]":
    """Bytes of buffers, and threads, for a program that may take ``left`` bytes."""
    buffers = max(_FLOOR, min(_CEILING, (left - _REST) // 2))
    return buffers, max(1, min(processors, left // _PER_PROCESSOR))


def left() -> int:
    """Bytes that this process may still take: of the machine, and of each control group that it is in."""
    return min([_of_machine(), *(limit - used for limit, used in _groups() if limit)])


def limit() -> int:
    """Bytes that this process could take if it were alone in its control groups; 0 for no limit."""
    return min((limit for limit, _ in _groups() if limit), default=0)


def _of_machine() -> int:
    return _numbers("/proc/meminfo", 1 << 10).get("MemAvailable:", 1 << 62)


def _groups() -> "list[tuple[int, int]]":
    """(limit, what is used and cannot be taken back) of each group, from our own to the topmost one that can be seen.

    A limit of 0 is none.
    """
    found = []
    for root, mount, inside, names in _places():
        path = inside.removeprefix(root.rstrip("/"))
        while True:
            here = mount + path.rstrip("/")
            limit = _number(f"{here}/{names[0]}")
            # Files that are cached go as soon as room is wanted; what lies in a tmpfs is not among them.
            stat = _numbers(f"{here}/memory.stat", 1)
            cached = stat.get(names[2] + "active_file", 0) + stat.get(names[2] + "inactive_file", 0)
            found.append((limit, max(0, _number(f"{here}/{names[1]}") - cached)))
            if path in ("", "/") or ".." in path:
                break
            path = os.path.dirname(path)
    return found


def _places() -> "list[tuple[str, str, str, tuple[str, str, str]]]":
    """(root, mount point, our group, names of files) of the hierarchy that limits memory."""
    groups = {}
    with open("/proc/self/cgroup") as f:
        for line in f:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            groups.update(dict.fromkeys(controllers.split(","), path))
    found = []
    with open("/proc/self/mountinfo") as f:
        for line in f:
            before, _, after = line.partition(" - ")
            kind, _, options = after.split(" ", 2)
            root, mount = before.split(" ")[3:5]
            if kind == "cgroup2" and "" in groups:
                found.append((root, mount, groups[""], ("memory.max", "memory.current", "")))
            elif kind == "cgroup" and "memory" in groups and "memory" in options.strip().split(","):
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
                found.append((root, mount, groups["memory"], names))
    return found


def _number(path: str) -> int:
    """What a file of a control group says; 0 for ``max``, for what can be no limit, and where there is none."""
    try:
        with open(path) as f:
            text = f.read().strip()
    except OSError:
        return 0
    return int(text) if text.isdecimal() and int(text) < 1 << 60 else 0


def _numbers(path: str, unit: int) -> "dict[str, int]":
    try:
        with open(path) as f:
            words = [line.split()[:2] for line in f]
    except OSError:
        return {}
    return {name: int(number) * unit for name, number in words}
