"""A node's part in a swarm, whatever that brings: it meets the tracker, and a process of its own is the peer.

That one goes on to serve others when this node has all, and ends with the process that started it.
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
from enroot_py.features.swarm.wire import LONG
from enroot_py.registry import authorization

_PATIENCE = 3.0  # seconds to reach the tracker, and then it is done without
_LONGER = 20.0  # seconds until it has asked the registry
_NOTICE_AFTER_S = 4.0


class _Alone(Exception):
    """There is no tracker."""


class SwarmClient(ABC):
    """A node that is invited."""

    PATIENCE: tuple[float, ...] = (0.2, 1.0)  # seconds at most after each time that the tracker is not reached

    def __init__(self, invitation: Invitation) -> None:
        self._invitation = invitation
        self._loop: Loop | None = None
        self._tracker: Connection | None = None
        self._why = self._hint = ""  # there is no tracker, and the way out if it is here
        self._spool: Spool | None = None

    @abstractmethod
    def know(self, said: Answer) -> None:
        """Take in what the tracker has for all. Raises ValueError where that is nothing for this node."""

    @abstractmethod
    def new_spool(self, lacking: Sequence[int]) -> Spool:
        """Raises OSError."""

    @abstractmethod
    def fetch(self, blob: int, start: int) -> Iterable[bytes]:
        """A blob from a byte on, from where it comes from."""

    # -- the tracker

    def meet(self, *, lacks: bool = True) -> None:
        """Ask the tracker for what all should know, unless it cannot be reached soon. Raises RegistryError."""
        there = f"{self._invitation.host}:{self._invitation.port}"
        for wait in self.PATIENCE:
            try:
                self._ask(lacks)
            except _Alone as e:
                self._why = str(e)
                log.debug(f"swarm: {there}: {e}: alone")
            except ConfigError as e:
                self._why, self._hint = str(e), e.hint
                log.info(f"{e}: this node does without a swarm")
                log.hint(e.hint)
                return
            except (TypeError, ValueError, RecursionError, ImageError) as e:
                self._why = str(e)
                log.debug(f"swarm: {there}: {type(e).__name__}: {e}: alone")
                return
            if self._tracker is not None:
                return
            time.sleep(random.uniform(0, wait))

    def _ask(self, lacks: bool) -> None:
        """Raises _Alone where there is no tracker, PenrootError, and whatever a wrong answer makes."""
        loop = Loop(self._invitation.swarm, self._invitation.node, self._invitation.ports)
        tracker = loop.connect(TO_TRACKER, (self._invitation.host, self._invitation.port))
        tracker.most = LONG
        why = "it does not answer"
        notice = time.monotonic() + _NOTICE_AFTER_S
        until = time.monotonic() + _PATIENCE
        answer: Answer | None = None

        def heard(message: Mapping[str, object]) -> None:
            nonlocal answer
            answer = answer or wire.decode(message, Documents, File, Refused)
            loop.running = False

        def gone(reason: str) -> None:
            nonlocal why
            why, loop.running = reason, False

        def ready() -> None:  # it answers as soon as the registry has answered it
            nonlocal until
            until = time.monotonic() + _LONGER if lacks else math.inf  # until somebody else needs to know
            tracker.say(wire.encode(Come(lacks)))

        def tick(now: float) -> None:
            nonlocal notice
            if lacks and now >= notice:
                notice = math.inf
                log.info(f"waiting for the tracker {tracker.host}, which asks the registry for the image")
            loop.running = loop.running and now < until

        tracker.heard, tracker.gone, tracker.ready, loop.tick = heard, gone, ready, tick
        loop.run()
        try:
            if answer is None:
                raise _Alone(why)
            if isinstance(answer, Refused) and answer.final:
                raise RegistryError(answer.reason, hint=answer.hint)
            self.know(answer)
            if isinstance(answer, Documents) and answer.tokens:
                authorization.know(answer.tokens)
            self._loop, self._tracker = loop, tracker
        finally:
            if self._tracker is None:
                tracker.close()
                loop.abandon()

    # -- the peer

    def start(self, lacking: Sequence[int]) -> None:
        """Let a process of its own bring what is lacking. Raises OSError."""
        assert self._tracker
        self._spool = self.new_spool(lacking)
        self._spool.alive, other = os.pipe2(os.O_CLOEXEC)
        run_in_background(lambda: self._serve(other))
        os.close(other)
        self._tracker.abandon()

    def _serve(self, alive: int) -> None:
        """The peer, until nobody needs it."""
        assert self._spool and self._loop and self._tracker
        # Not the locks of the store, and what others hear the end of.
        close_others({alive, self._tracker.fileno(), self._loop.fileno(), 0, 1, 2, *self._spool.fds})
        self.peer_process(math.inf).run()

    def lend(self) -> None:
        """For a node that has all: say so, and give it to others, as far as it is kept, while they need it.

        Raises PenrootError, OSError.
        """
        close_others({0, 1, 2})
        self.meet(lacks=False)
        if self._tracker is not None:
            self._spool = self.new_spool(())
            self.peer_process(math.inf).run()

    def peer_process(self, rate: float) -> PeerProcess:
        assert self._spool and self._loop and self._tracker
        self._loop.running = True
        return PeerProcess(self._loop, self._tracker, self._spool, self.fetch, rate)
