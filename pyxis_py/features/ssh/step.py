"""Remove the ssh keys of a job at its end."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pyxis_py.node.running import Notes
    from pyxis_py.request.job import Job

NOTE = "ssh"  # name of the note that records the keys of a job


def clean_up(job: Job, notes: Notes) -> None:
    """Remove the keys of a job that has ended. Raises PenrootError, OSError."""
    note = notes.of_feature(job.jobid, NOTE)
    if note not in notes.of_job(job.jobid):
        return
    from pyxis_py.features.ssh import sshkeys

    sshkeys.remove(notes.directory(note), str(job.jobid))
    notes.erase(note)
