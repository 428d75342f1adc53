"""``--container-image=bcast:PATH``: a squashfs file that only srun's host has, and that it sends to the nodes.

It is opened once, when it is submitted, and that file is what the nodes get, whatever has its name by then.
"""

from __future__ import annotations

import os
import stat
import time
from contextlib import suppress

from enroot_py.base import digests
from enroot_py.base.errors import ConfigError, ImageError, PenrootError, UsageError
from enroot_py.base.fds import Fd
from enroot_py.features.swarm.invitation import missing
from enroot_py.features.swarm.offer import RATE, Note, Offer
from enroot_py.store import squashfs
from pyxis_py.request.job import REFUSED, Job

TYPE_CHECKING = False
if TYPE_CHECKING:
    from enroot_py.config.settings import Settings
    from enroot_py.features.swarm.arguments import SwarmArguments
    from enroot_py.features.swarm.invitation import Invitation
    from enroot_py.features.swarm.tracker_process import Documents
    from enroot_py.store.store import Image
    from pyxis_py.request.channel import Channel
    from pyxis_py.request.options import Request

_CHUNK = 1 << 20
_SETTLED = 10.0  # seconds after which a file that is written again has another time for sure
_LONGEST = 100  # bytes of a digest
_WAY_OUT = "copy it to the nodes in the job, with sbcast(1) or by a directory that they share, and give its path there"


class SentFile:
    """The file that is sent. ``fd`` is open as long as the process lives."""

    def __init__(self, job: Job, request: Request, networks: str) -> None:
        """Raises UsageError where it cannot be read, ImageError where it is no squashfs file, or not all of one."""
        self.uri, self.networks = request.image or "", networks
        self._job = job
        self.origin = f"{request.origins['image']}={self.uri}"
        self.path = os.path.join(job.cwd, request.sent)
        self._read: tuple[tuple[int, int], str] | None = None  # what it was when it was read, and its digest
        here = f"{os.uname().nodename}, where it is submitted"
        try:
            with Fd(os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)) as fd:
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    hint = f"give a squashfs file of {here}"
                    raise UsageError(f"{self.origin}: no regular file: {self.path}", hint=hint)
                squashfs.check_open(fd, self.path)
                self.fd = fd.keep()
        except OSError as e:
            hint = f"it must be on {here}; a file that is on the nodes is given without bcast:"
            raise UsageError(f"{self.origin}: {e.strerror}: {self.path}", hint=hint) from e

    @property
    def size(self) -> int:
        """Bytes."""
        return os.fstat(self.fd).st_size

    def digest(self) -> str:
        """The digest of what it is now. Raises ImageError, ConfigError."""
        try:
            before = self._state()
            if self._read is None or self._read[0] != before:
                self._read = before, self._known()
        except OSError as e:
            raise ImageError(f"{self.origin}: cannot read {self.path}: {e.strerror}") from e
        if self.changed():
            raise ImageError(f"{self.origin}: {self.path} is being written", hint="try again when it is complete")
        return self._read[1]

    def _known(self) -> str:
        """Its digest, which is remembered for the next srun if nobody has touched the file just now. Raises OSError."""
        status = os.fstat(self.fd)
        touched = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        note = Note(self._job, digests.of(str(touched).encode()))
        known = note.read(_LONGEST).decode("ascii", "replace")
        if digests.is_digest(known):
            return known
        digest = self._sum()
        if time.time() > status.st_ctime + _SETTLED:
            note.write(digest.encode())
        return digest

    def _sum(self) -> str:
        from hashlib import sha256

        digest, at = sha256(), 0
        while data := os.pread(self.fd, _CHUNK, at):
            digest.update(data)
            at += len(data)
        return digests.of_encoded(digest.hexdigest())

    def changed(self) -> str:
        """What has become of it since it was read, in words, if it is not what it was."""
        return "" if self._read and self._state() == self._read[0] else "the file was changed while it was sent"

    def _state(self) -> tuple[int, int]:
        status = os.fstat(self.fd)
        return status.st_size, status.st_mtime_ns

    def serve(self, channel: Channel) -> None:
        """Be the tracker of the file when srun has its nodes, as long as it is there."""
        with suppress(PenrootError):  # it is raised again
            self.digest()  # while srun waits for them
        allocation = Job(channel.receive())
        try:
            offer = _FileOffer(self, allocation)
        except (PenrootError, OSError) as e:
            hint = e.hint if isinstance(e, PenrootError) else "are all of SrunPortRange (slurm.conf) in use?"
            why = str(e) if isinstance(e, PenrootError) else f"{self.origin}: srun cannot listen: {e.strerror}"
            for line in filter(None, (why, hint)):
                channel.log("ERROR", line)
            channel.send((("ok", ""), ("resolved", f"{self.uri} {REFUSED}")))
            return
        channel.send((("ok", ""), ("resolved", f"{self.uri} {offer.digest}"), ("swarm", offer.invitation)))
        offer.serve(channel)


def check(job: Job, request: Request, arguments: SwarmArguments, *, learns_later: bool) -> SentFile:
    """The file, if it can be sent. Raises UsageError, ConfigError, ImageError.

    ``learns_later``: the step gets what srun knows once it has its nodes.
    """
    said = f"{request.origins['image']}={request.image}"
    if not arguments.swarm:
        raise UsageError(f"{said}: srun sends no files on this cluster: swarm=no in plugstack.conf", hint=_WAY_OUT)
    if job.context == "sbatch":
        raise UsageError(
            f"{said}: srun sends the file, and a batch script starts without",
            hint="give it to the srun in the script, where the file has to be on the first node; or " + _WAY_OUT,
        )
    if job.context == "srun" and not learns_later:
        raise UsageError(
            f"{said}: an srun of several components, or with --het-group or --async, sends no file", hint=_WAY_OUT
        )
    if job.context == "srun" and (error := missing()):
        raise ConfigError(f"{said}: {error}", hint=error.hint)
    return SentFile(job, request, arguments.swarm_network)


def received(job: Job, request: Request, invitation: Invitation | None, loaded: Settings) -> Image:
    """On a node: the file that srun sends, when the store has it. Raises ConfigError, ImageError."""
    from enroot_py.features.swarm import received

    image = request.image or ""
    if error := missing():
        raise ConfigError(f"{request.origins['image']}={image}: {error}", hint=error.hint)
    digest = job.resolved(image)
    if digest == REFUSED:
        raise ImageError("")  # srun has said why
    if not digest or invitation is None:
        raise ImageError(
            f"{request.origins['image']}={image}: no srun has offered to send the file",
            hint="give it to srun, on a host where penroot is installed",
        )
    return received.receive(image, digest, invitation, loaded)


class _FileOffer(Offer):
    """The tracker of a file. All that it says of a file is known: nobody is asked."""

    counts = False

    def __init__(self, file: SentFile, allocation: Job) -> None:
        """Raises ImageError, OSError."""
        if not allocation.numbers.get("nodes"):
            raise ImageError(f"{file.origin}: srun cannot tell how many nodes the step has", hint=_WAY_OUT)
        self.digest = file.digest()
        super().__init__(file.uri, file.networks, allocation)
        self._file, self._size = file, file.size
        self.seed_descriptors = (file.fd,)

    def documents(self) -> Documents:
        from enroot_py.features.swarm import file

        return file.documents(self.digest, self._size)

    def seed(self) -> None:
        from enroot_py.features.swarm.file import FileSource

        FileSource(self.own, self.digest, self._file.uri, self._file.path).seed(self._file.fd, self._file.changed, RATE)
