"""Run tests repeatedly, and list the tests that sometimes fail.

    .venv/bin/python -m tests.repeat [--times 3] [WHAT...]       # make repeat TIMES=3 TESTS=tests/kernel

Runs alternate between three conditions: unchanged, on one processor, and beside four busy loops. WHAT is passed to
pytest; without it, all tests run, as in `make test`. The output of each run is kept.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

ROOT = Path(__file__).parents[1]
COUNTED = ("passed", "failed", "skipped")


@contextlib.contextmanager
def one_processor() -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def busy_loops() -> Iterator[None]:
    forever = ["sh", "-c", f"while kill -0 {os.getpid()}; do :; done"]  # ends with this process at the latest
    loops = [subprocess.Popen(forever, stderr=subprocess.DEVNULL) for _ in range(4)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


CONDITIONS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "as they are": contextlib.nullcontext,
    "on one processor": one_processor,
    "beside four busy loops": busy_loops,
}


def counts(output: str) -> Counter[str]:
    """Count the tests by outcome, from the last line of each pytest run; an error counts as a failure."""
    found: Counter[str] = Counter()
    for line in re.findall(r"^(?:=+ )?(\d+ [a-z]+(?:, \d+ [a-z]+)*) in \d", output, re.M):
        for number, word in re.findall(r"(\d+) ([a-z]+)", line):
            found["failed" if word.startswith("error") else word] += int(number)
    return found


def failures(output: str) -> list[str]:
    """Return the failures that pytest lists at the end."""
    return re.findall(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", output, re.M)


def main() -> int:
    parser = argparse.ArgumentParser(prog=".venv/bin/python -m tests.repeat", description=__doc__.partition("\n")[0])
    parser.add_argument("--times", type=int, default=len(CONDITIONS), metavar="N")
    parser.add_argument("what", nargs="*", metavar="WHAT", help="paths and options for pytest, after a --")
    arguments = parser.parse_args()
    command = [sys.executable, "-m", "pytest", *arguments.what] if arguments.what else ["tests/all"]
    logs = Path(tempfile.mkdtemp(prefix="penroot-repeat-"))
    print(f"output of the runs: {logs}\n\n| run | how | {' | '.join(COUNTED)} | exit status | seconds |\n|{'---|' * 7}")
    failed: Counter[str] = Counter()
    bad = 0
    for number in range(1, arguments.times + 1):
        condition = list(CONDITIONS)[(number - 1) % len(CONDITIONS)]
        began = time.monotonic()
        log = logs / f"{number}.log"
        with log.open("w") as file, CONDITIONS[condition]():
            status = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=file, stderr=file).returncode
        output = log.read_text(errors="replace")
        outcomes = counts(output)
        cells = (number, condition, *(outcomes[word] for word in COUNTED), status, f"{time.monotonic() - began:.0f}")
        print(f"| {' | '.join(map(str, cells))} |", flush=True)
        failed.update({f"{name}, {condition}" for name in failures(output)})
        bad += status != 0
    print("", *(f"{times} of {arguments.times}: {name}" for name, times in failed.most_common()), sep="\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
