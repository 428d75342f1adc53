"""Digests of a step, from the job's pins or the step's lock file."""

from __future__ import annotations

from enroot_py.base.digests import is_digest
from enroot_py.features.pins.options import LOCK, PIN
from pyxis_py.request.job import PINNED

TYPE_CHECKING = False
if TYPE_CHECKING:
    from enroot_py.base.digests import Pin
    from enroot_py.registry.reference import LocalImage, Reference
    from pyxis_py.request.job import Job
    from pyxis_py.request.options import Request


def pin(job: Job, request: Request, image: Reference | LocalImage, resolved: str) -> Pin | None:
    """Return the digest of a tag for the step, or None. ``resolved`` is the digest from srun, or "".

    If ``resolved`` is "", look for the digest in the lock file and in the pins of the job. Raises UsageError,
    ConfigError, and ImageError if the digest is required but unknown.
    """
    if image.digest or not _may_pin(job, request):
        return None
    from enroot_py.features.pins import pins

    return pins.resolved_pin(job, request, resolved) if is_digest(resolved) else pins.find_pin(job, request, image)


def must_resolve(request: Request) -> bool:
    """Return whether srun must resolve a tag even if the site's settings forbid it."""
    return request.value(PIN) is True


def at_submit(job: Job, request: Request) -> list[tuple[str, str]]:
    """Resolve tags for all steps of a job: see pins.at_submit(). Raises PenrootError."""
    if job.context == "srun":
        return []
    from pyxis_py.request import settings

    has_tag = request.is_reference(job.cwd) and request.value(PIN) is not False
    plugin = settings.load(job.arguments)
    if not plugin.sbatch_support or not (has_tag or request.value(LOCK) is not None or request.value(PIN)):
        return []
    from enroot_py.features.pins import pins

    pinned = pins.at_submit(job, request, plugin)
    return [("pinned", pinned)] if pinned else []


def _may_pin(job: Job, request: Request) -> bool:
    is_requested = request.value(LOCK) is not None or request.value(PIN) is True
    return is_requested or bool(job.environ.get("ENROOT_LOCK") or job.environ.get(PINNED))
