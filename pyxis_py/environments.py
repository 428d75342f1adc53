"""Environment files of steps: read once, where they are submitted, by the user's process, and carried to the nodes."""

from __future__ import annotations

import os

from enroot_py.base import log
from enroot_py.base.errors import PenrootError
from enroot_py.config import edf

TYPE_CHECKING = False
if TYPE_CHECKING:
    from enroot_py.config.edf import Environment
    from pyxis_py.job import Job


def at_submit(job: Job, name: str, origin: str) -> Environment:
    """What a file says to srun, sbatch or salloc: in a batch job, what sbatch has read of the same file.

    Raises UsageError, ConfigError.
    """
    carried = _carried(job, name)
    here = edf.path_in(job.cwd, name)
    named = carried and (carried.path == here or not edf.is_path(name) and not os.path.exists(here))
    if carried and named and job.context == "srun":
        return carried
    from enroot_py.config import edffile

    file = edffile.read(name, f"{origin}={name}", job.cwd, job.caller)
    edffile.check(file)
    if line := edffile.lacking(file):
        log.warn(line)
    return file


def on_node(job: Job, name: str, origin: str) -> Environment:
    """What it says to a step: as it was read at submit, or where nothing of us was there, as the node sees the file.

    Raises UsageError, ConfigError.
    """
    if carried := _carried(job, name):
        return carried
    from enroot_py.config import edffile

    try:
        return edffile.read(name, f"{origin}={name}", job.cwd, job.environ)
    except PenrootError as e:
        why = f"the node {job.node} reads it, as nothing of the plugin has where the step was submitted"
        raise type(e)(str(e), hint=f"{e.hint}; {why}" if e.hint else why) from e


def _carried(job: Job, name: str) -> Environment | None:
    """What was read of that name before. Raises ConfigError."""
    file = edf.loads(job.carried) if job.carried else None
    return file if file and file.name == name else None
