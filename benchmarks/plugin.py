"""Measure plain steps with and without the plugin in turn. Runs as root on a lab node, to change its plugstack.conf.

Reads {"rounds": N, "conf": file, "line": content of the file with the plugin} from stdin and writes
{"with"|"without": {"processor"|"wall": [seconds]}}. Processor time is the time of the node's cgroup: srun, slurmd and
slurmstepd.
"""

from __future__ import annotations

import json
import os
import pwd
import random
import subprocess
import sys
import time

V1, V2 = "/sys/fs/cgroup/cpuacct/cpuacct.usage", "/sys/fs/cgroup/cpu.stat"
SETTLING_S = 0.02  # slurmstepd ends within this time after srun


def processor() -> float:
    """Return the seconds of processor time of this node so far."""
    if os.path.exists(V1):
        with open(V1) as f:
            return int(f.read()) / 1e9
    with open(V2) as f:
        return int(f.readline().split()[1]) / 1e6


def measure(rounds: int, conf: str, line: str) -> dict[str, dict[str, list[float]]]:
    account = pwd.getpwnam("alice")
    srun = ["srun", "-w", os.uname().nodename, "true"]
    alice = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": [account.pw_gid]}
    times: dict[str, dict[str, list[float]]] = {name: {"processor": [], "wall": []} for name in ("with", "without")}
    for round_ in range(rounds + 3):
        for name in random.sample(("with", "without"), 2):
            with open(conf, "w") as f:
                f.write(line if name == "with" else "")
            before, started = processor(), time.perf_counter()
            subprocess.run(srun, check=True, cwd="/", stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, **alice)  # type: ignore[call-overload]
            wall = time.perf_counter() - started
            time.sleep(SETTLING_S)
            if round_ > 2:
                times[name]["wall"].append(wall)
                times[name]["processor"].append(processor() - before)
    return times


if __name__ == "__main__":
    parameters = json.load(sys.stdin)
    json.dump(measure(parameters["rounds"], parameters["conf"], parameters["line"]), sys.stdout)
