"""Find running Slurm jobs by number or name with squeue(1)."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from enroot_py.base.errors import ContainerError, PenrootError
from enroot_py.base.run import Program, find

# The name of a job comes last, because it can have any character. A name with line breaks could imitate other jobs, so
# ask only for the names of the caller's jobs.
_FORMAT = "%A|%i|%U|%T|%N|%r|"
_LINE = re.compile(r"(\d+)\|([^|]*)\|(\d+)\|([^|]*)\|([^|]*)\|([^|]*)\|(.*)")
_OUTPUT_VARIABLES = ("SQUEUE_", "SINFO_")  # prefixes of variables that change the output of these programs
_NUMBER = re.compile(r"\d+([_+]\d+)?$")  # a job, an array element, or a component of a heterogeneous job
_TIMEOUT_S = 60.0  # slurmctld may be busy


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """A line of squeue. ``shown`` is the job ID as squeue prints it. ``number`` is the job ID in step names."""

    number: str
    shown: str
    uid: int
    state: str
    nodelist: str
    reason: str
    name: str

    @property
    def ends(self) -> bool:
        """Return whether the job has ended or is ending."""
        return self.state not in ("PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "REQUEUED", "STOPPED", "RESIZING")


@dataclass(frozen=True, slots=True)
class Destination:
    """The target of an ssh name: a job, a node, and a step or container there.

    If ``container`` is "", the target is the job's only container there.
    """

    job: SlurmJob
    node: str
    container: str


def _ask(program: str, *arguments: str) -> list[str]:
    """Return the output lines of a Slurm program. Raises PenrootError."""
    path = find(program, package="slurm-client")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(_OUTPUT_VARIABLES)}
    return Program((path, *arguments), environ=environ, timeout=_TIMEOUT_S).run().splitlines()


def _squeue(*arguments: str, names: str = "") -> list[SlurmJob]:
    lines = _ask("squeue", "--noheader", "--format", _FORMAT + names, *arguments)
    matches = [match.groups() for match in map(_LINE.fullmatch, lines) if match]
    return [SlurmJob(number, shown, int(uid), *rest) for number, shown, uid, *rest in matches]


def cluster() -> str:
    """Return the name of the cluster. Raises PenrootError."""
    for line in _ask("scontrol", "show", "config"):
        key, _, value = line.partition("=")
        if key.strip() == "ClusterName":
            return re.sub(r"[^\w-]", "_", value.strip())
    raise PenrootError(
        "scontrol does not print the name of the cluster", hint="check ClusterName: scontrol show config"
    )


def mine() -> list[SlurmJob]:
    """Return the pending and running jobs of the caller. Raises PenrootError."""
    return [job for job in _squeue("--me", names="%j") if not job.ends]


def job(name: str) -> SlurmJob:
    """Return the caller's running job that the beginning of ``name`` selects. Raises ContainerError."""
    selected, _ = _job(name)
    _check(selected)
    return selected


def destination(name: str) -> Destination:
    """Return what JOB[.STEP|.CONTAINER][.NODE] selects. Raises ContainerError."""
    selected, rest = _job(name)
    _check(selected)
    nodes = _ask("scontrol", "show", "hostnames", selected.nodelist)
    node = next((word for word in rest[-1:] if word in nodes), "")
    container = ".".join(rest[:-1] if node else rest)
    node = node or _node_of_step(selected, container) or nodes[0]
    (state,) = _ask("sinfo", "--noheader", "--nodes", node, "--format", "%T")[:1] or [""]
    if state.endswith("*") or state.startswith("down"):
        hint = f"sinfo --nodes {node} --list-reasons"
        raise ContainerError(f"job {selected.shown}: node {node} is {state}", hint=hint)
    return Destination(selected, node, container)


def _job(name: str) -> tuple[SlurmJob, list[str]]:
    """Return the job that the beginning of ``name`` selects, and the other words of ``name``. Raises ContainerError."""
    words = name.split(".")
    if _NUMBER.match(words[0]):
        try:
            jobs = _squeue("--states", "all", "--jobs", words[0])
        except PenrootError as e:
            if "Invalid job id" not in str(e):
                raise
            jobs = []
        if not jobs:
            raise ContainerError(f"there is no job {words[0]}", hint="squeue --me shows yours")
        return _only(f"job {words[0]}", jobs), words[1:]
    running = [job for job in mine() if job.uid == os.geteuid()]
    for length in range(len(words), 0, -1):
        matching = [job for job in running if job.name == ".".join(words[:length])]
        if matching:
            return _only(f"the name {'.'.join(words[:length])}", matching), words[length:]
    running = [job for job in running if job.state == "RUNNING"]
    if len(running) == 1:
        return running[0], words
    if running:
        shown = ", ".join(job.shown for job in running)
        hint = f"if {name} is a container, add the job ID ({shown}): JOB.{name}"
    else:
        hint = "none of your jobs is running: squeue --me"
    raise ContainerError(f"you have no running job with the name {name}", hint=hint)


def _only(subject: str, jobs: Sequence[SlurmJob]) -> SlurmJob:
    """Return the running job of ``jobs``, or the first job if none runs. Raises ContainerError if several run."""
    running = [job for job in jobs if job.state == "RUNNING"]
    if len(running) > 1:
        shown = ", ".join(job.shown for job in running)
        raise ContainerError(f"{subject} matches several jobs: {shown}", hint="use a job ID")
    return (running or list(jobs))[0]


def _check(job: SlurmJob) -> None:
    """Raise ContainerError if no step can be started in a job."""
    subject = f"job {job.shown}"
    if job.uid != os.geteuid():
        raise ContainerError(f"{subject} belongs to another user (uid {job.uid})", hint="squeue --me shows yours")
    if job.state in ("PENDING", "CONFIGURING"):
        raise ContainerError(f"{subject} is not running yet: {job.reason}", hint=f"squeue --start --job {job.shown}")
    if job.state == "SUSPENDED":
        raise ContainerError(f"{subject} is suspended", hint=f"resume it: scontrol resume {job.shown}")
    if job.state != "RUNNING":
        raise ContainerError(f"{subject} has ended: {job.state}", hint="squeue --me shows yours")


def _node_of_step(job: SlurmJob, step: str) -> str:
    """Return the first node of a step, or "" if there is no such step."""
    for line in _ask("squeue", "--noheader", "--steps", "--jobs", job.number, "--format", "%i|%N") if step else ():
        shown, _, nodelist = line.partition("|")
        if shown.partition(".")[2] == step:
            return _ask("scontrol", "show", "hostnames", nodelist)[0]
    return ""
