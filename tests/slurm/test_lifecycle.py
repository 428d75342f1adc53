"""A part of a step is killed, cancelled, or runs out of time: the other parts go on, and nothing is left."""

from __future__ import annotations

import random
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.slurm.lab import Lab
from tests.slurm.steps import (
    HELPER,
    IMAGE,
    ON_N1,
    assert_nothing_left,
    configured,
    end,
    expect,
    kill_helper,
    let_time_be_over,
    on_node,
    sh,
    srun,
)
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left")

SERVER = "[s]quashfuse"
# Slurm cannot bind more tasks than the machine has processors.
EIGHT = ("-n8", "--cpu-bind=none")


@pytest.fixture(scope="module")
def file(lab: Lab) -> Iterator[str]:
    srun(lab, IMAGE, "--container-save=life.sqsh", "true")
    yield "--container-image=./life.sqsh"
    lab.run(["rm", "life.sqsh"])


@pytest.fixture(scope="module")
def overtime(four: Lab, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    """Start a step on the cluster ``four``, and let its time limit pass. Slurm notices within half a minute."""
    srun(four, IMAGE, "--container-save=over.sqsh", "true")
    seconds = 10 if request.config.option.soak else 1
    with saving(four, "--container-image=./over.sqsh", seconds, "--time=1") as step:
        let_time_be_over(four)
        yield step
    four.run(["rm", "over.sqsh"])
    assert_nothing_left(four)


@pytest.mark.parametrize("writable", ["--container-readonly", "--container-writable"])
def test_signals_to_all_processes_reach_the_programs(lab: Lab, file: str, writable: str) -> None:
    """The helper and the server ignore signals that are meant for the programs.

    If cgroup.conf has SignalChildrenProcesses, scancel --signal signals all processes since Slurm 23.11:
    proctrack_p_signal.
    """
    script = "echo up; read line; cat /etc/lab-release > /dev/null && echo on"
    step = lab.popen(["srun", *ON_N1, file, writable, *sh(script)])
    expect(step, "up")
    loop = f"for p in $(pgrep -f {HELPER}) $(pgrep -f {SERVER}); do"
    assert len(on_node(lab, f"{loop} echo $p; done").split()) == 2
    # All signals except KILL, STOP, and those that the C library reserves.
    on_node(lab, f"{loop} for s in $(seq 1 64); do case $s in 9|19|32|33) ;; *) kill -$s $p ;; esac; done; done")
    out, err = end(step)
    assert (step.returncode, out) == (0, "on\n"), err


@pytest.mark.usefixtures("overtime")  # its job runs during these tests, and is tested below
@pytest.mark.parametrize("seconds", [0.02, 0.06, 0.1, 0.15, 0.25])
def test_helper_killed_while_eight_tasks_start(lab: Lab, seconds: float) -> None:
    step = lab.popen(["srun", *ON_N1, *EIGHT, IMAGE, *sh("echo done")])
    time.sleep(seconds)
    on_node(lab, f"pkill -KILL -f {HELPER}")
    out, err = end(step)
    # Tasks that had joined the container keep running. The other tasks end with one line.
    assert "Traceback" not in err
    assert out.count("done") == 8 or step.returncode != 0


# While the gate is closed, this entrypoint waits: the container is being set up, and no task has joined.
GATE = """
cat > /etc/rc <<'END'
#!/bin/sh
until [ -e /gate/open ]; do sleep 0.05 || exit 1; done
exec "$@"
END
rm -f /etc/rc.local
"""
# The tasks of the step belong to the user, and are called slurmstepd until they execute their program.
WAITING = "pgrep -u alice -x slurmstepd"
# The task that started the helper waits for the helper's answer in poll(2), call 7. Other tasks wait in fcntl(2), 72.
FIRST = f"for p in $({WAITING}); do grep -q '^7 ' /proc/$p/syscall && echo $p; done"
CALLS = f"for p in $({WAITING}); do cut -d' ' -f1 /proc/$p/syscall; done | sort"


def all_wait(lab: Lab, tasks: int) -> None:
    """Wait until one task is in poll(2), and the others in fcntl(2). Before that, several may be in poll(2)."""
    until(lambda: on_node(lab, CALLS).split() == ["7"] + ["72"] * (tasks - 1), f"{tasks} tasks wait")


@pytest.fixture(scope="module")
def gated(lab: Lab) -> Iterator[tuple[str, ...]]:
    srun(lab, IMAGE, "--container-save=gated.sqsh", "--container-writable", *sh(GATE))
    lab.run("mkdir -p gate")
    yield "--container-image=./gated.sqsh", "--container-entrypoint", "--container-mounts=./gate:/gate"
    lab.run("rm -r gated.sqsh gate")


@pytest.fixture
def eight(lab: Lab, gated: tuple[str, ...]) -> Iterator[subprocess.Popen[str]]:
    """Yield eight tasks while their container is being set up."""
    script = "echo up; read line; cat /usr/bin/* > /dev/null && echo done"
    step = lab.popen(["srun", *ON_N1, *EIGHT, *gated, *sh(script)])
    all_wait(lab, 8)
    until(lambda: on_node(lab, f"pgrep -f {SERVER}"), "the image is mounted")
    until(lambda: on_node(lab, "pgrep -u alice -f /etc/[r]c"), "the entrypoint waits at the gate")
    yield step
    on_node(lab, "pkill -CONT -u alice")
    open_gate(lab)
    step.communicate(timeout=300)
    lab.run("rm -f gate/open")


def open_gate(lab: Lab) -> None:
    lab.run("touch gate/open")


VICTIMS = {"helper": f"pkill -KILL -o -f {HELPER}", "server": f"pkill -KILL -f {SERVER}"}


@pytest.mark.parity("no task hangs if a helper process, squashfuse or a task is killed")
@pytest.mark.parametrize("victim", VICTIMS)
def test_kill_before_the_tasks_join_is_reported_once(lab: Lab, eight: subprocess.Popen[str], victim: str) -> None:
    on_node(lab, VICTIMS[victim])
    open_gate(lab)
    out, err = end(eight)
    assert eight.returncode != 0
    assert out == ""
    assert "Traceback" not in err
    why = {
        "helper": "the helper process of the container ended without an answer: killed?",
        "server": "the entrypoint of the image ended",
    }
    assert err.count(why[victim]) == 1, err


@pytest.mark.parity("no task hangs if a helper process, squashfuse or a task is killed")
def test_the_first_task_is_killed_before_it_joins(lab: Lab, eight: subprocess.Popen[str]) -> None:
    on_node(lab, f"kill -KILL $({FIRST})")
    open_gate(lab)  # another task takes over
    out, err = end(eight)
    assert out.count("done") == 7, err
    assert eight.returncode != 0


def test_tasks_name_a_stopped_first_task_and_give_up(lab: Lab, eight: subprocess.Popen[str]) -> None:
    first = on_node(lab, FIRST).strip()
    on_node(lab, f"kill -STOP {first}")
    began = time.monotonic()
    until(lambda: len(on_node(lab, WAITING).split()) <= 1, "the others have given up", 40)
    assert 6 < time.monotonic() - began < 30
    on_node(lab, f"kill -KILL {first}")
    _, err = end(eight)
    assert eight.returncode != 0
    assert (
        err.count(f"waiting for process {first}, the task that starts the container on this node: it is stopped") == 1
    )
    assert err.count(f"process {first}, the task that starts the container on this node, is stopped") == 1


def test_tasks_wait_for_a_first_task_that_goes_on(lab: Lab, eight: subprocess.Popen[str]) -> None:
    first = on_node(lab, FIRST).strip()
    on_node(lab, f"kill -STOP {first}; sleep 5; kill -CONT {first}")
    open_gate(lab)
    out, err = end(eight)
    assert (eight.returncode, out.count("done")) == (0, 8), err


@pytest.mark.parity("no task hangs if a helper process, squashfuse or a task is killed")
@pytest.mark.parametrize("victim", ["helper", "server", "task"])
def test_kill_while_some_tasks_join_late(lab: Lab, eight: subprocess.Popen[str], victim: str) -> None:
    late = f"$({WAITING} | tail -3)"
    first = on_node(lab, FIRST).strip()
    on_node(lab, f"for p in {late}; do [ $p = {first} ] || kill -STOP $p; done")
    open_gate(lab)
    expect(eight, "up")
    on_node(lab, VICTIMS.get(victim, f"kill -KILL {first}"))
    on_node(lab, "pkill -CONT -u alice")
    out, err = end(eight)
    assert eight.returncode != 0
    assert "Traceback" not in err
    if victim == "task":
        assert out.count("done") == 7, err  # the late tasks have joined, too
    if victim == "helper":
        assert out.count("done") >= 1, err
        assert out.count("done") == 8 or "the helper process of the container is gone" in err


@pytest.mark.parity("no task hangs if a helper process, squashfuse or a task is killed")
@pytest.mark.parametrize("victim", ["helper", "server", "task"])
def test_kill_after_all_tasks_have_joined(lab: Lab, eight: subprocess.Popen[str], victim: str) -> None:
    first = on_node(lab, FIRST).strip()
    open_gate(lab)
    expect(eight, *["up"] * 8)
    on_node(lab, VICTIMS.get(victim, f"kill -KILL {first}"))
    out, err = end(eight)
    assert out.count("done") == {"helper": 8, "server": 0, "task": 7}[victim], err
    assert (eight.returncode == 0) == (victim == "helper"), err


@pytest.mark.parity("unfinished images and containers of a killed step")
def test_an_import_that_is_killed_leaves_nothing_in_the_store(lab: Lab) -> None:
    lab.run(["penroot", "cache", "prune"], node="n1")
    step = lab.popen(["srun", *ON_N1, "--container-image=registry:5000#mpi:1", "true"])
    # An unfinished image is in tmp/ of the store.
    on_node(lab, f"until ls /var/tmp/enroot-cache-2001/tmp/*; do :; done; pkill -KILL -f {HELPER}")
    _, err = end(step)
    assert step.returncode != 0
    assert "the helper process of the container ended without an answer: killed?" in err


@pytest.mark.parity("unfinished images and containers of a killed step")
def test_unfinished_container_of_a_killed_helper_is_removed(lab: Lab) -> None:
    directory = "/var/tmp/enroot-data-2001"
    step = lab.popen(["srun", *ON_N1, IMAGE, "--container-writable", *sh("echo up; read line")])
    expect(step, "up")
    # Leftovers of a process that was killed before it named the container (.making), or after it unnamed it (.trash).
    name = lab.run(["ls", directory], node="n1").stdout.strip()
    node = lab.run(["uname", "-n"], node="n1").stdout.strip()
    left, busy = (f".{name}.{node}.9-0.making", f".{name}.{node}.9-1.trash"), f".pyxis_9.0.{node}.9-2.making"
    lab.run(f"cd {directory} && mkdir -p {left[0]}/upper {left[1]}/upper {busy}", node="n1")
    other = lab.popen(["flock", f"{directory}/{busy}", *sh("echo held; read line")], node="n1")
    expect(other, "held")
    kill_helper(lab)
    end(step)
    until(lambda: not lab.run(["squeue", "-h"]).stdout, "the job has ended")
    now = lab.run(f"ls -A {directory}; rmdir {directory}/{busy}", node="n1").stdout
    end(other)
    assert name not in now
    assert busy in now  # because a process holds its lock


def test_the_first_task_ends_before_the_others(lab: Lab, file: str) -> None:
    """The other tasks can still read files of the image."""
    gone = "until [ -s /tmp/first ] && ! kill -0 $(cat /tmp/first); do sleep 0.1; done 2>/dev/null"
    script = f"[ $SLURM_LOCALID = 0 ] && {{ echo $$ > /tmp/first; exit 0; }}; {gone}"
    assert srun(lab, file, "-n3", *sh(f"{script}; cat /usr/bin/* > /dev/null && echo read")) == "read\nread\n"


@contextmanager
def saving(lab: Lab, file: str, seconds: int, *options: str) -> Iterator[subprocess.Popen[str]]:
    """Run a step that reads its files for ``seconds`` seconds after SIGTERM."""
    # dd drops the pages from the cache, so the server must read them again.
    read = "for f in /usr/bin/*; do dd if=$f of=/dev/null iflag=nocache || exit 1; done 2>/dev/null"
    save = f"e=$(($(date +%s) + {seconds})); while [ $(date +%s) -lt $e ]; do {read}; done; echo saved; exit 0"
    # Slurm sends SIGKILL after KillWait, and the machine may be slow.
    with configured(lab, "KillWait=3", "KillWait=60"):
        step = lab.popen(["srun", *ON_N1, *options, file, *sh(f"trap '{save}' TERM; echo up; sleep 600 & wait")])
        expect(step, "up")
        yield step
        step.communicate(timeout=300)


@pytest.mark.parity("after the SIGTERM of scancel or a time limit, a program can still use its files")
@pytest.mark.soak
def test_files_stay_readable_after_sigterm(lab: Lab, file: str, soak: bool) -> None:
    """A program that writes a checkpoint at the end can read its files."""
    with saving(lab, file, 10 if soak else 1) as step:
        lab.run(["scancel", "--user=alice"])
        out, err = end(step)
        assert "saved" in out, err


CHILDREN = "read -r children < /proc/$$/task/$$/children; echo children: $children"  # children of the shell only


@pytest.mark.parity("the program has no children that it did not start")
def test_wait_sees_no_child_but_its_own(lab: Lab) -> None:
    assert srun(lab, "-n2", IMAGE, *sh(f"wait; {CHILDREN}")) == "children:\n" * 2


@pytest.mark.parity("srun --pty: the program has a terminal")
def test_a_terminal(lab: Lab) -> None:
    inside = f"test -t 0 && echo terminal; wait; {CHILDREN}"
    command = f"srun -w n1 --overlap --pty {IMAGE} sh -c '{inside}'"
    # Keep stdin of script(1) open: at end of file, it types a character, which the terminal may show.
    with lab.popen(["script", "-qec", command, "/dev/null"]) as process:
        assert process.stdout
        out = process.stdout.read().replace("\r", "").splitlines()
    assert out[-2:] == ["terminal", "children:"]


# With debug2, slurmstepd logs what it does at the end of a step.
DEBUG = ("SlurmdDebug=verbose", "SlurmdDebug=debug2")


@pytest.mark.parity("at the end of a step, srun does not wait for processes of penroot")
def test_slurmstepd_finds_nothing_alive_after_the_last_task(lab: Lab, file: str) -> None:
    # slurmstepd would kill a remaining process, and sleep for a second before it checks again. srun would return later.
    with open(f"{lab.root}/nodes/n1/var/log/slurmd.log") as lines, configured(lab, *DEBUG):
        lines.seek(0, 2)
        srun(lab, file, "-n2", "true")
        srun(lab, IMAGE, "--container-writable", "true")
        assert_nothing_left(lab, "n1")
        text = ""

        def ended() -> bool:  # the wording changed in Slurm 23.11
            nonlocal text
            text += lines.read()
            return len(re.findall("done with (?:job|step)$", text, re.M)) == 2

        until(ended, "slurmstepd has logged the end of both steps")
    assert "proctrack_p_signal: killing process" not in text


@pytest.mark.parity("after the SIGTERM of scancel or a time limit, a program can still use its files")
@pytest.mark.soak
def test_a_program_whose_time_is_over_can_read_its_files(overtime: subprocess.Popen[str]) -> None:
    out, err = end(overtime)
    assert "saved" in out, err


@pytest.mark.parity("many steps at once", "an unnamed container is removed at the end of its step")
@pytest.mark.soak
def test_soak(lab: Lab, soak: bool, rng: random.Random) -> None:
    """Run many steps, several at the same time. Cancel some at random moments; all others exit 0."""
    count, at_once, cancelled = (200, 50, 30) if soak else (20, 10, 4)
    doomed = set(rng.sample(range(count), cancelled))
    running: list[tuple[int, subprocess.Popen[str]]] = []

    def end_first() -> None:
        number, step = running.pop(0)
        _, err = step.communicate(timeout=600)
        assert number in doomed or step.returncode == 0, err

    for i in range(count):
        running.append((i, lab.popen(["srun", "-N1", "--overlap", f"--job-name=soak{i}", IMAGE, *sh("sleep 0.2")])))
        if i in doomed:
            time.sleep(rng.random() * 0.5)
            lab.run(["scancel", f"--name=soak{i}"])
        if len(running) >= at_once:
            end_first()
    while running:
        end_first()
