"""Tables of rows with their ratios and budgets.

Ratios use the 10th percentile, which depends least on other work of the machine. The time that one command adds to
another is the median of the differences within each round, because the load of the machine is similar during a round.
A tool that is not installed is MISSING.
"""

from __future__ import annotations

import json
import pathlib
import shutil
import statistics
from collections.abc import Sequence

from tests.installation import PREFIX as PREFIX

PYTHON = ["/usr/bin/python3", "-IS", "-c", "pass"]
TIMING = pathlib.Path(__file__).with_name("timing.py")


class Row:
    """One line: a command, and its budget as a ratio to the baseline."""

    def __init__(self, name: str, command: list[str] | None, budget: float | None = None) -> None:
        self.name = name
        self.command = command
        self.budget = budget


def p10(times: list[float]) -> float:
    return sorted(times)[len(times) // 10]


def judge(cost: float, budget: float | None, unit: str = "x", *, also: bool = True) -> tuple[bool, str]:
    """Return whether ``cost`` is within the budget and ``also`` is true, and a verdict to print ("" for no budget)."""
    if budget is None:
        return True, ""
    within = cost <= budget and also
    return within, f"<= {budget:.3g}{unit} {'ok' if within else 'TOO SLOW'}"


def table(title: str, rows: list[Row], times: dict[str, list[float]], baseline: str) -> bool:
    """Print one table. Return False if a row exceeds its budget."""
    print(f"\n{title}\n{'':44} {'p10 ms':>8} {'median':>8} {'ratio':>6}  budget")
    unit = p10(times[baseline])
    good = True
    for row in rows:
        if row.command is None:
            print(f"{row.name:44} {'MISSING':>8}")
            continue
        low, middle = p10(times[row.name]), statistics.median(times[row.name])
        ratio = low / unit
        within, verdict = judge(ratio, row.budget)
        good &= within
        print(f"{row.name:44} {low * 1000:8.1f} {middle * 1000:8.1f} {ratio:5.2f}x  {verdict}")
    return good


def command_if_installed(name: str, *arguments: str) -> list[str] | None:
    path = shutil.which(name)
    return [path, *arguments] if path else None


def timing_program(commands: dict[str, list[str]], rounds: int) -> str:
    """Return the source of a program that measures commands, for an interpreter that reads stdin."""
    parameters = json.dumps({"rounds": rounds, "commands": commands})
    return TIMING.read_text().replace("json.load(sys.stdin)", f"json.loads({json.dumps(parameters)})")


def median_difference(times: dict[str, list[float]], name: str, plain: str) -> float:
    """Return the median of the seconds that the command ``name`` takes longer than ``plain``."""
    return statistics.median(a - b for a, b in zip(times[name], times[plain], strict=True))


def print_added(
    title: str, times: dict[str, list[float]], bare: list[float], rows: Sequence[tuple[str, str, float | None]]
) -> bool:
    """Print how much longer commands take than other commands. Return False if a difference exceeds its budget.

    A row is the command, the command to compare with, and the budget as a ratio to ``bare``.
    """
    print(f"\n{title:44} {'ms':>8} {'of bare python3':>17}  budget")
    good = True
    for name, plain, budget in rows:
        if name not in times:
            print(f"{name:44} {'MISSING':>8}")
            continue
        cost = median_difference(times, name, plain)
        ratio = cost / statistics.median(bare)
        within, verdict = judge(ratio, budget)
        good &= within
        print(f"{name:44} {cost * 1000:8.1f} {ratio:16.2f}x  {verdict}")
    return good
