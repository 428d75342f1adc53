"""A user attacks the processes with which root ends steps and jobs: root never waits long for the user."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator

import pytest

from tests.slurm.lab import Lab
from tests.slurm.steps import (
    HELPER,
    IMAGE,
    ON_N1,
    assert_nothing_left,
    end,
    expect,
    kill_helper,
    let_time_be_over,
    on_node,
    refused,
    sh,
    srun,
)
from tests.waiting import until

# Seconds: longer than any timeout of Slurm and penroot on a busy machine, and shorter than UnkillableStepTimeout, after
# which Slurm gives a step up and drains its node.
PROMPT_S = 50
WRITABLE = (IMAGE, "--container-writable")
# About one byte a microsecond, so that the save takes long.
SLOW = {"ENROOT_SQUASH_OPTIONS": "-comp gzip -throttle 99 -processors 1"}


@pytest.fixture(autouse=True)
def no_residue(lab: Lab) -> Iterator[None]:
    """Check after each test that nothing is left, and that slurmd's log has grown by less than a megabyte."""
    log = f"{lab.root}/nodes/n1/var/log/slurmd.log"
    before = os.path.getsize(log)
    yield
    on_node(lab, "pkill -CONT -u alice; pkill -KILL -u alice -f '[s]leep 1234'")
    lab.run("scancel -u alice; rm -f waits.sqsh")
    gone(lab)
    assert_nothing_left(lab)
    assert os.path.getsize(log) - before < 1_000_000


def jobs(lab: Lab) -> str:
    return lab.run(["squeue", "-h", "-u", "alice", "-o", "%i"]).stdout.strip()


def gone(lab: Lab, seconds: int = PROMPT_S) -> None:
    """Wait until no job remains, not even a completing one, and the node is usable."""
    until(lambda: not jobs(lab), "the job is gone", seconds)
    assert lab.run("sinfo -h -n n1 -o %T").stdout.strip() in ("idle", "mixed")


def start(lab: Lab, *options: str, script: str = "echo up; read line", **how: object) -> subprocess.Popen[str]:
    step = lab.popen(["srun", *ON_N1, *options, *sh(script)], **how)  # type: ignore[arg-type]
    expect(step, "up")
    return step


def stop_all(lab: Lab) -> None:
    """Stop all helper processes of the user again and again, as the user can from anywhere."""
    on_node(lab, f"(while :; do pkill -STOP -f {HELPER}; done) > /dev/null 2>&1 & echo $! > /tmp/stopping", "alice")


def stop_no_more(lab: Lab) -> None:
    on_node(lab, "kill -KILL $(cat /tmp/stopping); rm -f /tmp/stopping; pkill -CONT -u alice", "alice")


@pytest.mark.security("R1")
def test_a_stopped_helper_holds_no_step_that_ends(lab: Lab) -> None:
    """Before the fix, slurmstepd waited for as long as its helper was stopped."""
    step = start(lab, *WRITABLE)
    on_node(lab, f"pkill -STOP -f {HELPER}", "alice")
    began = time.monotonic()
    end(step)
    assert step.returncode == 0
    assert time.monotonic() - began < PROMPT_S
    gone(lab)


@pytest.mark.parametrize(
    ("which", "message"), [("-o", "the helper process of the container is stopped"), ("-n", "stopped")]
)
def test_helper_stopped_during_set_up_ends_the_step(lab: Lab, which: str, message: str) -> None:
    """The oldest process is the helper, for which tasks wait; the newest is its child, for which the helper waits."""
    directory = ".config/enroot/hooks.d"
    hook = f"{directory}/50-wait.sh"
    lab.run(f"mkdir -p {directory}; printf '#!/bin/sh\\ntouch $HOME/waits; sleep 20\\n' > {hook}; chmod +x {hook}")
    step = lab.popen(["srun", *ON_N1, "-n2", IMAGE, "true"])
    try:
        until(lambda: on_node(lab, "ls $HOME/waits 2> /dev/null", "alice"), "the hook runs")
        on_node(lab, f"pkill -STOP {which} -u alice -f {HELPER}", "alice")
        _, errors = step.communicate(timeout=60)
        assert step.returncode != 0 and message in errors, errors
        gone(lab)
    finally:
        lab.run(f"rm -f {hook} waits")


@pytest.mark.security("R1")
@pytest.mark.parametrize("how", ["cancel", pytest.param("time limit", marks=pytest.mark.soak)])
def test_a_stopped_helper_holds_no_job_that_is_ended(lab: Lab, how: str) -> None:
    """The job is cancelled or runs out of time."""
    step = start(lab, *WRITABLE, script="echo up; sleep 1234")
    on_node(lab, f"pkill -STOP -f {HELPER}", "alice")
    if how == "cancel":
        lab.run(["scancel", jobs(lab)])
    else:
        let_time_be_over(lab)
    gone(lab, PROMPT_S + (35 if how == "time limit" else 0))  # slurmctld checks time limits twice a minute
    step.communicate(timeout=300)


@pytest.mark.security("R1")
def test_a_user_who_stops_all_that_is_his_holds_nothing(lab: Lab) -> None:
    """The user also stops the process that finishes the step and the epilog's process, as soon as they exist."""
    step = start(lab, *WRITABLE, script="echo up; sleep 1234")
    stop_all(lab)
    try:
        lab.run(["scancel", jobs(lab)])
        gone(lab)
    finally:
        stop_no_more(lab)
    step.communicate(timeout=300)
    on_node(lab, "penroot list | xargs -r penroot remove -f; rm -rf /run/pyxis/2001/*", "alice")
    # A killed process may have begun to delete: the user's next container completes the deletion.
    lab.run(["srun", *ON_N1, *WRITABLE, "true"])


@pytest.mark.security("R1")
def test_a_job_that_is_cancelled_while_it_is_suspended(lab: Lab) -> None:
    """Slurm suspends the helper together with the job."""
    step = start(lab, *WRITABLE, script="echo up; sleep 1234")
    job = jobs(lab)
    lab.run(["scontrol", "suspend", job], user="root")
    until(lambda: "SUSPENDED" in lab.run(["scontrol", "show", "job", job]).stdout, "the job is suspended")
    lab.run(["scancel", job])
    gone(lab)
    step.communicate(timeout=300)


@pytest.mark.security("R1")
def test_a_lock_that_another_job_holds_keeps_no_step(lab: Lab) -> None:
    """A suspended job's helper may hold the lock of a container's name. Here, flock(1) holds the lock."""
    step = start(lab, *WRITABLE)
    name = on_node(lab, "ls /run/pyxis/2001/running").strip()
    on_node(lab, f"flock /run/pyxis/2001/running/{name} sleep 1234 > /dev/null 2>&1 &", "alice")
    until(lambda: on_node(lab, "pgrep -f '[s]leep 1234'"), "the lock is taken")
    began = time.monotonic()
    end(step)
    assert step.returncode == 0
    assert time.monotonic() - began < PROMPT_S
    gone(lab)


def saving(lab: Lab) -> str:
    return on_node(lab, "pgrep -x mksquashfs")


def stop_its_save(lab: Lab, step: subprocess.Popen[str]) -> None:
    """Let a step end, and stop its save at once: a small save takes no time."""
    on_node(lab, "(until pkill -STOP -x mksquashfs; do sleep 0.01; done) > /dev/null 2>&1 &")
    assert step.stdin
    step.stdin.write("go\n")
    step.stdin.flush()
    until(lambda: "T" in on_node(lab, "ps -o stat= -C mksquashfs"), "the container is being saved")


@pytest.mark.security("R2")
def test_a_save_that_is_slow_ends_with_its_job(lab: Lab) -> None:
    """Before the fix, another process started a new save after scancel, outside of the job's cgroups."""
    step = start(lab, *WRITABLE, "--container-save=./waits.sqsh", env=SLOW)
    assert step.stdin
    step.stdin.write("go\n")
    step.stdin.flush()
    until(lambda: saving(lab), "the container is being saved")
    time.sleep(0.5)
    assert saving(lab)
    lab.run(["scancel", jobs(lab)])
    gone(lab)
    step.communicate(timeout=300)
    assert not saving(lab)
    assert lab.run("ls -A | grep waits", check=False).stdout == ""


@pytest.mark.security("R2")
def test_nothing_is_saved_of_a_step_that_was_killed(lab: Lab) -> None:
    step = start(lab, *WRITABLE, "--container-save=./waits.sqsh", script="echo up; sleep 1234")
    lab.run(["scancel", jobs(lab)])
    gone(lab)
    step.communicate(timeout=300)
    assert lab.run("ls -A | grep waits", check=False).stdout == ""


@pytest.mark.security("R2")
@pytest.mark.soak
def test_a_save_at_a_normal_end_takes_its_time(lab: Lab, soak: bool) -> None:
    """Only the end of the job limits the time of a save: this save takes longer than any deadline of root's."""
    seconds = 200 if soak else 11
    step = start(lab, *WRITABLE, "--container-save=./waits.sqsh")
    stop_its_save(lab, step)
    began = time.monotonic()
    time.sleep(seconds)
    on_node(lab, "pkill -CONT -x mksquashfs")
    _, err = step.communicate(timeout=300)
    assert step.returncode == 0 and time.monotonic() - began >= seconds
    assert "exported container" in err
    assert srun(lab, "--container-image=./waits.sqsh", "echo", "whole") == "whole\n"


@pytest.mark.security("R3")
def test_finisher_is_in_the_cgroup_and_closed_to_users(lab: Lab) -> None:
    """If the helper is killed, another process saves. Before the fix, that process was outside the step's cgroup."""
    step = start(lab, *WRITABLE, "--container-save=./waits.sqsh", script="echo up; cat /proc/self/cgroup; read line")
    kill_helper(lab)
    stop_its_save(lab, step)
    try:
        finisher = on_node(lab, f"pgrep -o -f {HELPER}").strip()
        for process in (finisher, saving(lab).strip()):
            groups = on_node(lab, f"cat /proc/{process}/cgroup")
            tracked = [line for line in groups.splitlines() if re.match(r"\d+:freezer:|0::/.", line)]
            assert any("/step_" in line for line in tracked), groups
            assert any("/step_" in line for line in groups.splitlines() if ":memory:" in line or "0::/." in line), (
                groups
            )
        looked = lab.run(f"cat /proc/{finisher}/environ; ls /proc/{finisher}/fd", node="n1", check=False)
        assert looked.returncode != 0 and "Permission denied" in looked.stderr
    finally:
        on_node(lab, "pkill -CONT -x mksquashfs")
    step.communicate(timeout=300)
    assert lab.run("ls waits.sqsh").stdout == "waits.sqsh\n"


@pytest.mark.security("R5")
def test_the_epilog_goes_on_after_a_failure(lab: Lab) -> None:
    """A leftover that cannot be removed must not keep the epilog from the rest."""
    step = start(lab, *WRITABLE, script="echo up; sleep 1234")
    job = jobs(lab)
    names = [f"pyxis_{job}.{number}" for number in range(1, 9)]
    made = " ".join(f"/run/pyxis/2001/{name}" for name in names)
    on_node(lab, f"mkdir {made}", "alice")  # in place of notes, which are links: the epilog cannot remove directories
    on_node(lab, f"pkill -KILL -f {HELPER}; pkill -KILL slurmstepd; pkill -KILL -u alice")
    lab.run(["scancel", job])
    gone(lab)
    step.communicate(timeout=300)
    until(lambda: on_node(lab, "ls -A /var/tmp/enroot-data-2001 | grep -v .records") == "", "the container is removed")
    assert on_node(lab, "ls /run/pyxis/2001").split() == names
    on_node(lab, f"rmdir {made}")
    # Leftovers of a slurmstepd that could not clean up.
    remove = "find /sys/fs/cgroup -depth -type d -path '*job_*' -exec rmdir {} +"
    until(lambda: lab.run(remove, node="n1", user="root", check=False).returncode == 0, "the job's cgroups are empty")


@pytest.mark.parity("ENROOT_SQUASH_OPTIONS")
@pytest.mark.security("R3")
@pytest.mark.parametrize(
    "options",
    [
        "-p x@f@644@0@0@id",
        "-pf /home/alice/pseudo",
        "-action exec(id)@true",
        "-comp gzip -action-file /home/alice/actions",
        "-info-file /tmp/x",
        "-recovery-path /tmp",
        "-e /",
    ],
)
def test_options_of_mksquashfs_that_run_programs_are_refused(lab: Lab, options: str) -> None:
    """ENROOT_SQUASH_OPTIONS could run programs when Slurm does not track a job's processes."""
    env = {"ENROOT_SQUASH_OPTIONS": options}
    stderr = refused(lab, IMAGE, "--container-save=./waits.sqsh", "echo", "ran", env=env)
    assert "ENROOT_SQUASH_OPTIONS: -" in stderr and "is not allowed" in stderr


FLOOD = """
cat > /etc/rc <<'END'
#!/bin/sh
printf 'a\\r\\033[2Jb\\n[2026-11-22T00:00:00.000] error: forged\\n' >&2
yes 0123456789012345678901234567890123456789012345678901234567890123456789 | head -n 9000 | cat -n
head -c 300000 /dev/zero | tr '\\0' x
exec "$@"
END
rm -f /etc/rc.local
"""


@pytest.mark.security("R6")
def test_slurmds_log_is_not_the_users_to_fill(lab: Lab) -> None:
    """Before the fix, an entrypoint's output went to slurmd's log unchanged, with every control character."""
    srun(lab, *WRITABLE, "--container-save=./waits.sqsh", *sh(FLOOD))
    path = f"{lab.root}/nodes/n1/var/log/slurmd.log"
    before = os.path.getsize(path)
    step = lab.popen(
        [
            "srun",
            *ON_N1,
            "--container-image=./waits.sqsh",
            "--container-entrypoint",
            "--container-entrypoint-log",
            "true",
        ]
    )
    _, err = step.communicate(timeout=300)
    assert "9000\t0123" in err or "9000?0123" in err  # the user gets the whole output
    with open(path, "rb") as log:
        log.seek(before)
        text = log.read()
    assert len(text) < 100_000
    assert b"a" in text and b"\x1b" not in text and b"\r" not in text
    assert not re.search(rb"^\[2026-11-22T00:00:00", text, re.MULTILINE)
