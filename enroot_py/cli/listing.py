"""The output of ``penroot list``."""

from __future__ import annotations

import sys
import time

from enroot_py.config.settings import Settings, load
from enroot_py.runtime import processes
from enroot_py.store import containers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_TITLES = ("NAME", "PID", "COMM", "STATE", "STARTED", "TIME", "MNTNS", "USERNS", "COMMAND")


def show(*, fancy: bool, as_json: bool) -> int:
    """Run ``penroot list``."""
    settings = load()
    sys.stdout.write(in_json(settings) if as_json else as_text(settings, fancy=fancy))
    return 0


def as_text(settings: Settings, *, fancy: bool) -> str:
    """Return one name per line; with ``fancy`` a table with the processes of running containers."""
    names = containers.names(settings)
    if not fancy:
        return "".join(f"{name}\n" for name in names)
    running = processes.running(settings)
    idle = set(names) - {process.name for process in running}
    rows: list[Sequence[str]] = [_TITLES, *([name] for name in sorted(idle)), *map(_row, running)]
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(len(_TITLES))]
    return "".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip() + "\n" for row in rows
    )


def _row(process: processes.Process) -> Sequence[str]:
    minutes, seconds = divmod(int(process.cpu), 60)
    return (
        process.name,
        str(process.pid),
        process.comm,
        process.state,
        time.strftime("%H:%M" if time.time() - process.started < 86400 else "%b%d", time.localtime(process.started)),
        f"{minutes // 60:02}:{minutes % 60:02}:{seconds:02}",
        str(process.mntns),
        str(process.userns),
        process.command,
    )


def in_json(settings: Settings) -> str:
    """Return a list of objects, each with the name of a container and the attributes of its processes."""
    import json

    running = processes.running(settings)
    slots = [slot for slot in processes.Process.__slots__ if slot != "name"]
    objects: dict[str, list[dict[str, object]]] = {name: [] for name in containers.names(settings)}
    for process in running:
        objects.setdefault(process.name, []).append({slot: getattr(process, slot) for slot in slots})
    return json.dumps([{"name": name, "processes": objects[name]} for name in objects], indent=2) + "\n"
