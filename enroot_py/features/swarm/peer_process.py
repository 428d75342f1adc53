"""A peer as a process: sockets and files around the decisions of peer.py."""

from __future__ import annotations

import math
import os
import select
import selectors
import signal
import socket
import struct
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NoReturn

from enroot_py.base import linux
from enroot_py.base.errors import PenrootError, RefusedError
from enroot_py.base.fds import Fd
from enroot_py.features.swarm import peer, wire
from enroot_py.features.swarm.loop import TO_PEER, Connection, Loop, listener
from enroot_py.features.swarm.messages import Joined, Link, Routes, Take
from enroot_py.features.swarm.spool import PIECE, Spool
from enroot_py.features.swarm.trees import MAX_TREES
from enroot_py.features.swarm.wire import LONG, WireError

_HEAD = struct.Struct(">HHII")  # blob, tree, piece, length: before its bytes

_MORE = b"."  # from a process that fetches
_MOST = 500  # characters of a reason: they are read at once, pipe(7)


def close_others(keep: Collection[int]) -> None:
    """Close the files of all descriptors but these, in a process that has just been forked.

    Their numbers stay taken: objects that the other process left here still have them, and whatever had one of these
    numbers next would be closed at the end of such an object.
    """
    with Fd(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)) as null:
        for fd in map(int, os.listdir("/proc/self/fd")):
            if fd not in keep and fd != null:
                os.dup2(null, fd, inheritable=False)


# A blob's bytes from an offset on, from the registry.
Source = Callable[[int, int], Iterable[bytes]]


class PeerProcess:
    """The part of one of ``nodes`` nodes. Blobs that are ``spool.lacking`` are wanted here."""

    def __init__(self, loop: Loop, tracker: Connection, spool: Spool, source: Source, rate: float = math.inf) -> None:
        """``rate``: bytes a second that others are given at most."""
        self._loop, self._tracker, self._spool, self._source = loop, tracker, spool, source
        others = listener(loop.ports)
        loop.listen(TO_PEER, others, self._accept, most=2)  # a new connection, and an old one that is closing
        self._peer = peer.Peer(self._joined(others), loop.swarm.nodes)
        self._parents: dict[int, _Parent] = {}
        self._children: list[_Child] = []
        self._rate = self.allowance = rate / Loop.TICKS
        self._fetching: dict[int, tuple[int, int]] = {}  # by blob: process and pipe
        self._counted: dict[int, int] = {}  # by blob: bytes up to which they are counted
        self._done = False
        tracker.most = LONG
        tracker.heard = self._heard
        tracker.gone = lambda why: self._act(self._peer.tracker_lost(time.monotonic()))
        loop.tick = self._tick
        self._act(self._peer.begin(time.monotonic()))

    def _joined(self, listener: socket.socket) -> Joined:
        address = ("", listener.getsockname()[1])
        lacks = tuple(blob for blob in self._spool.lacking if blob not in self._spool.complete)
        return Joined(address, lacks, tuple(self._spool.complete), socket.gethostname())

    def run(self) -> None:
        """Serve until nobody needs this node."""
        try:
            self._loop.run()
        finally:
            for blob in list(self._fetching):
                self._stop(blob)

    # -- what happens

    def _tick(self, now: float) -> None:
        if self.allowance < self._rate:
            self.allowance = min(self._rate, self.allowance + self._rate)
            self._came(None)
        self._act(self._peer.tick(now))

    def _heard(self, message: Mapping[str, object]) -> None:
        said = wire.decode_from_tracker(message)
        if not all(blob < len(self._spool.sizes) for blob in getattr(said, "blobs", ())):
            raise WireError("a blob that is not there")
        if isinstance(said, Routes) and said.trees != self._spool.trees:
            self._spool.plant(said.trees)
            for child in list(self._children):
                child.planted()
        self._act(self._peer.handle(time.monotonic(), said))
        self._came(None)  # it may lack nothing that has a byte

    def _accept(self, connection: Connection) -> None:
        self._children.append(_Child(self, connection, self._spool, self._children))

    def took(self, link: Link, blob: int, count: int) -> None:
        """A piece has come from a parent."""
        self._peer.downloaded(time.monotonic(), link, count)
        self._came(link.tree)

    def write(self, blob: int, data: memoryview, offset: int) -> None:
        """Where this node has no room, it is no peer any more: what is missing comes from the registry, as before."""
        try:
            self._spool.write(blob, data, offset)
        except OSError as e:
            self._loop.running = False
            raise WireError(f"a blob on its way: {e.strerror}") from e

    def fetches(self, blob: int) -> bool:
        return blob in self._fetching

    def lost(self, parent: _Parent) -> None:
        if self._parents.get(parent.node) is parent:
            del self._parents[parent.node]
        for link in list(parent.links):
            self._act(self._peer.lost(time.monotonic(), link))

    def reached(self, link: Link) -> None:
        self._act(self._peer.reached(time.monotonic(), link))

    def _came(self, tree: int | None) -> None:
        for child in self._children:
            child.came(tree)
        if (
            not self._done
            and self._spool.lacking
            and self._spool.trees
            and all(self._spool.there(blob) >= self._spool.sizes[blob] for blob in self._spool.lacking)
        ):
            self._done = True
            for blob in self._fetching:
                self._count(blob)
            self._act(self._peer.finished(time.monotonic()))

    # -- what to do then

    def _act(self, actions: Iterable[peer.Action]) -> None:
        for action in actions:
            if isinstance(action, peer.SendToTracker):
                self._tracker.say(wire.encode(action.message))
            elif isinstance(action, peer.Download):
                self._parent(action.link).take(action.link, action.blobs)
            elif isinstance(action, peer.StopDownload):
                if action.link.parent in self._parents:
                    self._parents[action.link.parent].drop(action.link)
            elif isinstance(action, peer.FetchFromRegistry):
                self._get(action.blobs)
            elif isinstance(action, peer.GiveUp):
                self._spool.give_up(action.reason, action.hint)
                self._loop.running = False
            else:
                self._loop.running = False

    def _parent(self, link: Link) -> _Parent:
        if link.parent not in self._parents:
            address = (link.address[0] or self._tracker.host, link.address[1])
            self._parents[link.parent] = _Parent(self, link.parent, self._loop.connect(TO_PEER, address), self._spool)
        return self._parents[link.parent]

    def _get(self, blobs: Sequence[int]) -> None:
        """FetchBlobs these from the registry, each by a process of its own, and no other."""
        for blob in [blob for blob in self._fetching if blob not in blobs]:
            self._stop(blob)
        for blob in blobs:
            if blob not in self._fetching and self._spool.there(blob) < self._spool.sizes[blob]:
                self._start(blob)
        self._peer.fetched(0, self._unfetched)

    def _start(self, blob: int) -> None:
        """Let a process write a blob into its file; a byte says that there is more, and a line why there is not."""
        self._spool.fetches(blob)
        there = self._spool.there(blob)
        read, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        process, parent = 0, os.getpid()
        process = os.fork()
        if process == 0:
            os.set_blocking(write, True)
            _fetch(self._spool, blob, self._source, write, parent)
        os.close(write)
        self._fetching[blob] = (process, read)
        self._counted[blob] = there
        self._loop.watch(read, selectors.EVENT_READ, lambda events: self._fetched(blob))

    def _fetched(self, blob: int) -> None:
        data = os.read(self._fetching[blob][1], 65536)
        whole = self._spool.fetched(blob)
        self._count(blob)
        words = data.lstrip(_MORE).decode("utf-8", "replace")
        if words or not data:
            self._stop(blob)
        if words or not data and not whole:
            words = words or "n\0the process that fetched a blob was killed"
            refused, reason, hint = [*words.split("\0"), "", ""][:3]
            self._act(self._peer.failed(blob, refused=refused == "y", reason=reason, hint=hint))
        self._came(None)

    def _count(self, blob: int) -> None:
        """Tell what has come of a blob from the registry since it was told."""
        there = self._spool.there(blob)
        new, self._counted[blob] = there - self._counted[blob], there
        self._peer.fetched(new, self._unfetched)

    @property
    def _unfetched(self) -> int:
        """Bytes that the processes have still to fetch."""
        return sum(self._spool.sizes[blob] - self._counted[blob] for blob in self._fetching)

    def _stop(self, blob: int) -> None:
        process, pipe = self._fetching.pop(blob)
        self._loop.watch(pipe, 0, lambda events: None)
        os.close(pipe)
        os.kill(process, 9)
        os.waitpid(process, 0)


def _fetch(spool: Spool, blob: int, source: Source, tell: int, parent: int) -> NoReturn:
    """What a process does that fetches a blob from where it ends, without what is its parent's, and ends with it."""
    try:
        linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        close_others((0, 1, 2, tell, spool.fd(blob)))
        for data in source(blob, spool.there(blob)):
            spool.append(blob, data)
            os.write(tell, _MORE)
    except PenrootError as e:
        words = ("y" if isinstance(e, RefusedError) else "n", str(e)[:_MOST], e.hint[:_MOST])
        os.write(tell, "\0".join(words).encode("ascii", "backslashreplace")[: select.PIPE_BUF])
    except OSError as e:
        os.write(tell, f"n\0a blob on its way: {e.strerror}\0".encode())
    finally:
        os._exit(0)


class _Parent:
    """A connection by which pieces come."""

    def __init__(self, process: PeerProcess, node: int, connection: Connection, spool: Spool) -> None:
        self.node = node
        self.links: dict[Link, frozenset[int]] = {}
        self._process, self._connection, self._spool = process, connection, spool
        self._ready = False
        self._piece: tuple[int, int, int, int] | None = None  # blob, tree, offset and bytes that are still to come
        self._length = 0
        connection.ready = self._start
        connection.gone = lambda why: process.lost(self)
        connection.took = self._take_in

    def take(self, link: Link, blobs: frozenset[int]) -> None:
        self.links[link] = blobs
        if self._ready:
            self._ask(link)

    def drop(self, link: Link) -> None:
        if self.links.pop(link, None) is not None and self._ready:
            self._connection.say(wire.encode(Take(link.tree, self._spool.trees, ())))
        if not self.links:
            self._connection.close()
            self._process._parents.pop(self.node, None)

    def _start(self) -> None:
        self._ready = True
        if self._connection.node != self.node:
            self._connection.fail(f"it is node {self._connection.node}, not {self.node}")
            return
        for link in self.links:
            self._ask(link)

    def _ask(self, link: Link) -> None:
        self._process.reached(link)
        wanted = tuple((blob, self._spool.count(blob, link.tree)) for blob in sorted(self.links[link]))
        self._connection.say(wire.encode(Take(link.tree, self._spool.trees, wanted)))

    def _take_in(self, data: bytearray) -> int:
        """Bytes of ``data`` that were used."""
        used = 0
        while True:
            if self._piece is None:
                if len(data) - used < _HEAD.size:
                    return used
                blob, tree, piece, length = _HEAD.unpack_from(data, used)
                used += _HEAD.size
                self._expect(blob, tree, piece, length)
            assert self._piece
            blob, tree, offset, left = self._piece
            part = memoryview(data)[used : used + left]
            count = len(part)
            if offset >= 0 and count:
                self._process.write(blob, part, offset)
            part.release()
            used += count
            if count < left:
                self._piece = (blob, tree, offset + count if offset >= 0 else -1, left - count)
                return used
            self._piece = None
            link = next((link for link in self.links if link.tree == tree), None)
            if offset >= 0 and link is not None:
                self._spool.wrote(blob, offset // PIECE)
                self._process.took(link, blob, self._length)

    def _expect(self, blob: int, tree: int, piece: int, length: int) -> None:
        """A piece begins: the next one of its blob and tree, or one that came from elsewhere meanwhile."""
        spool = self._spool
        if blob >= len(spool.sizes) or tree >= spool.trees or spool.tree(blob, piece) != tree:
            raise WireError("a piece of something else")
        if not length or length != spool.length(blob, piece):
            raise WireError(f"a piece of {length} bytes")
        expected = spool.piece(blob, tree, spool.count(blob, tree))
        if piece > expected:
            raise WireError("a piece too early")
        takes = any(link.tree == tree for link in self.links) and not self._process.fetches(blob)
        wanted = piece == expected and takes
        self._length = length
        self._piece = (blob, tree, piece * PIECE if wanted else -1, length)


class _Child:
    """A connection by which pieces go."""

    def __init__(self, process: PeerProcess, connection: Connection, spool: Spool, children: list[_Child]) -> None:
        self._process, self._connection, self._spool = process, connection, spool
        self._wants: dict[int, dict[int, int]] = {}  # by tree and blob: pieces of it that it has
        self._order: list[tuple[int, int]] = []  # trees and blobs of ``_wants``
        self._turn = 0
        self._early: list[Take] = []  # what it has said before there was a plan
        connection.heard = lambda message: self._asked(wire.decode(message, Take))
        connection.more = self._more
        connection.gone = lambda why: children.remove(self)

    def planted(self) -> None:
        """There is a plan: what it has asked for before is known now."""
        early, self._early = self._early, []
        try:
            for take in early:
                self._asked(take)
        except WireError as e:  # the tracker, whose plan it is, has nothing to do with it
            self._connection.fail(str(e))

    def _asked(self, take: Take) -> None:
        if not self._spool.trees and len(self._early) < MAX_TREES:
            self._early.append(take)
            return
        if take.tree >= max(self._spool.trees, 1):
            raise WireError("it asks for a tree that is not there")
        if take.wanted and take.trees != self._spool.trees:
            raise WireError("it knows another plan")
        self._wants[take.tree] = {blob: count for blob, count in take.wanted if blob < len(self._spool.sizes)}
        self._order = [(number, blob) for number, blobs in self._wants.items() for blob in blobs]
        self._turn = 0
        self._connection.wake()

    def came(self, tree: int | None) -> None:
        """Pieces of a tree, or of all, are there."""
        if tree is None or tree in self._wants:
            self._connection.wake()

    def _more(self) -> bool:
        """Send the next piece that is there, of the blobs in turn."""
        if self._process.allowance <= 0:
            return False  # until the next tick
        for _ in self._order:
            self._turn = (self._turn + 1) % len(self._order)
            tree, blob = self._order[self._turn]
            if self._wants[tree][blob] < self._spool.count(blob, tree):
                break
        else:
            return False
        piece = self._spool.piece(blob, tree, self._wants[tree][blob])
        length = self._spool.length(blob, piece)
        self._wants[tree][blob] += 1
        self._process.allowance -= length
        head = _HEAD.pack(blob, tree, piece, length)
        self._connection.send(head, self._spool.fd(blob), piece * PIECE, length)
        return True
