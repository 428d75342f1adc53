"""Measure the time that a container adds to a step, and the time that the plugin adds to a step without a container."""

from __future__ import annotations

import json
import pathlib
import statistics
import subprocess
import tempfile

from benchmarks.tables import PREFIX, PYTHON, Row, judge, median_difference, print_added, table, timing_program
from tests.installation import LIBRARY
from tests.slurm.lab import Lab

MAX_ADDED_S = 0.150  # the most that a container may add to a step
MAX_UNUSED_S = 0.3e-3  # the most that the plugin may add to a step without a container
PLUGIN = pathlib.Path(__file__).with_name("plugin.py")
REFERENCE = "registry:5000#mpi:1"
# At the end of a step slurmstepd leaves its cgroups. This takes some milliseconds, because the kernel's
# percpu_down_write() waits for an RCU grace period. There is no wait if a process has entered a cgroup just before, as
# in a step whose program ends at once. With such a program, a plain step would not wait, and the container would seem
# to cost the wait.
PROGRAM = ["sleep", "0.05"]


def bench_step(rounds: int) -> bool:
    """Measure steps on one node, compared with a plain srun."""
    lab = Lab()
    was_up = lab.is_up()
    lab.up(2, prefix=PREFIX)
    try:
        return container(lab, rounds) & unused_plugin(lab, 2 * rounds)
    finally:
        if not was_up:
            lab.down()


def container(lab: Lab, rounds: int) -> bool:
    try:
        for node in lab.nodes:
            lab.run(["srun", "-w", node, f"--container-image={REFERENCE}", "--container-name=bench", "true"])
        fill = "dd if=/dev/urandom of=/fill bs=1M count=60 2>/dev/null"
        lab.run(f"penroot create -f -n big docker://{REFERENCE} && penroot start --rw big sh -c '{fill}'", node="n1")
        lab.run("penroot export -f -o big.sqsh big && penroot remove -f big", node="n1")
        size = int(lab.run("stat -c %s big.sqsh").stdout) / 1e6
        srun, many = ["srun", "-w", "n1"], ["-n16", "--overcommit"]
        image = f"--container-image={REFERENCE}"
        rows = [
            Row("srun", [*srun, *PROGRAM]),
            Row("srun -n16", [*srun, *many, *PROGRAM]),
            Row("named and stored", [*srun, "--container-name=bench", *PROGRAM]),
            Row("REF, stored", [*srun, image, *PROGRAM]),
            Row("REF, stored, 16 tasks", [*srun, *many, image, *PROGRAM]),
            Row(f"./x.sqsh of {size:.0f} MB", [*srun, "--container-image=./big.sqsh", *PROGRAM]),
            Row("python3 -IS -c pass", PYTHON),
        ]
        commands = {row.name: row.command for row in rows if row.command}
        done = lab.run(["/usr/bin/python3", "-"], input=timing_program(commands, rounds), timeout=900)
    finally:
        for node in lab.nodes:
            lab.run(["penroot", "remove", "-f", "pyxis_bench"], node=node, check=False)
        lab.run(["rm", "-f", "big.sqsh"])
    times: dict[str, list[float]] = json.loads(done.stdout)
    table(f"A step of {' '.join(PROGRAM)}, as an ordinary user", rows, times, rows[0].name)
    plain, many_plain = rows[0].name, rows[1].name
    compared = [("named and stored", plain, 4.0), (rows[3].name, plain, 5.0), (rows[5].name, plain, 5.5)]
    good = print_added("over plain srun", times, times[rows[-1].name], [*compared, (rows[4].name, many_plain, None)])
    slow = [name for name, *_ in compared if median_difference(times, name, plain) > MAX_ADDED_S]
    one, sixteen = (median_difference(times, rows[i + 3].name, rows[i].name) for i in (0, 1))
    within, verdict = judge(sixteen / one, 1.3)
    print(f"{'16 tasks over one task':44} {sixteen / one:25.2f}x  {verdict}")
    for name in slow:
        print(f"{name} adds more than {MAX_ADDED_S * 1000:.0f} ms")
    return good and within and not slow


def unused_plugin(lab: Lab, rounds: int) -> bool:
    """Measure the plugin in steps without a container.

    The budget applies to the calls of srun and slurmstepd, each in a new process. Whole steps with and without the
    plugin are shown, too, but their difference is smaller than the variance of Slurm's own work.
    """
    added_by_calls = statistics.median(calls_of_plugin(100 * rounds))
    good, verdict = judge(added_by_calls * 1000, MAX_UNUSED_S * 1000, " ms")
    print(f"\n{'a step without a container':44} {'plain ms':>9} {'added':>6}  budget")
    print(f"{'loading the plugin and its calls':44} {'':9} {added_by_calls * 1000:6.2f}  {verdict}")
    times = by_turns(lab, rounds)
    for kind in ("processor", "wall"):
        without, with_plugin = times["without"][kind], times["with"][kind]
        differences = [b - a for a, b in zip(without, with_plugin, strict=True)]
        # The standard error of a median, if the differences have a normal distribution.
        error = 1.25 * statistics.pstdev(differences) / len(differences) ** 0.5
        print(
            f"{'srun true, ' + kind + ' time':44} {statistics.median(without) * 1000:9.2f} "
            f"{statistics.median(differences) * 1000:6.2f}  +- {error * 1000:.2f}"
        )
    return good


def calls_of_plugin(rounds: int) -> list[float]:
    """Return the seconds that srun and slurmstepd spend on the plugin in a step without a container, for each round."""
    with tempfile.TemporaryDirectory() as directory:
        binary = f"{directory}/plugin"
        subprocess.run(["gcc", "-O2", "-rdynamic", "-o", binary, PLUGIN.with_suffix(".c"), "-ldl"], check=True)
        command = [binary, str(rounds), f"{LIBRARY}/spank_pyxis.so"]
        lines = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
    return [sum(map(int, line.split())) / 1e9 for line in lines]


def by_turns(lab: Lab, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Measure plain steps "with" and "without" the plugin: "processor" time of Slurm on the node, and "wall" time."""
    conf = pathlib.Path(lab.root, "etc/slurm/plugstack.conf.d/pyxis.conf")
    line = conf.read_text()
    parameters = json.dumps({"rounds": rounds, "conf": "/etc/slurm/plugstack.conf.d/pyxis.conf", "line": line})
    source = PLUGIN.read_text().replace("json.load(sys.stdin)", f"json.loads({json.dumps(parameters)})")
    try:
        done = lab.run(["/usr/bin/python3", "-"], input=source, user="root", node="n1", timeout=900)
    finally:
        conf.write_text(line)
    times: dict[str, dict[str, list[float]]] = json.loads(done.stdout)
    return times
