"""Functions that the tests of container steps share."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from tests.slurm.lab import CommandFailed, Lab
from tests.waiting import until

MINIMAL = "registry:5000#minimal:1"
IMAGE = f"--container-image={MINIMAL}"
ON_N1 = ("-w", "n1", "--overlap")
HELPER = "[p]yxis_py.helper"  # a pattern of pgrep(1)
PMIX = pytest.mark.usefixtures("pmix")  # for tests of srun --mpi=pmix, which not every Slurm has


def srun(lab: Lab, *arguments: str, env: dict[str, str] | None = None, cwd: str | None = None) -> str:
    """Run srun, which must succeed, on n1 (and on other nodes if more are requested). Return its stdout."""
    return lab.run(["srun", *ON_N1, *arguments], env=env, cwd=cwd).stdout


def refused(lab: Lab, *arguments: str, env: dict[str, str] | None = None) -> str:
    """Run srun, which must fail without a traceback, and return its stderr."""
    done = lab.run(["srun", *ON_N1, *arguments], check=False, env=env)
    assert done.returncode != 0, done.stdout
    assert "Traceback" not in done.stderr, done.stderr
    return done.stderr


def sbatch(lab: Lab, *arguments: str, check: bool = True, **where: Any) -> subprocess.CompletedProcess[str]:
    """Run a batch job to its end. sbatch --wait would poll after two seconds, and then after eight more."""
    done = lab.run(["sbatch", "--parsable", *arguments], check=check, **where)
    if done.returncode != 0:
        return done
    jobs: list[str] = []

    def ended() -> bool:
        jobs[:] = lab.run(["scontrol", "--oneliner", "show", "job", done.stdout.strip()]).stdout.splitlines()
        return not any(re.search("JobState=(PENDING|CONFIGURING|RUNNING|COMPLETING) ", job) for job in jobs)

    until(ended, f"the end of batch job {done.stdout.strip()}", 250)
    done.returncode = max(int(status) for job in jobs for status in re.findall(r" ExitCode=(\d+):", job))
    if check and done.returncode != 0:
        raise CommandFailed(done.returncode, arguments, done.stdout, done.stderr)
    return done


def sh(script: str) -> Sequence[str]:
    return ("sh", "-c", script)


def on_node(lab: Lab, script: str, user: str = "root") -> str:
    """Run commands on n1 and return their stdout, even if they fail."""
    return lab.run(script, node="n1", user=user, check=False).stdout


@contextmanager
def plugin_argument(lab: Lab, argument: str) -> Iterator[None]:
    """Add an argument to the plugin's line in plugstack.conf for all steps while the block runs."""
    line = pathlib.Path(lab.root, "etc/slurm/plugstack.conf.d/pyxis.conf").read_text().strip()
    lab.install_plugin(f"{line} {argument}")
    try:
        yield
    finally:
        lab.install_plugin(line)


@contextmanager
def configured(lab: Lab, was: str, now: str) -> Iterator[None]:
    """Replace the text ``was`` by ``now`` in slurm.conf while the block runs."""
    text = pathlib.Path(lab.root, "etc/slurm/slurm.conf").read_text()
    assert was in text
    lab.configure("slurm.conf", text.replace(was, now))
    lab.reconfigure()
    try:
        yield
    finally:
        lab.configure("slurm.conf", text)
        lab.reconfigure()


def let_time_be_over(lab: Lab) -> None:
    """Set the end of the only job to now. Slurm refuses a time in the past, and "now" may have just passed: retry."""
    command = "scontrol update JobId=$(squeue -h -o %i) EndTime=now"
    until(lambda: lab.run(command, user="root", check=False).returncode == 0, "Slurm accepts the end time")


def kill_helper(lab: Lab) -> None:
    """Kill the helpers on n1, and wait for their end: on a busy machine, a dying helper may still answer."""
    on_node(lab, f"pkill -KILL -f {HELPER}; while pgrep -f {HELPER}; do sleep 0.02; done")


def clear(lab: Lab, more: str = "true") -> None:
    """Run the command ``more`` on n1, remove alice's containers there, and check that nothing else is left."""
    lab.run(f"{more}; penroot list | xargs -r penroot remove -f", node="n1", check=False)
    assert_nothing_left(lab, "n1")


def assert_nothing_left(lab: Lab, *nodes: str) -> None:
    """Fail this test, but no later test, if jobs have left something on ``nodes`` (default: all nodes)."""
    deadline = time.monotonic() + 120  # seconds for all nodes: less than a test's time limit
    left = [
        (node, line)
        for node in nodes or lab.nodes
        for line in lab.residue(node, settle=max(0.0, deadline - time.monotonic()))
    ]
    for node in {node for node, _ in left}:
        lab.clear(node)
    assert not left, "\n".join(f"{node}: {line}" for node, line in left)


def next_line(process: subprocess.Popen[str]) -> str:
    """Read one line of a process and no byte more: communicate() would miss data in the file's buffer."""
    assert process.stdout is not None
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(process.stdout.fileno(), 1)):
        line += byte
    return line.decode()


def expect(step: subprocess.Popen[str], *lines: str) -> None:
    """Wait until a step has written these lines."""
    timeout = threading.Timer(300, os.killpg, (step.pid, signal.SIGKILL))
    timeout.start()
    try:
        for line in lines:
            assert next_line(step) == f"{line}\n"
    finally:
        timeout.cancel()


def end(step: subprocess.Popen[str], line: str = "go\n") -> tuple[str, str]:
    """Send a step the line that it waits for, and return the rest of its stdout and stderr."""
    return step.communicate(line, timeout=300)
