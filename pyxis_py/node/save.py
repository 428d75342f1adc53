"""--container-save: write the container to a squashfs file at the end of its step."""

from __future__ import annotations

import errno
import os

from enroot_py.base import log
from enroot_py.base.errors import ImageError, PenrootError
from enroot_py.base.fds import Fd
from enroot_py.store import containers
from pyxis_py.request.channel import tell

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pyxis_py.node.step import Step

_NAME_MAX = 255  # bytes: limits.h


class Save:
    """The file that --container-save names."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.asked = step.request.save or ""
        self.file = os.path.join(step.job.cwd or "/", self.asked)

    def error(self, why: str, hint: str) -> ImageError:
        return ImageError(f"--container-save={self.asked}: {why}", hint=hint)

    def check(self) -> None:
        """Before the container is made, raise ImageError or ConfigError if it cannot be saved later."""
        from enroot_py.base import filesystems, memory
        from enroot_py.store import mksquashfs

        try:
            directory, name = os.path.split(mksquashfs.destination(self.file))
        except ImageError as wrong:
            raise self.error(str(wrong), "name a file of your own") from wrong
        if not os.path.isdir(directory):
            raise self.error(
                f"no such directory: {directory}", f"create the directory on the node {self.step.job.node}"
            )
        if not os.access(directory, os.W_OK | os.X_OK):
            why = f"the directory is not writable for you: {directory}"
            raise self.error(why, "save to a directory of your own")
        if len(os.fsencode(name)) > _NAME_MAX:
            raise self.error(f"the name has more than {_NAME_MAX} bytes", "give a shorter name")
        if e := _try_to_write(directory):
            raise self.error(f"{directory}: {e.strerror}", filesystems.hint_for(e, directory))
        if refused := memory.refusal():
            raise self.error(*refused)
        mksquashfs.check_options(self.step.settings)

    def write(self, container: str) -> None:
        """Write a container to the file. Raises ImageError."""
        step = self.step
        try:
            containers.export(container, self.file, step.settings.replace("option", force_override=True))
        except PenrootError as e:
            raise self.error(f"the container is not saved: {e}", e.hint) from e
        tell(f"exported container {container} to {self.asked}")
        # Slurm changes to /tmp if the node lacks the working directory of the job.
        submitted = step.job.environ.get("PWD", "")
        elsewhere = submitted and os.path.realpath(submitted) != os.path.realpath(step.job.cwd)
        if elsewhere and not self.asked.startswith("/"):
            log.warn(f"--container-save={self.asked}: the file is {self.file}")


def _try_to_write(directory: str) -> OSError | None:
    """Return the error if not even a megabyte can be written: the disk is full, or the quota exceeded."""
    try:
        with Fd(os.open(directory, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)) as fd:
            os.posix_fallocate(fd, 0, 1 << 20)
    except OSError as e:
        return e if e.errno in (errno.ENOSPC, errno.EDQUOT) else None  # no other error counts: NFS has no O_TMPFILE
    return None
