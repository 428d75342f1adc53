"""``show_image`` in plugstack.conf: add the image to the comment of a batch job, for scontrol show job.

The helper, a process of the user, sets the comment on the node. In all Slurm releases, the comment is the field for
free text that the owner of a job is allowed to set.
"""

from __future__ import annotations

from enroot_py.base import log
from enroot_py.base.errors import PenrootError
from enroot_py.base.run import Program, find

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pyxis_py.request.job import Job

_TIMEOUT_S = 5.0  # the batch script waits if slurmctld does not answer
_BETWEEN = "; "
_OURS = "image="


def add(job: Job, image: str) -> None:
    """Add the image to the user's comment, or replace the previous image in it."""
    try:
        name = _name(job)
        before = _run(job, "squeue", "--noheader", f"--jobs={name}", "--format=%k").removesuffix("\n")
        after = changed(before, image)
        if after != before:
            _run(job, "scontrol", "update", f"JobId={name}", f"Comment={after}")
    except PenrootError as e:
        log.warn(f"cannot add the image to the comment of the job: {e}")


def _name(job: Job) -> str:
    """Return ID, ID_TASK or ID+COMPONENT. A bare ID would select a whole array or heterogeneous job."""
    listed = _run(job, "squeue", "--noheader", f"--jobs={job.jobid}", "--format=%A %i")
    names = dict(line.partition(" ")[::2] for line in listed.splitlines())
    return names.get(str(job.jobid), str(job.jobid)).strip()


def changed(comment: str, image: str) -> str:
    """Return the comment with the image added, in place of an earlier image."""
    words = comment.split(_BETWEEN) if comment not in ("", "(null)") else []
    words = [word for word in words if not (word.startswith(_OURS) and "@sha256:" in word)]
    return _BETWEEN.join((*words, _OURS + image))


def _run(job: Job, program: str, *words: str) -> str:
    """Return the output of a Slurm program. Raises PenrootError."""
    path = job.environ.get("SLURM_CONF")
    environ = {"SLURM_CONF": path} if path else {}
    return Program([find(program, package="slurm-client"), *words], environ=environ, timeout=_TIMEOUT_S).run()
