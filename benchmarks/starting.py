"""Start many containers from Python, by turns with the bare interpreter, and print times as JSON. many.py runs this.

python3 starting.py LIBRARY ROUNDS CONTAINERS
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

sys.path.insert(0, sys.argv[1])

import enroot_py  # noqa: E402

IN_FLIGHT = 16
TURN = 48  # starts of one kind in a row


def interpreter() -> None:
    subprocess.run(["/usr/bin/python3", "-IS", "-c", "pass"], check=True)


def command_line() -> None:
    subprocess.run([f"{os.environ['PREFIX']}/bin/penroot", "start", "box", "true"], check=True)


def once() -> None:
    enroot_py.run("box", ["true"], check=True)


def once_of_file() -> None:
    enroot_py.run(f"{os.environ['HOME']}/box.sqsh", ["true"], check=True)


def container() -> None:
    with enroot_py.Container("box") as box:
        box.run(["true"], check=True)


def writable() -> None:
    enroot_py.run("box", ["true"], writable=True, check=True)


KINDS: dict[str, Callable[[], None]] = {
    "bare interpreter": interpreter,
    "penroot start NAME true": command_line,
    "enroot_py.run": once,
    "enroot_py.run of x.sqsh": once_of_file,
    "enroot_py.run, writable": writable,
    "Container and run": container,
}


def timed(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def starts(rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of each turn, and of each start, by kind."""
    seconds: dict[str, dict[str, list[float]]] = {kind: {"turns": [], "starts": []} for kind in KINDS}
    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        for act in KINDS.values():  # warm the caches
            act()
        for _ in range(max(1, rounds // TURN)):
            for kind, act in KINDS.items():
                began = time.perf_counter()
                seconds[kind]["starts"] += pool.map(timed, [act] * TURN)
                seconds[kind]["turns"].append(time.perf_counter() - began)
    return seconds


def available() -> int:
    with open("/proc/meminfo") as f:
        return next(int(line.split()[1]) for line in f if line.startswith("MemAvailable:"))


def live(count: int) -> dict[str, float]:
    """Make ``count`` containers. Return the kB of memory that they take, and the seconds of some actions.

    The actions are the first start, the last start, a command in a container, and the end of all containers.
    """
    enroot_py.run("box", ["true"])
    before = available()
    boxes = [enroot_py.Container("box")]
    first = min(timed(lambda: boxes.append(enroot_py.Container("box"))) for _ in range(5))
    while len(boxes) < count - 5:
        boxes.append(enroot_py.Container("box"))
    last = min(timed(lambda: boxes.append(enroot_py.Container("box"))) for _ in range(5))
    memory = before - available()
    command = min(timed(lambda: boxes[0].run(["true"])) for _ in range(5))
    began = time.perf_counter()
    for box in boxes:
        box.close()
    return {"memory": memory, "first": first, "last": last, "run": command, "close": time.perf_counter() - began}


print(json.dumps({"starts": starts(int(sys.argv[2])), "live": live(int(sys.argv[3]))}))
