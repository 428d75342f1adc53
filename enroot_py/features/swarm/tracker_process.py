"""The process of the tracker: sockets around the decisions of tracker.py."""

from __future__ import annotations

import _socket
import os
import selectors
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from threading import Thread
from typing import Protocol

from enroot_py.base.errors import ImageError, PenrootError, RefusedError
from enroot_py.features.swarm import wire
from enroot_py.features.swarm.background import run_in_background
from enroot_py.features.swarm.invitation import Swarm
from enroot_py.features.swarm.loop import TO_TRACKER, Connection, Loop
from enroot_py.features.swarm.messages import SEED, Answer, Come, Documents, File, FromTracker, Progress, Refused
from enroot_py.features.swarm.peer_process import close_others
from enroot_py.features.swarm.tracker import Tracker
from enroot_py.features.swarm.wire import WireError

TRACKER = 0xFFFFFFFF  # the tracker's node number, which no node has
_MAX_DOCUMENT_BYTES = 1 << 20  # the manifest, config and signatures together; each node gets them


class Host(Protocol):
    """The owner of a tracker: see offer.Offer."""

    @property
    def seed_descriptors(self) -> Collection[int]:
        """Descriptors that the seed needs."""

    def documents(self) -> tuple[Documents | File, Sequence[int]]:
        """When the first node asks, return the answer for all nodes and the sizes of the blobs. Raises PenrootError."""

    def show(self, size: int, progress: Callable[[], Progress], *, ended: bool) -> None:
        """Show the progress. Called a few times a second. ``ended``: all nodes have the image."""

    def seed(self) -> None:
        """Be the seed. Called in a forked process when the tracker wants a seed."""


class TrackerProcess:
    """The tracker of an image for the nodes of a step. Raises OSError."""

    def __init__(self, swarm: Swarm, host: Host, listener: _socket.socket) -> None:
        self._loop = Loop(swarm, TRACKER)
        self._host = host
        self._nodes = swarm.nodes
        self._has_seed = False
        self._tracker: Tracker | None = None
        self._size = 0  # of all blobs
        self._answer: Answer | None = None
        self._is_asking = False
        self._waiting: list[Connection] = []  # peers that wait for the answer
        self._peers: dict[int, Connection] = {}
        self._ready: set[int] = set()  # nodes that had the whole image when they connected
        self._loop.listen(TO_TRACKER, listener, self._accept)
        self._loop.tick = self._tick

    def serve(self, lifeline: int) -> None:
        """Serve until the other end of ``lifeline`` is closed, or all nodes have the image and have left."""
        self._loop.watch(lifeline, selectors.EVENT_READ, lambda events: self._end())
        self._loop.run()
        if self._tracker and self._tracker.all_have_it:
            self._host.show(self._size, self._tracker.progress, ended=True)

    @property
    def all_have_it(self) -> bool:
        """Return whether each node of the step has every blob."""
        return self._tracker.all_have_it if self._tracker else len(self._ready) == self._nodes

    def _end(self) -> None:
        self._loop.running = False

    def _tick(self, now: float) -> None:
        if self._tracker is not None:
            self._send(self._tracker.tick(now))
            if self._tracker.wants_seed and not self._has_seed:
                self._has_seed = True
                run_in_background(self._seed, silent=False)
            self._host.show(self._size, self._tracker.progress, ended=self.all_have_it)
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
        """Handle a peer's first message. It says only whether the node lacks any blob: Joined lists the blobs later."""
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
            result: list[tuple[Answer, Sequence[int]]] = []
            self._loop.watch(reader, selectors.EVENT_READ, lambda events: self._finish_asking(reader, result))
            Thread(target=self._ask_host, args=(writer, result), daemon=True).start()  # more peers may join meanwhile

    def _ask_host(self, pipe: int, result: list[tuple[Answer, Sequence[int]]]) -> None:
        """Append the answer and the sizes of the blobs to the result. Then close a pipe, which wakes the loop."""
        try:
            answer, sizes = self._host.documents()
            texts = (answer.manifest, answer.config, answer.evidence) if isinstance(answer, Documents) else ()
            if sum(map(len, texts)) > _MAX_DOCUMENT_BYTES:
                raise ImageError("the image's manifest, config and signatures are too long for a swarm")
            result.append((answer, sizes))
        except PenrootError as e:
            result.append((Refused(str(e), e.hint, isinstance(e, RefusedError)), ()))
        finally:
            os.close(pipe)

    def _finish_asking(self, pipe: int, result: Sequence[tuple[Answer, Sequence[int]]]) -> None:
        self._loop.watch(pipe, 0, lambda events: None)
        os.close(pipe)
        self._answer, sizes = result[0] if result else (Refused("", "", False), ())
        if not isinstance(self._answer, Refused):
            self._size = sum(sizes)
            self._tracker = Tracker(sizes, self._nodes, self._ready, isinstance(self._answer, File))
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
