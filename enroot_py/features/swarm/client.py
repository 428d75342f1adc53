"""A node's side of a swarm: the node asks the tracker for an image or a file, then starts a peer in a forked process.

When this node has every blob, the peer goes on uploading. The peer ends at the latest with the process that
started it.
"""

from __future__ import annotations

import math
import os
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence

from enroot_py.base import log
from enroot_py.base.errors import ConfigError, ImageError, RegistryError
from enroot_py.features.swarm import wire
from enroot_py.features.swarm.background import run_in_background
from enroot_py.features.swarm.invitation import Invitation
from enroot_py.features.swarm.loop import TO_TRACKER, Connection, Loop
from enroot_py.features.swarm.messages import Answer, Come, Documents, File, Refused
from enroot_py.features.swarm.peer_process import PeerProcess, close_others
from enroot_py.features.swarm.spool import Spool
from enroot_py.features.swarm.wire import MAX_TRACKER_BYTES
from enroot_py.registry import authorization

_CONNECT_TIMEOUT_S = 3.0
_ANSWER_TIMEOUT_S = 20.0  # the tracker may have to ask the registry first
_NOTICE_AFTER_S = 4.0


class _NoTracker(Exception):
    """The tracker cannot be reached."""


class TrackerClient(ABC):
    """A node that srun has invited to a swarm, and its connection to the tracker."""

    RETRY_WAITS_S: tuple[float, ...] = (0.2, 1.0)  # upper limits of the random wait after each failed try

    def __init__(self, invitation: Invitation) -> None:
        self._invitation = invitation
        self._loop: Loop | None = None
        self._tracker: Connection | None = None
        self._reason = self._hint = ""  # why this node has no tracker; the hint is "" unless this host is the cause

    @abstractmethod
    def accept_answer(self, answer: Answer) -> None:
        """Store the tracker's answer. Raises ValueError if it is of no use for this node."""

    def join(self, *, lacks: bool = True) -> None:
        """Ask the tracker for the image. If all tries fail, this node has no tracker. Raises RegistryError.

        ``lacks``: this node lacks blobs of the image.
        """
        tracker = f"{self._invitation.host}:{self._invitation.port}"
        for wait in self.RETRY_WAITS_S:
            try:
                self._ask(lacks)
            except _NoTracker as e:
                self._reason = str(e)
                log.debug(f"swarm: {tracker}: cannot join: {e}")
            except ConfigError as e:
                self._reason, self._hint = str(e), e.hint
                log.info(f"{e}: this node does without a swarm")
                log.hint(e.hint)
                return
            except (TypeError, ValueError, RecursionError, ImageError) as e:
                self._reason = str(e)
                log.debug(f"swarm: {tracker}: cannot join: {type(e).__name__}: {e}")
                return
            if self._tracker is not None:
                return
            time.sleep(random.uniform(0, wait))

    def _ask(self, lacks: bool) -> None:
        """Connect to the tracker and wait for its answer.

        Raises _NoTracker, PenrootError, and any exception that a wrong answer causes.
        """
        loop = Loop(self._invitation.swarm, self._invitation.node, self._invitation.ports)
        tracker = loop.connect(TO_TRACKER, (self._invitation.host, self._invitation.port))
        tracker.max_bytes = MAX_TRACKER_BYTES
        reason = "no answer"
        notice_at = time.monotonic() + _NOTICE_AFTER_S
        deadline = time.monotonic() + _CONNECT_TIMEOUT_S
        answer: Answer | None = None

        def on_message(message: Mapping[str, object]) -> None:
            nonlocal answer
            answer = answer or wire.decode(message, Documents, File, Refused)
            loop.running = False

        def on_close(why: str) -> None:
            nonlocal reason
            reason, loop.running = why, False

        def on_ready() -> None:
            nonlocal deadline
            # A node that lacks nothing waits until another node asks for the image.
            deadline = time.monotonic() + _ANSWER_TIMEOUT_S if lacks else math.inf
            tracker.send(wire.encode(Come(lacks)))

        def tick(now: float) -> None:
            nonlocal notice_at
            if lacks and now >= notice_at:
                notice_at = math.inf
                log.info(f"waiting for the tracker {tracker.host}, which asks the registry for the image")
            loop.running = loop.running and now < deadline

        tracker.on_message, tracker.on_close, tracker.on_ready, loop.tick = on_message, on_close, on_ready, tick
        loop.run()
        try:
            if answer is None:
                raise _NoTracker(reason)
            if isinstance(answer, Refused) and answer.final:
                raise RegistryError(answer.reason, hint=answer.hint)
            self.accept_answer(answer)
            if isinstance(answer, Documents) and answer.tokens:
                authorization.know(answer.tokens)
            self._loop, self._tracker = loop, tracker
        finally:
            if self._tracker is None:
                tracker.close()
                loop.abandon()

    def leave(self) -> None:
        """Close the connection to the tracker."""
        if self._tracker is not None and self._loop is not None:
            self._tracker.close()
            self._loop.abandon()
            self._tracker = self._loop = None


class SwarmClient(TrackerClient):
    """A node whose peer downloads and uploads blobs."""

    _spool: Spool | None = None

    @abstractmethod
    def new_spool(self, lacking: Sequence[int]) -> Spool:
        """Return a spool for this node, which lacks the blobs ``lacking``. Raises OSError."""

    @abstractmethod
    def fetch(self, blob: int, start: int) -> Iterable[bytes]:
        """Return the bytes of a blob from the offset ``start`` on. Do not download them from other peers."""

    def start_peer(self, lacking: Sequence[int]) -> Spool:
        """Start a forked peer that downloads the blobs ``lacking``. Return its spool. Raises OSError."""
        assert self._tracker
        self._spool = self.new_spool(lacking)
        self._spool.peer_pipe, writer = os.pipe2(os.O_CLOEXEC)
        run_in_background(lambda: self._run_forked_peer(writer))
        os.close(writer)
        self._tracker.abandon()
        return self._spool

    def _run_forked_peer(self, pipe: int) -> None:
        assert self._spool and self._loop and self._tracker
        # Close the locks of the store, and the pipes on which other processes wait for an end of file.
        close_others({pipe, self._tracker.fileno(), self._loop.fileno(), 0, 1, 2, *self._spool.descriptors})
        self.peer().run()

    def lend(self) -> None:
        """Upload the blobs of this node, which has the whole image, while other nodes need them.

        Raises PenrootError, OSError.
        """
        close_others({0, 1, 2})
        self.join(lacks=False)
        if self._tracker is not None:
            self.peer().run()

    def peer(self, rate: float = math.inf) -> PeerProcess:
        """Return the peer of this process. It lacks no blob, unless start_peer() was called before. Raises OSError."""
        assert self._loop and self._tracker
        self._spool = self._spool or self.new_spool(())
        self._loop.running = True
        return PeerProcess(self._loop, self._tracker, self._spool, self.fetch, rate)
