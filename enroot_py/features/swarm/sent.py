"""``--container-image=bcast:PATH``: a squashfs file of srun's host, which srun sends to the nodes.

srun opens the file once, at submission. The nodes get this file, even if another file takes its name later.
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
from enroot_py.features.swarm.offer import SEED_RATE, Note, Offer
from enroot_py.store import squashfs
from pyxis_py.request.job import REFUSED, Job

TYPE_CHECKING = False
if TYPE_CHECKING:
    from enroot_py.features.swarm.arguments import SwarmArguments
    from enroot_py.features.swarm.messages import File
    from pyxis_py.request.channel import Channel
    from pyxis_py.request.options import Request

_CHUNK_BYTES = 1 << 20
_SETTLED_S = 10.0  # when a file's timestamp is this old, another write is certain to change the timestamp
_MAX_DIGEST_BYTES = 100
_HINT = "copy it to the nodes in the job, with sbcast(1) or a shared directory, and use its path there"


class SentFile:
    """The file that srun sends. ``fd`` is open as long as the process lives."""

    def __init__(self, job: Job, request: Request, networks: str) -> None:
        """Raises UsageError if the file cannot be read, ImageError if it is not a complete squashfs file."""
        self.uri, self.networks = request.image or "", networks
        self._job = job
        self.origin = f"{request.origins['image']}={self.uri}"
        self.path = os.path.join(job.cwd, request.sent)
        self._read: tuple[tuple[int, int], str] | None = None  # the state of the file when it was read, and the digest
        host = f"{os.uname().nodename}, the host of submission"
        try:
            with Fd(os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)) as fd:
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    hint = f"give a squashfs file on {host}"
                    raise UsageError(f"{self.origin}: not a regular file: {self.path}", hint=hint)
                squashfs.check_open(fd, self.path)
                self.fd = fd.keep()
        except OSError as e:
            hint = f"the file must be on {host}; for a file that is on the nodes, omit bcast:"
            raise UsageError(f"{self.origin}: {e.strerror}: {self.path}", hint=hint) from e

    @property
    def size(self) -> int:
        """The size of the file in bytes."""
        return os.fstat(self.fd).st_size

    def digest(self) -> str:
        """Return the digest of the file as it is now. Raises ImageError, ConfigError."""
        try:
            before = self._state()
            if self._read is None or self._read[0] != before:
                self._read = before, self._known_digest()
        except OSError as e:
            raise ImageError(f"{self.origin}: cannot read {self.path}: {e.strerror}") from e
        if self.changed():
            raise ImageError(f"{self.origin}: {self.path} is being written", hint="try again when the file is complete")
        return self._read[1]

    def _known_digest(self) -> str:
        """Return the digest from the note of an earlier srun, or compute it.

        Note a computed digest for the next srun, unless the file has changed within the last _SETTLED_S seconds.

        Raises OSError.
        """
        status = os.fstat(self.fd)
        identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        note = Note(self._job, digests.of(str(identity).encode()))
        noted = note.read(_MAX_DIGEST_BYTES).decode("ascii", "replace")
        if digests.is_digest(noted):
            return noted
        digest = self._compute_digest()
        if time.time() > status.st_ctime + _SETTLED_S:
            note.write(digest.encode())
        return digest

    def _compute_digest(self) -> str:
        from hashlib import sha256

        digest, offset = sha256(), 0
        while data := os.pread(self.fd, _CHUNK_BYTES, offset):
            digest.update(data)
            offset += len(data)
        return digests.of_encoded(digest.hexdigest())

    def changed(self) -> str:
        """Return a message if the file has changed since it was read, otherwise ""."""
        return "" if self._read and self._state() == self._read[0] else "the file was changed while it was sent"

    def _state(self) -> tuple[int, int]:
        status = os.fstat(self.fd)
        return status.st_size, status.st_mtime_ns

    def serve(self, channel: Channel) -> None:
        """Wait until srun has its nodes, then be the tracker of the file until srun ends."""
        with suppress(PenrootError):  # _FileOffer raises it again
            self.digest()  # hashing takes long: do it while srun waits for its nodes
        allocation = Job(channel.receive())
        try:
            offer = _FileOffer(self, allocation)
        except (PenrootError, OSError) as e:
            hint = e.hint if isinstance(e, PenrootError) else "check whether SrunPortRange (slurm.conf) has a free port"
            why = str(e) if isinstance(e, PenrootError) else f"{self.origin}: srun cannot listen: {e.strerror}"
            for line in filter(None, (why, hint)):
                channel.log("ERROR", line)
            channel.send((("ok", ""), ("resolved", f"{self.uri} {REFUSED}")))
            return
        channel.send((("ok", ""), ("resolved", f"{self.uri} {offer.digest}"), ("swarm", offer.invitation)))
        offer.serve(channel)


def check(job: Job, request: Request, arguments: SwarmArguments, *, learns_later: bool) -> SentFile:
    """Return the file, if srun can send it. Raises UsageError, ConfigError, ImageError.

    ``learns_later``: srun can pass data to the step after srun has its nodes.
    """
    origin = f"{request.origins['image']}={request.image}"
    if not arguments.swarm:
        raise UsageError(f"{origin}: srun sends no files on this cluster: swarm=no in plugstack.conf", hint=_HINT)
    if job.context == "sbatch":
        raise UsageError(
            f"{origin}: only srun sends the file, and a batch script starts without srun",
            hint="give it to srun in the script, if the file is on the first node of the job; or " + _HINT,
        )
    if job.context == "srun" and not learns_later:
        raise UsageError(
            f"{origin}: an srun of several components, or with --het-group or --async, sends no file", hint=_HINT
        )
    if job.context == "srun" and (error := missing()):
        raise ConfigError(f"{origin}: {error}", hint=error.hint)
    return SentFile(job, request, arguments.swarm_network)


class _FileOffer(Offer):
    """The tracker of a file."""

    shows_registry = False

    def __init__(self, file: SentFile, allocation: Job) -> None:
        """Raises ImageError, OSError."""
        if not allocation.numbers.get("nodes"):
            raise ImageError(f"{file.origin}: srun cannot tell how many nodes the step has", hint=_HINT)
        self.digest = file.digest()
        super().__init__(file.uri, file.networks, allocation)
        self._file, self._size = file, file.size
        self.seed_descriptors = (file.fd,)

    def documents(self) -> tuple[File, tuple[int]]:
        from enroot_py.features.swarm.messages import File

        return File(self.digest, self._size), (self._size,)

    def seed(self) -> None:
        from enroot_py.features.swarm.file import FileSource

        source = FileSource(self.seed_invitation, self.digest, self._file.uri, self._file.path)
        source.seed(self._file.fd, self._file.changed, SEED_RATE)
