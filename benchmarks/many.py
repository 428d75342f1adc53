"""Measure starts per second, 16 at a time, compared with a bare interpreter, and the cost of many live containers."""

from __future__ import annotations

import json
import pathlib
import statistics
import subprocess

from benchmarks.start import ordinary_user
from benchmarks.tables import judge
from tests.installation import LIBRARY
from tests.kernel.conftest import PREFIX, UID

PROGRAM = pathlib.Path(__file__).with_name("starting.py")
LIVE = 200
BASELINE = "bare interpreter"
# Budgets: the time of a start, as a ratio to the time of the interpreter.
BUDGETS = {"enroot_py.run": 1.6, "Container and run": 3.0}


def bench_many(rounds: int) -> bool:
    with ordinary_user() as user:
        as_user = ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups", "/usr/bin/python3", str(PROGRAM)]
        command = [*as_user, LIBRARY, str(rounds), str(LIVE)]
        environ = {**user.environ, "PREFIX": str(PREFIX)}
        done = subprocess.run(command, env=environ, cwd="/", stdout=subprocess.PIPE, text=True, check=True)
    measured = json.loads(done.stdout)
    return _starts(measured["starts"]) & _live(measured["live"])


def _starts(kinds: dict[str, dict[str, list[float]]]) -> bool:
    print(f"\n{'16 starts in flight':44} {'per s':>8} {'median':>8} {'p99 ms':>8} {'ratio':>6}  budget")
    rates = {kind: len(seconds["starts"]) / sum(seconds["turns"]) for kind, seconds in kinds.items()}
    good = True
    for kind, seconds in kinds.items():
        times = sorted(seconds["starts"])
        turns = zip(seconds["turns"], kinds[BASELINE]["turns"], strict=True)
        ratio = statistics.median(turn / baseline for turn, baseline in turns)
        within, verdict = judge(ratio, BUDGETS.get(kind))
        good &= within
        middle, last = (1000 * times[int(len(times) * part)] for part in (0.5, 0.99))
        print(f"{kind:44} {rates[kind]:8.1f} {middle:8.1f} {last:8.1f} {ratio:5.2f}x  {verdict}")
    return good


def _live(cost: dict[str, float]) -> bool:
    print(f"\n{LIVE} live containers of one image")
    within, verdict = judge(cost["memory"] / LIVE, 150 * 1.024, " kB")
    print(f"{'memory of each':44} {cost['memory'] / LIVE:8.0f} kB{'':16}  {verdict}")
    also, verdict = judge(cost["last"] / cost["first"], 1.2)
    print(f"{'first and last start':44} {cost['first'] * 1000:8.1f} {cost['last'] * 1000:8.1f} ms{'':8} {verdict}")
    print(f"{'run() in one of them':44} {cost['run'] * 1000:8.1f} ms")
    print(f"{'end of all':44} {cost['close']:8.2f} s")
    return within & also
