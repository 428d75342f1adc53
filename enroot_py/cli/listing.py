"""The output of ``penroot list`` and ``ps``."""

from __future__ import annotations

import os
import sys
import time

from enroot_py.base import log, proc
from enroot_py.config.settings import Settings, load
from enroot_py.runtime import detached, processes
from enroot_py.store import containers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Sequence

    from enroot_py.runtime.processes import Process

_FANCY = ("NAME", "PID", "COMM", "STATE", "STARTED", "TIME", "MNTNS", "USERNS", "COMMAND")  # enroot's columns
_SHORT = ("NAME", "STATE", "PID", "STARTED", "COMMAND")
_PROCESS = ("PID", "STATE", "STARTED", "TIME", "COMMAND")


def show(*, fancy: bool, as_json: bool) -> int:
    """Run ``penroot list``: enroot's lines for scripts, a table on a terminal."""
    settings = load()
    if as_json:
        text = in_json(settings)
    elif fancy:
        text = fancy_table(settings)
    elif sys.stdout.isatty():
        text = short_table(settings)
    else:
        text = "".join(f"{name}\n" for name in containers.names(settings))
    write(text)
    return 0


def write(text: str) -> None:
    """Write text to stdout. Names that are not UTF-8 stay unchanged."""
    sys.stdout.buffer.write(os.fsencode(text))


def fancy_table(settings: Settings) -> str:
    """Return enroot's table: the names of idle containers, then the running containers with their processes."""
    running = processes.running(settings)
    idle = set(containers.names(settings)) - {process.name for process in running}
    names = _Detached(settings, running)
    return table(_FANCY, [*([name] for name in sorted(idle)), *(_fancy_row(names.of(p) or p.name, p) for p in running)])


def _fancy_row(name: str, process: Process) -> Sequence[str]:
    pid, state, started, used, command = _row(process)
    return name, pid, process.comm, state, started, used, str(process.mntns), str(process.userns), command


def short_table(settings: Settings, *, idle: bool = True) -> str:
    """Return a table for people, of all containers or, without ``idle``, of the running containers."""
    running = processes.running(settings)
    names = _Detached(settings, running)
    rows: list[tuple[str, ...]] = []
    for process in running:
        state = "stopped" if process.state in "Tt" else "running"
        started = _row(process)[2]
        rows.append((names.of(process) or process.name, state, str(process.pid), started, process.command))
    if idle:
        shown = {row[0] for row in rows} | {process.name for process in running}
        rows += [(name, f"exited ({status})") for name, status in names.ended.items()]
        rows += [(name, "-") for name in containers.names(settings) if name not in shown]
    return table(_SHORT, [[log.printable(cell) for cell in row] for row in sorted(rows)])


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return lines whose columns are aligned. A row may have fewer cells than there are titles."""
    lines = [titles, *rows]
    widths = [max(len(line[i]) for line in lines if i < len(line)) for i in range(len(titles))]
    return "".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=False)).rstrip() + "\n"
        for line in lines
    )


def _row(process: Process) -> tuple[str, str, str, str, str]:
    minutes, seconds = divmod(int(process.cpu), 60)
    return (
        str(process.pid),
        process.state,
        time.strftime("%H:%M" if time.time() - process.started < 86400 else "%b%d", time.localtime(process.started)),
        f"{minutes // 60:02}:{minutes % 60:02}:{seconds:02}",
        process.command,
    )


class _Detached:
    """Detached containers. ``ended`` maps the names of ended containers to exit statuses."""

    def __init__(self, settings: Settings, running: Iterable[Process]) -> None:
        self._names: dict[int, str] = {}
        self.ended: dict[str, int | None] = {}
        started = {process.pid: process.started for process in running}
        for name, pid, ticks in detached.programs(settings):
            if started.get(pid) == processes.seconds(ticks):
                self._names[pid] = name
            elif record := detached.find(name, settings):
                with record:
                    self._add(record, started)

    def _add(self, record: detached.Record, running: Container[int]) -> None:
        """Add a container that has ended, or whose program is a child of the recorded process."""
        if program := record.program:
            self._names.update((child, record.name) for child in proc.children(program) if child in running)
        elif not record.is_running:
            self.ended[record.name] = record.status

    def of(self, process: Process) -> str:
        """Return the name of the detached container of a process, or ""."""
        return self._names.get(process.pid, "")


def in_json(settings: Settings, *, idle: bool = True) -> str:
    """Return a JSON list: name and processes of each container, and the exit status of each container that has ended.

    Without ``idle``, list only running containers.
    """
    running = processes.running(settings)
    names = _Detached(settings, running)
    by_name: dict[str, list[Process]] = {name: [] for name in containers.names(settings)}
    for process in running:
        name = names.of(process)
        if name:
            by_name.setdefault(name, []).append(process)
        if process.name != name and not (name and process.name == processes.UNKNOWN):
            by_name.setdefault(process.name, []).append(process)
    objects: list[dict[str, object]] = [
        {"name": name, "processes": [_object(process) for process in each]} for name, each in by_name.items()
    ]
    objects += [{"name": name, "processes": [], "exit_status": status} for name, status in names.ended.items()]
    return _json([each for each in objects if idle or each["processes"]])


def of_processes(name: str, pids: Iterable[int], space: int, *, as_json: bool) -> str:
    """Return a table or JSON of the processes of one container."""
    listed = []
    for pid in pids:
        try:
            listed.append(processes.Process(name, pid, space))
        except OSError:  # the process has ended
            continue
    if as_json:
        return _json([_object(process) for process in listed])
    return table(_PROCESS, [[log.printable(cell) for cell in _row(process)] for process in listed])


def _object(process: Process) -> dict[str, object]:
    return {slot: getattr(process, slot) for slot in processes.Process.__slots__ if slot != "name"}


def _json(values: list[dict[str, object]]) -> str:
    """Return a JSON list with an object on each line. json.dumps() with indentation takes four times as long."""
    import json

    return "[\n" + ",\n".join(map(json.dumps, values)) + "\n]\n"
