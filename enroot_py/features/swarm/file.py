"""A file that srun's host sends by a swarm. The file is the only blob of the swarm.

At first only the seed, a peer on srun's host, has the file. A node writes the file to its final path. The caller of
read() compares the bytes with the digest.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

from enroot_py.base import filesystems
from enroot_py.base.errors import ImageError
from enroot_py.features.swarm import wire
from enroot_py.features.swarm.client import SwarmClient
from enroot_py.features.swarm.invitation import Invitation
from enroot_py.features.swarm.messages import Answer, Failed, File
from enroot_py.features.swarm.reader import Reader
from enroot_py.features.swarm.spool import Spool
from enroot_py.registry.sources import Blob


class FileSource(SwarmClient):
    """The file ``name`` with ``digest``. This node has the file at ``path``, or writes it there."""

    RETRY_WAITS_S = (0.2, 1.0, 2.0, 4.0)  # more tries than for an image: no registry has the file

    def __init__(self, invitation: Invitation, digest: str, name: str, path: str) -> None:
        super().__init__(invitation)
        self._digest = digest
        self._name, self._path = name, path
        self._size = 0
        self._descriptor: int | None = None  # of the file

    def size(self) -> int:
        """Ask the tracker for the size of the file. Raises ImageError if the tracker cannot be reached."""
        self.join()
        if self._hint:
            raise ImageError(f"{self._name}: {os.uname().nodename}: {self._reason}", hint=self._hint)
        if self._tracker is None:
            host = f"srun's host, {self._invitation.host} port {self._invitation.port}"
            raise ImageError(
                f"{self._name}: {os.uname().nodename} does not reach {host}: {self._reason}",
                hint="let nodes connect to srun's host (at SrunPortRange, if slurm.conf sets it), or copy the file to "
                "the nodes with sbcast(1) and use its path there",
            )
        return self._size

    def read(self, descriptor: int) -> Blob:
        """Start to download the file to a descriptor. Return a reader of the arriving bytes. Raises OSError."""
        self._descriptor = descriptor
        return Reader(self.start_peer((0,)), 0, self._no_more)

    def new_spool(self, lacking: Sequence[int]) -> Spool:
        if self._descriptor is None:
            self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        file = {0: self._descriptor}
        return Spool((self._size,), lacking, "", {} if lacking else file, files=file, explain=self._explain)

    def _explain(self, error: OSError) -> tuple[str, str]:
        hint = filesystems.hint_for(error, self._path, "ENROOT_CACHE_PATH")
        return f"{self._name}: cannot write {self._path}: {error.strerror}", hint

    def seed(self, descriptor: int, changed: Callable[[], str], rate: float) -> None:
        """Upload the file, which is open as a descriptor. ``changed`` returns how the file has changed, or "".

        Raises OSError.
        """
        self.join()
        if self._tracker is not None:
            self._descriptor = descriptor
            peer = self.peer(rate)
            self._watch(changed)
            peer.run()

    def _watch(self, changed: Callable[[], str]) -> None:
        """When the file has changed, report this to the tracker, which tells all nodes."""
        assert self._loop and self._tracker
        loop, tracker, tick = self._loop, self._tracker, self._loop.tick

        def check(now: float) -> None:
            if why := changed():
                loop.tick = tick
                hint = "start the step again when the file is complete"
                tracker.send(wire.encode(Failed((0,), refused=True, reason=f"{self._name}: {why}", hint=hint)))
            tick(now)

        loop.tick = check

    def accept_answer(self, answer: Answer) -> None:
        if not isinstance(answer, File) or answer.named != self._digest:
            raise ValueError("the tracker has another file")
        self._size = answer.size

    def fetch(self, blob: int, start: int) -> Iterable[bytes]:
        return self._no_more(start)

    def _no_more(self, offset: int) -> NoReturn:
        """Raise ImageError: no registry has the file, so nothing can replace the missing bytes."""
        host = f"srun's host {self._invitation.host}"
        if not offset:
            hint = "let nodes connect to a second port of srun's host too (in SrunPortRange, if slurm.conf sets it)"
            raise ImageError(f"{self._name}: no byte of the file has come from {host}", hint=hint)
        raise ImageError(
            f"{self._name}: {host} has stopped sending at byte {offset} of {self._size}",
            hint="srun has ended, or its host is unreachable: start the step again",
        )
