"""``show_image`` of plugstack.conf: which image a batch job runs, in its comment, for scontrol show job.

By the user's own process on the node: of what Slurm keeps of a job, its owner may set the comment in all releases.
"""

from __future__ import annotations

from enroot_py.base import log
from enroot_py.base.errors import PenrootError
from enroot_py.base.run import Program, find

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pyxis_py.request.job import Job

_PATIENCE = 5.0  # seconds with a slurmctld that does not answer, for which the script would wait
_BETWEEN = "; "
_OURS = "image="


def add(job: Job, image: str) -> None:
    """Add an image to what the user has written, in place of one that was there before."""
    try:
        name = _name(job)
        before = _scontrol(job, "squeue", "--noheader", f"--jobs={name}", "--format=%k").removesuffix("\n")
        after = changed(before, image)
        if after != before:
            _scontrol(job, "scontrol", "update", f"JobId={name}", f"Comment={after}")
    except PenrootError as e:
        log.warn(f"the comment of the job does not say its image: {e}")


def _name(job: Job) -> str:
    """ID, ID_TASK or ID+COMPONENT: one id is that of an array, or of a heterogeneous job, and of a job in it, too."""
    listed = _scontrol(job, "squeue", "--noheader", f"--jobs={job.jobid}", "--format=%A %i")
    names = dict(line.partition(" ")[::2] for line in listed.splitlines())
    return names.get(str(job.jobid), str(job.jobid)).strip()


def changed(comment: str, image: str) -> str:
    """A comment that says an image."""
    words = comment.split(_BETWEEN) if comment not in ("", "(null)") else []
    words = [word for word in words if not (word.startswith(_OURS) and "@sha256:" in word)]
    return _BETWEEN.join((*words, _OURS + image))


def _scontrol(job: Job, program: str, *words: str) -> str:
    """What a program of Slurm prints. Raises PenrootError."""
    path = job.environ.get("SLURM_CONF")
    environ = {"SLURM_CONF": path} if path else {}
    return Program([find(program, package="slurm-client"), *words], environ=environ, timeout=_PATIENCE).run()
