"""Time commands in random order in each round, so that other work of the machine affects all commands equally.

As a program, it reads {"rounds": N, "commands": {name: argv}} from stdin and writes {name: [seconds]}, so it can run as
any user, on any node. NAME=value before a program sets a variable.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time


def measure(commands: dict[str, list[str]], rounds: int) -> dict[str, list[float]]:
    """Return the wall seconds of each run of each command. Drop all output. Raises RuntimeError if a command fails."""
    null = os.open(os.devnull, os.O_RDWR)
    actions = [(os.POSIX_SPAWN_DUP2, null, fd) for fd in (0, 1, 2)]
    split = {name: _variables(words) for name, words in commands.items()}
    times: dict[str, list[float]] = {name: [] for name in commands}
    for round_ in range(rounds + 2):
        order = list(commands)
        random.shuffle(order)
        for name in order:
            environ, argv = split[name]
            started = time.perf_counter()
            pid = os.posix_spawnp(argv[0], argv, environ, file_actions=actions)
            _, status = os.waitpid(pid, 0)
            seconds = time.perf_counter() - started
            if status:
                raise RuntimeError(f"{name}: {' '.join(argv)}: exit status {os.waitstatus_to_exitcode(status)}")
            if round_ > 1:  # the first rounds warm the caches
                times[name].append(seconds)
    return times


def _variables(words: list[str]) -> tuple[dict[str, str], list[str]]:
    environ = dict(os.environ)
    while "=" in words[0]:
        name, _, value = words[0].partition("=")
        environ[name] = value
        words = words[1:]
    return environ, words


if __name__ == "__main__":
    parameters = json.load(sys.stdin)
    json.dump(measure(parameters["commands"], parameters["rounds"]), sys.stdout)
