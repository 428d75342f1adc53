"""What srun, sbatch and salloc can know of a step before it is queued.

In a module of its own, as each of them waits for it: nothing of containers is imported here.
"""

import os

from enroot_py import log
from enroot_py.errors import UsageError
from pyxis_py import options, settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pyxis_py.job import Job
    from pyxis_py.options import Request


def check(job: "Job") -> "Request":
    """What can be known at submit. Raises UsageError, ConfigError."""
    plugin = settings.load(job.arguments)
    request = options.parse(job.options, job.environ)
    if job.context != "srun" and not plugin.sbatch_support:
        # A step inside may use the variables; the options of sbatch itself are off.
        if job.options:
            raise UsageError(
                f"--{job.options[0][0]}: container options of {job.context} are switched off on this cluster",
                hint="give them to srun, inside the job",
            )
        return request
    for line in options.ignored(request):
        log.warn(line)
    if request.image is not None and not is_file(request.image, job.cwd):
        from enroot_py import reference
        from enroot_py.errors import ImageReferenceError

        try:
            reference.parse(request.image)
        except ImageReferenceError as e:
            raise UsageError(f"{request.origins['image']}={e}", hint=e.hint) from None
    return request


def is_file(image: str, cwd: str) -> bool:
    """Whether an image is a path on the node; a bare name is one if it ends as such files do and is there."""
    return image.startswith(("/", ".")) or (image.endswith(".sqsh") and os.path.isfile(f"{cwd}/{image}"))
