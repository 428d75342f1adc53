"""What srun, sbatch and salloc can know of a step before it is queued.

In a module of its own, as each of them waits for it: nothing of containers is imported here.
"""

from __future__ import annotations

import os

from enroot_py.base import log
from enroot_py.base.errors import UsageError
from pyxis_py import options, settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from enroot_py.registry.reference import Reference
    from pyxis_py.job import Job
    from pyxis_py.options import Request

_PATIENCE = 5  # seconds; a login node may not reach the registry, and then each node resolves the tag


def check(job: Job) -> tuple[Request, Reference | None]:
    """What is asked for, as far as it can be known at submit, and the tag to resolve for all nodes of a step, if any.

    Raises UsageError, ConfigError.
    """
    plugin = settings.load(job.arguments)
    request = options.parse(job.options, job.environ)
    if job.context != "srun" and not plugin.sbatch_support:
        # A step inside may use the variables; the options of sbatch itself are off.
        if job.options:
            raise UsageError(
                f"--{job.options[0][0]}: container options of {job.context} are switched off on this cluster",
                hint="give them to srun, inside the job",
            )
        return request, None
    for line in (*options.ignored(request), *slips(job.environ)):
        log.warn(line)
    request.fstab()  # for errors in its flags
    if request.image is None or request.is_file(job.cwd):
        return request, None
    from enroot_py.base.errors import ImageReferenceError
    from enroot_py.registry import reference

    try:
        image = reference.parse(request.image, job.cwd)
    except ImageReferenceError as e:
        raise UsageError(f"{request.origins['image']}={e}", hint=e.hint) from None
    resolves = job.context == "srun" and plugin.resolve_tags and not plugin.importer
    if not resolves or not isinstance(image, reference.Reference) or image.digest or job.resolved(image):
        return request, None
    return request, image


def slips(environ: Mapping[str, str]) -> list[str]:
    """Variables that are none of ours and look as if they should be: one line each, for people."""
    known = [option.variable for option in options.OPTIONS if option.variable]
    unknown = [name for name in environ if name.startswith("PYXIS_CONTAINER_") and name not in known]
    if not unknown and not any(name.startswith(("ENROOT_", "PENROOT_")) for name in environ):
        return []
    from enroot_py.config import table, words

    meant = ((name, words.nearest(name, known)) for name in unknown)
    lines = [f"ignoring {name}: did you mean {variable}?" for name, variable in meant if variable]
    return lines + table.slips(environ)


def resolve(job: Job, tag: Reference) -> str:
    """The digest of a tag, or "" where it cannot be had from here.

    Ends the process where that takes too long: the plugin then goes on without. Raises
    RefusedError; a node may have another login or mirror, so it asks all the same.
    """
    from enroot_py.base.errors import PenrootError, RefusedError
    from enroot_py.config import settings as enroot_settings
    from enroot_py.registry import tags

    heard = tags.hurry(_PATIENCE)
    try:
        return tags.resolve(tag, enroot_settings.load(job.host()), heard)
    except RefusedError:
        raise
    except PenrootError as e:
        log.debug(str(e))
        return ""


def one_component() -> bool:
    """Whether srun starts one component of a heterogeneous job, or none.

    Of several, only the first gets what is put into the environment once the allocation is there:
    pre_launch_srun_job of Slurm's srun_job.c.
    """
    with open(f"/proc/{os.getppid()}/cmdline", "rb") as f:
        words = f.read().split(b"\0")
    return b":" not in words and not any(word.startswith((b"--het-group", b"--pack-group")) for word in words)
