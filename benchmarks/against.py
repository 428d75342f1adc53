"""Compare starts and steps of this penroot with another penroot on this machine, such as an earlier build."""

from __future__ import annotations

import statistics

from benchmarks.start import measure_as_user, ordinary_user
from benchmarks.tables import PREFIX, Row, judge, p10
from benchmarks.timing import measure
from tests.slurm.lab import Lab

IMAGE = "--container-image=registry:5000#mpi:1"


def bench_against(rounds: int, other: str, budget: float = 1.02) -> bool:
    """Measure PREFIX and the prefix ``other`` in turn. The ratios are PREFIX / ``other``."""
    rows = {"start NAME": ["box"], "start --root NAME": ["--root", "box"], "start x.sqsh": []}
    with ordinary_user() as user:
        rows["start x.sqsh"].append(str(user.home / "box.sqsh"))
        commands = [
            Row(f"{name} of {prefix}", [f"{prefix}/bin/penroot", "start", *words, "true"])
            for name, words in rows.items()
            for prefix in (PREFIX, other)
        ]
        times = measure_as_user(user, commands, rounds)
    labs = {prefix: Lab(f"{Lab().root}-{number}") for number, prefix in enumerate((PREFIX, other))}
    try:
        steps = {}
        for prefix, lab in labs.items():
            lab.up(1, prefix=prefix)
            lab.run(["srun", IMAGE, "--container-name=bench", "true"])
            steps[f"step, named of {prefix}"] = lab.command(["srun", "--container-name=bench", "true"])
            steps[f"step, stored of {prefix}"] = lab.command(["srun", IMAGE, "true"])
        times.update(measure(steps, rounds // 4))
    finally:
        for lab in labs.values():
            lab.down()
    print(f"\n{PREFIX} next to {other}\n{'':24} {'p10 ms':>8} {'other':>8} {'p10':>7} {'paired':>7}")
    good = True
    for name in (*rows, "step, named", "step, stored"):
        ours, theirs = times[f"{name} of {PREFIX}"], times[f"{name} of {other}"]
        paired = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
        low, before = p10(ours), p10(theirs)
        within, verdict = judge(min(paired, low / before), budget)
        good &= within
        print(f"{name:24} {low * 1000:8.1f} {before * 1000:8.1f} {low / before:6.3f}x {paired:6.3f}x  {verdict}")
    return good
