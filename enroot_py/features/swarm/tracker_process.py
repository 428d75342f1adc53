"""The process of the tracker: sockets around the decisions of tracker.py."""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from threading import Thread
from typing import Protocol

from enroot_py.base.errors import ImageError, PenrootError, RefusedError
from enroot_py.features.swarm import messages, wire
from enroot_py.features.swarm.background import run_in_background
from enroot_py.features.swarm.invitation import Swarm
from enroot_py.features.swarm.loop import TO_TRACKER, Connection, Loop
from enroot_py.features.swarm.messages import SEED, Answer, Come, FromTracker, Progress, Refused
from enroot_py.features.swarm.peer_process import close_others
from enroot_py.features.swarm.tracker import Tracker
from enroot_py.features.swarm.wire import WireError

TRACKER = 0xFFFFFFFF  # the tracker's node number, which no node has
_MAX_DOCUMENT_BYTES = 1 << 20  # of a manifest, a config and signatures: each node gets them


@dataclass(frozen=True, slots=True)
class ImageDocuments:
    """The tracker's documents of a registry image, whose name resolves to the digest ``named``."""

    named: str
    manifest: bytes
    config: bytes
    architecture: str
    sizes: Sequence[int]  # bytes of the layers
    tokens: str  # the registry tokens, as JSON: authorization.tokens()
    evidence: bytes = b""  # signatures, if a node's policy asks for them: store/policies.py

    def message(self) -> Answer:
        documents = (self.manifest, self.config, self.evidence, self.tokens)
        return messages.Documents(self.named, self.architecture, *documents)


@dataclass(frozen=True, slots=True)
class FileDocuments:
    """The tracker's documents of a file that only the seed has. ``named`` is the digest of the file."""

    named: str
    sizes: Sequence[int]
    manifest = config = evidence = b""

    def message(self) -> Answer:
        return messages.File(self.named, self.sizes[0])


Shared = ImageDocuments | FileDocuments


class Host(Protocol):
    """The tracker's host."""

    @property
    def seed_descriptors(self) -> Collection[int]:
        """Descriptors that the seed needs."""

    def documents(self) -> Shared:
        """Called when the first node asks. Raises PenrootError."""

    def show(self, image: Shared, progress: Callable[[], Progress], *, ended: bool) -> None:
        """Called a few times a second. ``ended``: all nodes have the image."""

    def seed(self) -> None:
        """Called in a forked process if no node can reach the registry."""


class TrackerProcess:
    """The tracker of an image for the nodes of a step. Raises OSError."""

    def __init__(self, swarm: Swarm, host: Host, listener: int) -> None:
        """``listener`` is a socket's descriptor."""
        self._loop = Loop(swarm, TRACKER)
        self._host = host
        self._nodes = swarm.nodes
        self._has_seed = False
        self._tracker: Tracker | None = None
        self._documents: Shared | None = None
        self._answer: Answer | None = None
        self._is_asking = False
        self._waiting: list[Connection] = []  # for the answer
        self._peers: dict[int, Connection] = {}
        self._ready: set[int] = set()  # nodes that had the whole image when they connected
        self._loop.listen(TO_TRACKER, socket.socket(fileno=listener), self._accept)
        self._loop.tick = self._tick

    def serve(self, lifeline: int) -> None:
        """Serve until the other end of a descriptor is closed, or all nodes have the image and have left."""
        self._loop.watch(lifeline, selectors.EVENT_READ, lambda events: self._end())
        self._loop.run()
        if self._documents and self._tracker and self._tracker.all_have_it:
            self._host.show(self._documents, self._tracker.progress, ended=True)

    @property
    def all_have_it(self) -> bool:
        """Whether each node of the step has every blob."""
        return self._tracker.all_have_it if self._tracker else len(self._ready) == self._nodes

    def _end(self) -> None:
        self._loop.running = False

    def _tick(self, now: float) -> None:
        if self._tracker is not None:
            assert self._documents
            self._send(self._tracker.tick(now))
            if self._tracker.wants_seed and not self._has_seed:
                self._has_seed = True
                run_in_background(self._seed, silent=False)
            self._host.show(self._documents, self._tracker.progress, ended=self.all_have_it)
        if self.all_have_it and (self._tracker is None or not self._peers.keys() - {SEED}):
            self._end()

    def _seed(self) -> None:
        close_others((0, 1, 2, *self._host.seed_descriptors))
        self._host.seed()

    def _accept(self, peer: Connection) -> None:
        self._peers[peer.node] = peer
        peer.on_message = lambda message: self._handle_first(peer, message)
        peer.on_close = lambda why: self._closed(peer)

    def _handle_first(self, peer: Connection, message: Mapping[str, object]) -> None:
        """Handle a peer's first message. It only tells whether the node lacks any blob; Joined lists the blobs."""
        lacks = wire.decode(message, Come).lacks
        peer.on_message = lambda message: self._handle(peer, message)
        if not lacks and peer.node != SEED:
            self._ready.add(peer.node)
        if self._answer:
            self._send_answer(peer)
            return
        self._waiting.append(peer)
        if lacks and not self._is_asking:
            self._is_asking = True
            reader, writer = os.pipe2(os.O_CLOEXEC)
            result: list[Shared | PenrootError] = []
            self._loop.watch(reader, selectors.EVENT_READ, lambda events: self._finish_asking(reader, result))
            Thread(target=self._ask_host, args=(writer, result), daemon=True).start()  # more peers may join meanwhile

    def _ask_host(self, pipe: int, result: list[Shared | PenrootError]) -> None:
        """Append the documents of the image, or an error, to the result and close a pipe."""
        try:
            documents = self._host.documents()
            if len(documents.manifest) + len(documents.config) + len(documents.evidence) > _MAX_DOCUMENT_BYTES:
                raise ImageError("the image's manifest, config and signatures are too long for a swarm")
            result.append(documents)
        except PenrootError as e:
            result.append(e)
        finally:
            os.close(pipe)

    def _finish_asking(self, pipe: int, result: Sequence[Shared | PenrootError]) -> None:
        self._loop.watch(pipe, 0, lambda events: None)
        os.close(pipe)
        documents = result[0] if result else ImageError("")
        if isinstance(documents, PenrootError):
            self._answer = Refused(str(documents), documents.hint, isinstance(documents, RefusedError))
        else:
            self._documents, self._answer = documents, documents.message()
            seed_only = isinstance(documents, FileDocuments)
            self._tracker = Tracker(documents.sizes, self._nodes, self._ready, seed_only)
        for peer in self._waiting:
            self._send_answer(peer)
        self._waiting.clear()

    def _send_answer(self, peer: Connection) -> None:
        """Send the answer. Only the first peer that lacks blobs gets the reason of a refusal: it reports the reason."""
        answer = self._answer
        assert answer
        if isinstance(answer, Refused):
            without_reason = Refused("", "", answer.final)
            if peer.node in self._ready or peer.node == SEED:
                answer = without_reason
            else:
                self._answer = without_reason
        peer.send(wire.encode(answer))

    def _handle(self, peer: Connection, message: Mapping[str, object]) -> None:
        if self._tracker is None:
            raise WireError("there is no image")
        event = wire.decode_from_peer(message, "" if peer.node == SEED else peer.host)
        self._send(self._tracker.handle(time.monotonic(), peer.node, event))

    def _closed(self, peer: Connection) -> None:
        if self._peers.get(peer.node) is peer:
            del self._peers[peer.node]
            if self._tracker is not None:
                self._send(self._tracker.left(time.monotonic(), peer.node))

    def _send(self, messages: Sequence[tuple[int, FromTracker]]) -> None:
        for node, message in messages:
            if node in self._peers:
                self._peers[node].send(wire.encode(message))
