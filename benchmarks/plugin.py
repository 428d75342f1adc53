"""Plain steps with the plugin and without, by turns, as root of a lab's node, which says what the plugins are.

Reads {"rounds": N, "conf": file, "line": its content with the plugin} from
stdin and writes {"with"|"without": {"processor"|"wall": [seconds]}}. Processor
time is that of the node's cgroup: srun, slurmd and slurmstepd.
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
SETTLED = 0.02  # seconds after srun in which slurmstepd ends too


def processor() -> float:
    """Seconds of processor time of this node until now."""
    if os.path.exists(V1):
        with open(V1) as f:
            return int(f.read()) / 1e9
    with open(V2) as f:
        return int(f.readline().split()[1]) / 1e6


def measure(rounds: int, conf: str, line: str) -> dict[str, dict[str, list[float]]]:
    account = pwd.getpwnam("alice")
    srun = ["srun", "-w", os.uname().nodename, "true"]
    who = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": [account.pw_gid]}
    taken: dict[str, dict[str, list[float]]] = {name: {"processor": [], "wall": []} for name in ("with", "without")}
    for round_ in range(rounds + 3):
        for name in random.sample(("with", "without"), 2):
            with open(conf, "w") as f:
                f.write(line if name == "with" else "")
            used, begin = processor(), time.perf_counter()
            subprocess.run(srun, check=True, cwd="/", stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, **who)  # type: ignore[call-overload]
            took = time.perf_counter() - begin
            time.sleep(SETTLED)
            if round_ > 2:
                taken[name]["wall"].append(took)
                taken[name]["processor"].append(processor() - used)
    return taken


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    json.dump(measure(asked["rounds"], asked["conf"], asked["line"]), sys.stdout)
