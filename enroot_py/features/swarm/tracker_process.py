"""The tracker as a process: sockets around the decisions of tracker.py. It ends when nobody needs it."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from threading import Thread
from typing import NoReturn, Protocol

from enroot_py.base import linux, log
from enroot_py.base.errors import ImageError, PenrootError, RefusedError
from enroot_py.features.swarm import messages, wire
from enroot_py.features.swarm.invitation import Swarm
from enroot_py.features.swarm.loop import TO_TRACKER, Connection, Loop
from enroot_py.features.swarm.messages import SEED, Answer, Come, FromTracker, Progress, Refused
from enroot_py.features.swarm.peer_process import close_others
from enroot_py.features.swarm.tracker import Tracker
from enroot_py.features.swarm.wire import WireError

TRACKER = 0xFFFFFFFF  # its number: no node's


@dataclass(frozen=True, slots=True)
class Documents:
    """What all nodes need to know of an image: its manifest, the digest that its name has, and its config."""

    named: str
    manifest: bytes
    config: bytes
    architecture: str
    sizes: Sequence[int]  # bytes of its layers
    tokens: str  # what TOKENS had, as JSON
    seed_only: bool = False  # nobody has its blobs but the tracker's host, and nodes that keep them
    evidence: bytes = b""  # signatures, if the policy of a node asks for them: store/policies.py

    def message(self) -> Answer:
        known = (self.manifest, self.config, self.evidence, self.tokens)
        return messages.Documents(self.named, self.architecture, *known)


_MOST = 1 << 20  # bytes of a manifest, a config and signatures, which go to each node


class Home(Protocol):
    """What the tracker's host does for the nodes."""

    @property
    def seed_descriptors(self) -> Collection[int]:
        """Descriptors that the seed needs."""

    def documents(self) -> Documents:
        """Called when the first of them asks. Raises PenrootError."""

    def show(self, image: Documents, progress: Callable[[], Progress], *, ended: bool) -> None:
        """Called some times in a second; ``ended``: all have the image."""

    def seed(self) -> None:
        """Called in a process of its own where the nodes get nothing from the registry."""


class TrackerProcess:
    """The tracker of an image for the nodes of a step. Raises OSError."""

    def __init__(self, swarm: Swarm, host: Home, listener: int) -> None:
        """``listener`` is a socket."""
        self._loop = Loop(swarm, TRACKER)
        self._host = host
        self._nodes = swarm.nodes
        self._seeded = False
        self._tracker: Tracker | None = None
        self._image: Answer | None = None
        self._documents: Documents | None = None
        self._is_learning = False
        self._curious: list[Connection] = []  # who waits for it
        self._peers: dict[int, Connection] = {}
        self._owners: set[int] = set()  # nodes that have come with all of it
        self._loop.listen(TO_TRACKER, socket.socket(fileno=listener), self._accept)
        self._loop.tick = self._tick

    def serve(self, lifeline: int) -> None:
        """Until the other end of a descriptor is closed, or all nodes have the image and have left."""
        self._loop.watch(lifeline, selectors.EVENT_READ, lambda events: self._end())
        self._loop.run()
        if self._documents and self._tracker and self._tracker.all_have_it:
            self._host.show(self._documents, self._tracker.progress, ended=True)

    @property
    def all_have_it(self) -> bool:
        """Whether each node of the step has come and lacks nothing any more."""
        if self._tracker is None:
            return len(self._owners) == self._nodes
        return self._tracker.all_have_it

    def _end(self) -> None:
        self._loop.running = False

    def _tick(self, now: float) -> None:
        if self._tracker is not None:
            assert self._documents
            self._say(self._tracker.tick(now))
            if self._tracker.wants_seed and not self._seeded:
                self._seeded = True
                parent = os.getpid()
                if os.fork() == 0:
                    self._become_seed(parent)
            self._host.show(self._documents, self._tracker.progress, ended=self.all_have_it)
        if self.all_have_it and (self._tracker is None or not self._peers.keys() - {SEED}):
            self._end()

    def _become_seed(self, parent: int) -> NoReturn:
        """Do without what is the tracker's, and end with it."""
        try:
            linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(0)
            close_others((0, 1, 2, *self._host.seed_descriptors))
            self._host.seed()
        except Exception as e:  # noqa: BLE001 - the end of a process
            log.debug(f"swarm: {type(e).__name__}: {e}")
        finally:
            os._exit(0)

    def _accept(self, peer: Connection) -> None:
        self._peers[peer.node] = peer
        peer.heard = lambda message: self._greeted(peer, message)
        peer.gone = lambda why: self._gone(peer)

    def _greeted(self, peer: Connection, message: Mapping[str, object]) -> None:
        """A peer says whether it lacks something of the image; what that is it knows when it knows the image."""
        lacks = wire.decode(message, Come).lacks
        peer.heard = lambda message: self._heard(peer, message)
        if not lacks and peer.node != SEED:
            self._owners.add(peer.node)
        if self._image:
            self._introduce(peer)
            return
        self._curious.append(peer)
        if lacks and not self._is_learning:
            self._is_learning = True
            learned, told = os.pipe2(os.O_CLOEXEC)
            answer: list[Documents | PenrootError] = []
            self._loop.watch(learned, selectors.EVENT_READ, lambda events: self._learned(learned, answer))
            Thread(target=self._learn, args=(told, answer), daemon=True).start()  # others may come meanwhile

    def _learn(self, told: int, answer: list[Documents | PenrootError]) -> None:
        """What all nodes need to know of the image, or why nobody can have it, before the end of a pipe."""
        try:
            documents = self._host.documents()
            if len(documents.manifest) + len(documents.config) + len(documents.evidence) > _MOST:
                raise ImageError("its documents are too long for a swarm")  # each node asks for them
            answer.append(documents)
        except PenrootError as e:
            answer.append(e)
        finally:
            os.close(told)

    def _learned(self, learned: int, answer: Sequence[Documents | PenrootError]) -> None:
        self._loop.watch(learned, 0, lambda events: None)
        os.close(learned)
        known = answer[0] if answer else ImageError("")
        if isinstance(known, PenrootError):
            final = isinstance(known, RefusedError)
            self._image = Refused(str(known), known.hint, final)
        else:
            self._documents, self._image = known, known.message()
            self._tracker = Tracker(known.sizes, self._nodes, self._owners, known.seed_only)
        for peer in self._curious:
            self._introduce(peer)
        self._curious.clear()

    def _introduce(self, peer: Connection) -> None:
        """Say to a peer what there is to know; why nobody gets the image, to the first that lacks it, which says it."""
        image = self._image
        assert image
        if isinstance(image, Refused):
            unsaid = Refused("", "", image.final)
            if peer.node in self._owners or peer.node == SEED:
                image = unsaid
            else:
                self._image = unsaid
        peer.say(wire.encode(image))

    def _heard(self, peer: Connection, message: Mapping[str, object]) -> None:
        if self._tracker is None:
            raise WireError("there is no image")
        event = wire.decode_from_peer(message, "" if peer.node == SEED else peer.host)
        self._say(self._tracker.handle(time.monotonic(), peer.node, event))

    def _gone(self, peer: Connection) -> None:
        if self._peers.get(peer.node) is peer:
            del self._peers[peer.node]
            self._left(peer.node)

    def _left(self, node: int) -> None:
        if self._tracker is not None:
            self._say(self._tracker.left(time.monotonic(), node))

    def _say(self, messages: Sequence[tuple[int, FromTracker]]) -> None:
        for node, message in messages:
            if node in self._peers:
                self._peers[node].say(wire.encode(message))
