"""Environment files of steps: the user's process reads them at submission and sends them to the nodes."""

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
    """Read the environment file that ``origin`` requests. Raises UsageError, ConfigError."""
    return _at_submit(job, name, origin) if job.verb == "check" else _on_node(job, name, origin)


def at_submit(job: Job, request: Request) -> list[tuple[str, str]]:
    """Return the content of the environment file for the nodes."""
    return [("environment", request.file.dumps())] if request.file else []


def _at_submit(job: Job, name: str, origin: str) -> Environment:
    """Read a file for srun, sbatch or salloc. In a batch job, use the content that sbatch has read.

    Raises UsageError, ConfigError.
    """
    from enroot_py.config import files
    from enroot_py.features.environments import edf

    carried = _carried(job, name)
    here = files.path_in(job.cwd, name)
    named = carried and (carried.path == here or not edf.is_path(name) and not os.path.exists(here))
    if carried and named and job.context == "srun":
        return carried
    from enroot_py.features.environments import edf_parser

    file = edf_parser.read(name, f"{origin}={name}", job.cwd, job.caller)
    edf_parser.check(file)
    if line := edf_parser.lacking(file):
        log.warn(line)
    return file


def _on_node(job: Job, name: str, origin: str) -> Environment:
    """Return the content for a step: as read at submission, or from the node if penroot did not run there.

    Raises UsageError, ConfigError.
    """
    if carried := _carried(job, name):
        return carried
    from enroot_py.features.environments import edf_parser

    try:
        return edf_parser.read(name, f"{origin}={name}", job.cwd, job.environ)
    except PenrootError as e:
        why = f"the node {job.node} reads the file: the plugin was not loaded at submission"
        raise type(e)(str(e), hint=f"{e.hint}; {why}" if e.hint else why) from e


def _carried(job: Job, name: str) -> Environment | None:
    """Return the content of the file ``name`` from submission, or None. Raises ConfigError."""
    if not (carried := job.environ.get(CARRIED, "")):
        return None
    from enroot_py.features.environments import edf

    file = edf.loads(carried)
    return file if file.name == name else None
