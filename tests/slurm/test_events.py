"""Event records of steps, and the container's start time in srun -v."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.slurm.lab import Lab
from tests.slurm.steps import IMAGE, ON_N1, end, next_line, plugin_argument, refused, sh, srun


@pytest.fixture
def file(lab: Lab) -> Iterator[str]:
    """Yield the path of the event file. plugstack.conf sets the path, and a user's ENROOT_EVENTS cannot change it."""
    lab.run("rm -f events.jsonl; touch events.jsonl")
    path = lab.run("readlink -f events.jsonl").stdout.strip()
    with plugin_argument(lab, f"events={path}"):
        yield path
    lab.run("rm -f events.jsonl")


def records(lab: Lab, event: str) -> list[dict[str, Any]]:
    lines = lab.run(["cat", "events.jsonl"]).stdout.splitlines()
    return [record for record in map(json.loads, lines) if record["event"] == event]


@pytest.mark.parity("events= in plugstack.conf", "events (new): each node writes a record of each step")
def test_each_node_records_the_step(lab: Lab, file: str) -> None:
    show = sh("echo $SLURM_JOB_ID.$SLURM_STEP_ID")
    out = lab.run(["srun", "-N2", "-n4", IMAGE, *show], env={"ENROOT_EVENTS": "/no/such"}).stdout
    (step,) = set(out.splitlines())
    made = records(lab, "step")
    assert {(r["step"], r["job"], r["user"], r["result"]) for r in made} == {(step, int(step[:-2]), "alice", "ok")}
    assert {r["node"] for r in made} == {"n1", "n2"} and len(made) == 2
    assert {r["image"] for r in made} == {"registry:5000/minimal:1"}
    assert {"image", "rootfs", "mounts", "hooks"} <= set(made[0]["phases"])
    pulls = records(lab, "pull")
    assert {r["digest"] for r in pulls} == {r["digest"] for r in made} and {r["step"] for r in pulls} == {step}


@pytest.mark.parity("failures, with their message")
def test_step_without_container_is_recorded_with_reason(lab: Lab, file: str) -> None:
    refused(lab, "--container-image=./no-such.sqsh", "true")
    (record,) = records(lab, "step")
    assert record["result"] == "error" and "no-such.sqsh" in record["error"]


@pytest.mark.parity("events= in plugstack.conf")
def test_a_step_that_attaches_is_recorded(lab: Lab, file: str) -> None:
    first = lab.popen(["srun", *ON_N1, IMAGE, *sh("echo $SLURM_JOB_ID.$SLURM_STEP_ID; read line")])
    name = next_line(first).strip()
    srun(lab, f"--container-name={name}", "true")
    end(first)
    made = records(lab, "step")
    assert [r.get("container") for r in made] == [None, name]
    assert "attach" in made[1]["phases"] and "rootfs" not in made[1]["phases"]


@pytest.mark.parity("srun -v")
@pytest.mark.parametrize(("option", "told"), [("-v", True), ("--verbose", True), ("--overlap", False)])
def test_verbose_says_how_long_the_container_took(lab: Lab, option: str, told: bool) -> None:
    done = lab.run(["srun", *ON_N1, option, IMAGE, *sh("env | grep -c PYXIS_VERBOSE; true")])
    words = r"pyxis: n1: the container took \d+\.\d\d s: .*image \d+\.\d\d s \(.*\), rootfs .*, mounts .*, hooks .* s$"
    assert bool(re.search(words, done.stderr, re.M)) == told, done.stderr
    assert done.stdout == "0\n"
