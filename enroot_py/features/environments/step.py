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
    """Read the environment file ``name``. ``origin`` is the option that requests it. Raises UsageError, ConfigError."""
    return _read_at_submission(job, name, origin) if job.verb == "check" else _read_on_node(job, name, origin)


def at_submit(job: Job, request: Request) -> list[tuple[str, str]]:
    """Return the content of the environment file for the nodes."""
    return [("environment", request.file.dumps())] if request.file else []


def _read_at_submission(job: Job, name: str, origin: str) -> Environment:
    """Read a file for srun, sbatch or salloc.

    In a job, srun uses the content that the same file had at the submission of the job. Raises UsageError, ConfigError.
    """
    from enroot_py.config import files
    from enroot_py.features.environments import edf

    carried = _carried(job, name)
    path = files.path_in(job.cwd, name)
    is_same_file = carried and (carried.path == path or not edf.is_path(name) and not os.path.exists(path))
    if carried and is_same_file and job.context == "srun":
        return carried
    from enroot_py.features.environments import edf_parser

    file = edf_parser.read(name, f"{origin}={name}", job.cwd, job.caller)
    edf_parser.check(file)
    if warning := edf_parser.annotation_warning(file):
        log.warn(warning)
    return file


def _read_on_node(job: Job, name: str, origin: str) -> Environment:
    """Return the content from the submission of the step. If penroot did not run at submission, read the file here.

    Raises UsageError, ConfigError.
    """
    if carried := _carried(job, name):
        return carried
    from enroot_py.features.environments import edf_parser

    try:
        return edf_parser.read(name, f"{origin}={name}", job.cwd, job.environ)
    except PenrootError as e:
        why = f"the node {job.node} read the file itself, because the plugin was not loaded at submission"
        raise type(e)(str(e), hint=f"{e.hint}; {why}" if e.hint else why) from e


def _carried(job: Job, name: str) -> Environment | None:
    """Return the content of the file ``name`` from submission, or None. Raises ConfigError."""
    if not (carried := job.environ.get(CARRIED, "")):
        return None
    from enroot_py.features.environments import edf

    file = edf.loads(carried)
    return file if file.name == name else None
