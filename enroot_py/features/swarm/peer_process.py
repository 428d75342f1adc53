"""The process of a peer: sockets and files around the decisions of peer.py."""

from __future__ import annotations

import math
import os
import select
import selectors
import socket
import struct
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from enroot_py.base.errors import PenrootError, RefusedError
from enroot_py.base.fds import Fd
from enroot_py.features.swarm import peer, wire
from enroot_py.features.swarm.background import run_in_background
from enroot_py.features.swarm.loop import TO_PEER, Connection, Loop
from enroot_py.features.swarm.messages import Joined, Link, Routes, Take
from enroot_py.features.swarm.ports import listener
from enroot_py.features.swarm.spool import PIECE, Spool
from enroot_py.features.swarm.trees import MAX_TREES
from enroot_py.features.swarm.wire import MAX_TRACKER_BYTES, WireError

_HEADER = struct.Struct(">HHII")  # the header of a piece: blob, tree, number and length
_END = struct.Struct(">Q")  # from a fetching process: all bytes of the blob before this offset are written
_MAX_REASON_CHARACTERS = 500  # so that one atomic write holds a reason and its hint, pipe(7)

# Returns the bytes of a blob in the registry, from an offset on.
Fetch = Callable[[int, int], Iterable[bytes]]


def close_others(keep: Collection[int]) -> None:
    """Close the files of all descriptors except ``keep`` in a process that was just forked.

    Replace each file by /dev/null, so that its number stays taken. Otherwise a later file would get the number, and an
    object copied from the parent process would close that file when the object is collected.
    """
    with Fd(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)) as null:
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            if descriptor not in keep and descriptor != null:
                os.dup2(null, descriptor, inheritable=False)


class PeerProcess:
    """The peer of this node. It lacks the blobs ``spool.lacking``."""

    def __init__(self, loop: Loop, tracker: Connection, spool: Spool, fetch: Fetch, rate: float = math.inf) -> None:
        """``rate`` limits the bytes a second that the peer uploads."""
        self._loop, self._tracker, self._spool, self._fetch = loop, tracker, spool, fetch
        port = loop.listen(TO_PEER, listener(loop.ports), self._accept, max_connections=2)  # one may be closing
        self._peer = peer.Peer(self._joined(port), loop.swarm.nodes)
        self._parents: dict[int, _Parent] = {}
        self._children: list[_Child] = []
        self._rate = self.allowance = rate / Loop.TICKS  # bytes to upload: _rate in a tick, allowance in the rest of it
        self._fetching: dict[int, tuple[int, int]] = {}  # by blob: the process that fetches it, and its pipe
        self._counted: dict[int, int] = {}  # by blob: the bytes that were available at the last _count_fetched()
        self._done = False
        tracker.max_bytes = MAX_TRACKER_BYTES
        tracker.on_message = self._handle
        tracker.on_close = lambda why: self._execute(self._peer.tracker_lost(time.monotonic()))
        loop.tick = self._tick
        self._execute(self._peer.begin(time.monotonic()))

    def _joined(self, port: int) -> Joined:
        lacks = tuple(blob for blob in self._spool.lacking if blob not in self._spool.complete)
        return Joined(("", port), lacks, tuple(self._spool.complete), socket.gethostname())

    def run(self) -> None:
        """Serve until the peer ends: see the actions Leave and GiveUp."""
        try:
            self._loop.run()
        finally:
            for blob in list(self._fetching):
                self._stop_fetch(blob)

    # -- events

    def _tick(self, now: float) -> None:
        if self.allowance < self._rate:
            self.allowance = min(self._rate, self.allowance + self._rate)
            self._pieces_arrived(None)
        self._execute(self._peer.tick(now))

    def _handle(self, data: Mapping[str, object]) -> None:
        message = wire.decode_from_tracker(data)
        if not all(blob < len(self._spool.sizes) for blob in getattr(message, "blobs", ())):
            raise WireError("unknown blob")
        if isinstance(message, Routes) and message.trees != self._spool.trees:
            self._spool.set_trees(message.trees)
            for child in list(self._children):
                child.begin()
        self._execute(self._peer.handle(time.monotonic(), message))
        self._pieces_arrived(None)  # needed if all lacking blobs are empty: no piece will arrive

    def _accept(self, connection: Connection) -> None:
        self._children.append(_Child(self, connection, self._spool, self._children))

    def downloaded(self, link: Link, count: int) -> None:
        """Handle a piece of ``count`` bytes that has arrived from a parent."""
        self._peer.downloaded(time.monotonic(), link, count)
        self._pieces_arrived(link.tree)

    def write(self, blob: int, data: memoryview, offset: int) -> None:
        """Write bytes of a blob. If that fails, end the peer: readers get the rest from the registry."""
        try:
            self._spool.write(blob, data, offset)
        except OSError as e:
            self._loop.running = False
            raise WireError(f"cannot write a blob: {e.strerror}") from e

    def is_fetching(self, blob: int) -> bool:
        return blob in self._fetching

    def lost(self, parent: _Parent) -> None:
        self.forget(parent)
        for link in list(parent.links):
            self._execute(self._peer.lost(time.monotonic(), link))

    def forget(self, parent: _Parent) -> None:
        if self._parents.get(parent.node) is parent:
            del self._parents[parent.node]

    def reached(self, link: Link) -> None:
        self._execute(self._peer.reached(time.monotonic(), link))

    def _pieces_arrived(self, tree: int | None) -> None:
        for child in self._children:
            child.pieces_arrived(tree)
        if (
            not self._done
            and self._spool.lacking
            and self._spool.trees
            and all(map(self._spool.is_complete, self._spool.lacking))
        ):
            self._done = True
            for blob in self._fetching:
                self._count_fetched(blob)
            self._execute(self._peer.finished(time.monotonic()))

    # -- actions

    def _execute(self, actions: Iterable[peer.Action]) -> None:
        for action in actions:
            if isinstance(action, peer.SendToTracker):
                self._tracker.send(wire.encode(action.message))
            elif isinstance(action, peer.Download):
                self._parent(action.link).download(action.link, action.blobs)
            elif isinstance(action, peer.StopDownload):
                if action.link.parent in self._parents:
                    self._parents[action.link.parent].stop(action.link)
            elif isinstance(action, peer.FetchFromRegistry):
                self._fetch_blobs(action.blobs)
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

    def _fetch_blobs(self, blobs: Sequence[int]) -> None:
        """Fetch only these blobs from the registry, each in a process."""
        for blob in [blob for blob in self._fetching if blob not in blobs]:
            self._stop_fetch(blob)
        for blob in blobs:
            if blob not in self._fetching and not self._spool.is_complete(blob):
                self._start_fetch(blob)
        self._peer.fetched(0, self._unfetched)

    def _start_fetch(self, blob: int) -> None:
        spool, fetch = self._spool, self._fetch
        spool.descriptor(blob)  # shared with the process
        self._counted[blob] = spool.available(blob)
        reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        process = run_in_background(lambda: _fetch_blob(spool, blob, fetch, writer), silent=False)
        os.close(writer)
        self._fetching[blob] = (process, reader)
        self._loop.watch(reader, selectors.EVENT_READ, lambda events: self._read_fetch(blob))

    def _read_fetch(self, blob: int) -> None:
        data = os.read(self._fetching[blob][1], 65536)  # contains only whole messages: each write is atomic, pipe(7)
        is_ended, error = not data, data
        while error[:1] == b"\0":  # an offset, not an error: see _fetch_blob()
            self._spool.fetched(blob, *_END.unpack_from(error))
            error = error[_END.size :]
        self._count_fetched(blob)
        if error or is_ended:
            self._stop_fetch(blob)
        if error or is_ended and not self._spool.is_complete(blob):
            error = error or b"n\0the process that fetched a blob was killed"
            refused, reason, hint = [*error.decode("utf-8", "replace").split("\0"), "", ""][:3]
            self._execute(self._peer.failed(blob, refused=refused == "y", reason=reason, hint=hint))
        self._pieces_arrived(None)

    def _count_fetched(self, blob: int) -> None:
        """Tell the peer how many more bytes of a blob have come from the registry."""
        available = self._spool.available(blob)
        new, self._counted[blob] = available - self._counted[blob], available
        self._peer.fetched(new, self._unfetched)

    @property
    def _unfetched(self) -> int:
        """Bytes that the fetching processes still have to fetch."""
        return sum(self._spool.sizes[blob] - self._counted[blob] for blob in self._fetching)

    def _stop_fetch(self, blob: int) -> None:
        process, pipe = self._fetching.pop(blob)
        self._loop.watch(pipe, 0, lambda events: None)
        os.close(pipe)
        os.kill(process, 9)
        os.waitpid(process, 0)


def _fetch_blob(spool: Spool, blob: int, fetch: Fetch, pipe: int) -> None:
    """Fetch the rest of a blob. After each chunk, write its end offset to a pipe, packed by _END.

    Write an error as three texts separated by NUL: "y" if the registry refuses the blob, otherwise "n"; the reason; and
    the hint.
    """
    os.set_blocking(pipe, True)
    try:
        close_others((0, 1, 2, pipe, spool.descriptor(blob)))
        end = spool.available(blob)
        for data in fetch(blob, end):
            spool.write(blob, memoryview(data), end)
            end += len(data)
            os.write(pipe, _END.pack(end))
    except PenrootError as e:
        limit = _MAX_REASON_CHARACTERS
        error = "\0".join(("y" if isinstance(e, RefusedError) else "n", str(e)[:limit], e.hint[:limit]))
        os.write(pipe, error.encode("ascii", "backslashreplace")[: select.PIPE_BUF])
    except OSError as e:
        os.write(pipe, f"n\0cannot write a blob: {e.strerror}\0".encode())


class _Parent:
    """A connection from which this node downloads pieces."""

    def __init__(self, process: PeerProcess, node: int, connection: Connection, spool: Spool) -> None:
        self.node = node
        self.links: dict[Link, frozenset[int]] = {}
        self._process, self._connection, self._spool = process, connection, spool
        self._ready = False
        self._piece: tuple[int, int, int, int] | None = None  # blob, tree, offset (-1: ignore piece), remaining bytes
        self._length = 0  # of the piece
        connection.on_ready = self._begin
        connection.on_close = lambda why: process.lost(self)
        connection.on_bytes = self._receive

    def download(self, link: Link, blobs: frozenset[int]) -> None:
        self.links[link] = blobs
        if self._ready:
            self._ask(link)

    def stop(self, link: Link) -> None:
        if self.links.pop(link, None) is not None and self._ready:
            self._connection.send(wire.encode(Take(link.tree, self._spool.trees, ())))
        if not self.links:
            self._connection.close()
            self._process.forget(self)

    def _begin(self) -> None:
        self._ready = True
        if self._connection.node != self.node:
            self._connection.fail(f"node {self.node} expected, not {self._connection.node}")
            return
        for link in self.links:
            self._ask(link)

    def _ask(self, link: Link) -> None:
        self._process.reached(link)
        wanted = tuple((blob, self._spool.count(blob, link.tree)) for blob in sorted(self.links[link]))
        self._connection.send(wire.encode(Take(link.tree, self._spool.trees, wanted)))

    def _receive(self, data: bytearray) -> int:
        """Handle received bytes. Return the number of used bytes."""
        used = 0
        while True:
            if self._piece is None:
                if len(data) - used < _HEADER.size:
                    self._connection.expect(0)
                    return used
                self._begin_piece(*_HEADER.unpack_from(data, used))
                used += _HEADER.size
            assert self._piece
            blob, tree, offset, remaining = self._piece
            part = memoryview(data)[used : used + remaining]
            count = len(part)
            if offset >= 0 and count:
                self._process.write(blob, part, offset)
            part.release()
            used += count
            if count < remaining:
                self._piece = (blob, tree, offset + count if offset >= 0 else -1, remaining - count)
                self._connection.expect(remaining - count)
                return used
            self._piece = None
            link = next((link for link in self.links if link.tree == tree), None)
            if offset >= 0 and link is not None:
                self._spool.piece_written(blob, offset // PIECE)
                self._process.downloaded(link, self._length)

    def _begin_piece(self, blob: int, tree: int, piece: int, length: int) -> None:
        """Check the header of a piece. Ignore a piece that has arrived from another source or is no longer wanted."""
        spool = self._spool
        if blob >= len(spool.sizes) or tree >= spool.trees or spool.tree(blob, piece) != tree:
            raise WireError("a piece of an unknown blob or tree")
        if not length or length != spool.length(blob, piece):
            raise WireError(f"a piece of {length} bytes")
        expected = spool.piece(blob, tree, spool.count(blob, tree))
        if piece > expected:
            raise WireError(f"piece {piece} instead of {expected}")
        is_asked_for = any(link.tree == tree for link in self.links) and not self._process.is_fetching(blob)
        self._length = length
        self._piece = (blob, tree, piece * PIECE if is_asked_for and piece == expected else -1, length)


class _Child:
    """A connection to which this node uploads pieces."""

    def __init__(self, process: PeerProcess, connection: Connection, spool: Spool, children: list[_Child]) -> None:
        self._process, self._connection, self._spool = process, connection, spool
        self._wanted: dict[int, dict[int, int]] = {}  # by tree and blob: the number of pieces that the child has
        self._order: list[tuple[int, int]] = []  # the trees and blobs of ``_wanted``
        self._turn = 0
        self._early: list[Take] = []  # requests that came before Routes
        connection.on_message = lambda message: self._take(wire.decode(message, Take))
        connection.send_more = self._upload
        connection.on_close = lambda why: children.remove(self)

    def begin(self) -> None:
        """Handle the requests that came before Routes."""
        early, self._early = self._early, []
        try:
            for take in early:
                self._take(take)
        except WireError as e:  # the child's error must not end the connection to the tracker, which sent Routes
            self._connection.fail(str(e))

    def _take(self, take: Take) -> None:
        if not self._spool.trees and len(self._early) < MAX_TREES:
            self._early.append(take)
            return
        if take.tree >= max(self._spool.trees, 1):
            raise WireError(f"a request for unknown tree {take.tree}")
        if take.wanted and take.trees != self._spool.trees:
            raise WireError("a request by another plan")
        self._wanted[take.tree] = {blob: count for blob, count in take.wanted if blob < len(self._spool.sizes)}
        self._order = [(tree, blob) for tree, blobs in self._wanted.items() for blob in blobs]
        self._turn = 0
        self._connection.wake()

    def pieces_arrived(self, tree: int | None) -> None:
        """More pieces are available: of one tree, or of any tree if ``tree`` is None."""
        if tree is None or tree in self._wanted:
            self._connection.wake()

    def _upload(self) -> bool:
        """Send the next available piece. The blobs take turns. Return False if no piece is available."""
        if self._process.allowance <= 0:
            return False  # until the next tick
        for _ in self._order:
            self._turn = (self._turn + 1) % len(self._order)
            tree, blob = self._order[self._turn]
            if self._wanted[tree][blob] < self._spool.count(blob, tree):
                break
        else:
            return False
        piece = self._spool.piece(blob, tree, self._wanted[tree][blob])
        length = self._spool.length(blob, piece)
        self._wanted[tree][blob] += 1
        self._process.allowance -= length
        header = _HEADER.pack(blob, tree, piece, length)
        self._connection.send_file(header, self._spool.descriptor(blob), piece * PIECE, length)
        return True
