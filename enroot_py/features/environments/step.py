"""Environment files of steps: read once, where they are submitted, by the user's process, and carried to the nodes."""

from __future__ import annotations

import os

from enroot_py.base import log
from enroot_py.base.errors import PenrootError
from pyxis_py.request.job import CARRIED

TYPE_CHECKING = False
if TYPE_CHECKING:
    from enroot_py.features.environments.edf import Environment
    from pyxis_py.request.job import Job
    from pyxis_py.request.options import Request


def describe(job: Job, name: str, origin: str) -> Environment:
    """What an environment file says, for which ``origin`` asks. Raises UsageError, ConfigError."""
    return _at_submit(job, name, origin) if job.verb == "check" else _on_node(job, name, origin)


def at_submit(job: Job, request: Request) -> list[tuple[str, str]]:
    """What the environment file says, for the nodes."""
    return [("environment", request.file.dumps())] if request.file else []


def _at_submit(job: Job, name: str, origin: str) -> Environment:
    """What a file says to srun, sbatch or salloc: in a batch job, what sbatch has read of the same file.

    Raises UsageError, ConfigError.
    """
    from enroot_py.config import files
    from enroot_py.features.environments import edf

    carried = _carried(job, name)
    here = files.path_in(job.cwd, name)
    named = carried and (carried.path == here or not edf.is_path(name) and not os.path.exists(here))
    if carried and named and job.context == "srun":
        return carried
    from enroot_py.features.environments import edffile

    file = edffile.read(name, f"{origin}={name}", job.cwd, job.caller)
    edffile.check(file)
    if line := edffile.lacking(file):
        log.warn(line)
    return file


def _on_node(job: Job, name: str, origin: str) -> Environment:
    """What it says to a step: as it was read at submit, or where nothing of us was there, as the node sees the file.

    Raises UsageError, ConfigError.
    """
    if carried := _carried(job, name):
        return carried
    from enroot_py.features.environments import edffile

    try:
        return edffile.read(name, f"{origin}={name}", job.cwd, job.environ)
    except PenrootError as e:
        why = f"the node {job.node} reads it, as nothing of the plugin has where the step was submitted"
        raise type(e)(str(e), hint=f"{e.hint}; {why}" if e.hint else why) from e


def _carried(job: Job, name: str) -> Environment | None:
    """What was read of that name before. Raises ConfigError."""
    if not (carried := job.environ.get(CARRIED, "")):
        return None
    from enroot_py.features.environments import edf

    file = edf.loads(carried)
    return file if file.name == name else None
