"""One file by way of a swarm, which has no other source than srun's host: it is the one blob, and the seed has it.

A node writes it where it is to stay. What comes is compared with the digest by whoever reads it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from enroot_py.base import filesystems
from enroot_py.base.errors import ImageError
from enroot_py.features.swarm import wire
from enroot_py.features.swarm.client import SwarmClient
from enroot_py.features.swarm.invitation import Invitation
from enroot_py.features.swarm.messages import Answer, Failed, File
from enroot_py.features.swarm.reader import Reader
from enroot_py.features.swarm.spool import Spool
from enroot_py.features.swarm.tracker_process import Documents
from enroot_py.registry.sources import Blob


@dataclass(frozen=True, slots=True)
class FileDocuments(Documents):
    """What all nodes need to know of a file, whose digest is what is ``named``."""

    seed_only: bool = True

    def message(self) -> Answer:
        return File(self.named, self.sizes[0])


def documents(digest: str, size: int) -> Documents:
    """Those of a file of so many bytes."""
    return FileDocuments(digest, b"", b"", "", (size,), "")


class FileSource(SwarmClient):
    """The file ``name`` with a digest, for a node that is invited. ``path`` is where that has it, or will."""

    PATIENCE = (0.2, 1.0, 2.0, 4.0)  # there is nobody else to ask

    def __init__(self, invitation: Invitation, digest: str, name: str, path: str) -> None:
        super().__init__(invitation)
        self._digest = digest
        self._name, self._path = name, path
        self._size = 0
        self._fd: int | None = None

    def size(self) -> int:
        """Bytes of the file, which the tracker knows. Raises ImageError where that cannot be reached."""
        self.meet()
        if self._hint:
            raise ImageError(f"{self._name}: {os.uname().nodename}: {self._why}", hint=self._hint)
        if self._tracker is None:
            where = f"srun's host, {self._invitation.host} port {self._invitation.port}"
            raise ImageError(
                f"{self._name}: {os.uname().nodename} does not reach {where}: {self._why}",
                hint="let nodes connect to it, at SrunPortRange of slurm.conf if that is set; or copy the file to the "
                "nodes with sbcast(1), and give its path there",
            )
        return self._size

    def read(self, fd: int) -> Blob:
        """The file while it comes, and is written to its path, which is open as ``fd``. Raises OSError."""
        self._fd = fd
        self.start((0,))
        assert self._spool
        return Reader(self._spool, 0, self._instead)

    def new_spool(self, lacking: Sequence[int]) -> Spool:
        if not lacking:
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC) if self._fd is None else self._fd
            return Spool((self._size,), (), "", {0: fd})
        assert self._fd is not None
        return Spool((self._size,), lacking, "", files={0: self._fd}, full=self._cannot_write)

    def _cannot_write(self, error: OSError) -> tuple[str, str]:
        hint = filesystems.way_out(error, self._path, "ENROOT_CACHE_PATH")
        return f"{self._name}: cannot write {self._path}: {error.strerror}", hint

    def seed(self, fd: int, changed: Callable[[], str], rate: float) -> None:
        """Give the file, which is open as ``fd``, to others; ``changed`` says what has become of it, or "".

        Raises OSError.
        """
        self.meet()
        if self._tracker is not None:
            self._fd = fd
            self._spool = self.new_spool(())
            process = self.peer_process(rate)
            self._watch(changed)
            process.run()

    def _watch(self, changed: Callable[[], str]) -> None:
        """Tell all nodes, once, that the file is another one by now."""
        assert self._loop and self._tracker
        loop, tracker, tick = self._loop, self._tracker, self._loop.tick

        def look(now: float) -> None:
            if why := changed():
                loop.tick = tick
                hint = "start the step again when the file is complete"
                tracker.say(wire.encode(Failed((0,), refused=True, reason=f"{self._name}: {why}", hint=hint)))
            tick(now)

        loop.tick = look

    def know(self, said: Answer) -> None:
        if not isinstance(said, File) or said.named != self._digest:
            raise ValueError("the tracker has another file")
        self._size = said.size

    def fetch(self, blob: int, start: int) -> Iterable[bytes]:
        """Only the seed has it. Raises ImageError."""
        raise self._ended(start)

    def _instead(self, at: int) -> Blob:
        raise self._ended(at)

    def _ended(self, at: int) -> ImageError:
        host = f"srun's host {self._invitation.host}"
        if not at:
            hint = "nodes connect to a second port there, too: at SrunPortRange of slurm.conf, if that is set"
            return ImageError(f"{self._name}: nothing of it comes from {host}", hint=hint)
        return ImageError(
            f"{self._name}: {host} has stopped sending at byte {at} of {self._size}",
            hint="srun has ended, or its host cannot be reached any more: start the step again",
        )
