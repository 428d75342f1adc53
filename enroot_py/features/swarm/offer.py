"""The tracker of a swarm in srun's helper process."""

from __future__ import annotations

import _signal
import gc
import os
import resource
import time

from enroot_py.base import log, signals
from enroot_py.base.errors import PenrootError
from enroot_py.features.swarm.arguments import SwarmArguments
from enroot_py.features.swarm.ports import listener
from pyxis_py.request import settings as plugin_settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from enroot_py.features.swarm.invitation import Invitation
    from enroot_py.features.swarm.messages import Documents, File, Progress
    from enroot_py.features.swarm.progress import Display
    from enroot_py.registry.reference import Reference
    from pyxis_py.request.channel import Channel
    from pyxis_py.request.job import Job

_STDERR = 4  # a copy of srun's stderr: see execute() in helper.c
_INFO = 3  # a log level of srun, slurm/src/common/log.h; with --quiet, the level is lower
SEED_RATE = 250e6  # bytes a second that the seed uploads at most: other users work on srun's host
_NOTE_AGE_S = 3600  # older notes are ignored


def offer(job: Job, image: Reference, digest: str, allocation: Job) -> Offer | None:
    """Return a tracker for the image ``digest``.

    Return None if all nodes have the image according to a note of an earlier step, or if no port is free. If the nodes
    have deleted the image since the note was written, each node asks the registry. Without a digest, the tracker
    resolves the tag when the first node asks.
    """
    nodes = allocation.nodelist.encode()
    if digest and nodes and Note(job, digest).read(len(nodes) + 1) == nodes:
        return None
    try:
        return ImageOffer(job, image, digest, allocation)
    except OSError as e:
        log.debug(f"swarm: {e.strerror}: each node asks the registry")
    return None


class Offer:
    """A tracker for the nodes of an allocation. Raises OSError."""

    documents: Callable[[], tuple[Documents | File, Sequence[int]]]  # documents() and seed(): see tracker_process.Host
    seed: Callable[[], None]
    seed_descriptors: tuple[int, ...] = ()
    shows_registry = True  # the progress lines show how many bytes came from the registry

    def __init__(self, name: str, networks: str, allocation: Job) -> None:
        self._allocation = allocation
        self._name, self._networks = name, networks
        self._display: Display | None = None
        self._key = os.urandom(32)
        first, last = (allocation.numbers.get(name, 0) for name in ("firstport", "lastport"))
        self._ports = range(first, last + 1)
        self._listener = listener(self._ports)
        self._shows_progress = allocation.numbers.get("loglevel", 0) >= _INFO
        self._port = self._listener.getsockname()[1]
        self.invitation = f"{self._port} {self._key.hex()}"

    def serve(self, channel: Channel) -> None:
        """Serve until srun ends, or all nodes have the image and have left.

        Ignore signals from the terminal: they are for srun.
        """
        for number in signals.UNHEARD:
            _signal.signal(number, _signal.SIG_IGN)
        gc.enable()
        _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))  # each node needs a connection
        from enroot_py.features.swarm.invitation import Swarm  # imported late: srun waits until serve() is called
        from enroot_py.features.swarm.tracker_process import TrackerProcess

        nodes = self._allocation.numbers["nodes"]
        self._swarm = Swarm(self._key, self._allocation.step, nodes, self._networks)
        process = TrackerProcess(self._swarm, self, self._listener)
        process.serve(channel.socket.fileno())
        if self._display is not None:
            self._display.end()
        if process.all_have_it:
            self.note_nodes()

    def note_nodes(self) -> None:
        """Called at the end if all nodes have the image."""

    def show(self, size: int, progress: Callable[[], Progress], *, ended: bool) -> None:
        from enroot_py.features.swarm.progress import Display

        if self._display is None and self._shows_progress:
            nodes = self._swarm.nodes
            self._display = Display(_STDERR, self._name, size, nodes, shows_registry=self.shows_registry)
        if self._display is not None:
            self._display.show(progress, ended=ended)

    @property
    def seed_invitation(self) -> Invitation:
        from enroot_py.features.swarm.invitation import Invitation
        from enroot_py.features.swarm.messages import SEED

        return Invitation("127.0.0.1", self._port, SEED, self._swarm, ports=self._ports)


class ImageOffer(Offer):
    """The tracker of a registry image. Without ``digest``, it resolves the tag when the first node asks."""

    def __init__(self, job: Job, image: Reference, digest: str, allocation: Job) -> None:
        arguments = SwarmArguments(plugin_settings.load(job.arguments))
        super().__init__(str(image), arguments.swarm_network, allocation)
        self._job, self._keep = job, arguments.swarm_keep
        self._reference = image
        self._image = image.at(digest) if digest else image
        self._note = Note(job, digest) if digest else None

    def note_nodes(self) -> None:
        """Note for later steps: these nodes have the image."""
        if self._note and (nodes := self._allocation.nodelist.encode()):
            self._note.write(nodes)

    def documents(self) -> tuple[Documents, Sequence[int]]:
        """Get the manifest, the config and signatures from the registry. Raises PenrootError."""
        from enroot_py.config import settings
        from enroot_py.features.swarm.messages import Documents
        from enroot_py.registry import authorization
        from enroot_py.registry.platforms import architecture
        from enroot_py.registry.sources import open_source

        loaded = settings.load(self._job.host(), in_job=False)
        source = open_source(self._image, loaded)
        manifest = source.manifest()
        self._image = self._image.at(manifest.named)
        config = source.config(manifest)
        sizes = [layer.size for layer in manifest.layers]
        evidence = b""
        if loaded.policies:
            from enroot_py.store import policies

            evidence = policies.admission(loaded).evidence(self._reference, manifest.digest, manifest.named, loaded)
        tokens = authorization.tokens()
        return Documents(manifest.named, architecture(None), manifest.data, config, evidence, tokens), sizes

    def seed(self) -> None:
        """Be the seed, until the tracker ends. Raises PenrootError, OSError."""
        from enroot_py.config import settings
        from enroot_py.features.swarm.blob_cache import BlobCache
        from enroot_py.features.swarm.source import SwarmSource
        from enroot_py.registry.sources import open_registry
        from enroot_py.store import layout
        from enroot_py.store.store import Store

        loaded = settings.load(self._job.host(), in_job=False)
        cache = BlobCache(layout.blobs(Store(loaded.cache_path, create=True).root), self._keep)
        registry = open_registry(self._image, loaded)
        SwarmSource(self.seed_invitation, self._image.digest, registry, cache).seed(SEED_RATE)


class Note:
    """A short text about a digest, in the store of srun's host. It is ignored after _NOTE_AGE_S."""

    def __init__(self, job: Job, digest: str) -> None:
        from enroot_py.config import settings
        from enroot_py.store import layout

        self._store = settings.load(job.host(), in_job=False).cache_path
        self._path = layout.swarm(self._store, digest)

    def read(self, size: int) -> bytes:
        """Return the first ``size`` bytes of the note, or b"" if there is no fresh note."""
        from enroot_py.base import trusted

        try:
            with open(trusted.file(self._path), "rb") as f:
                return f.read(size) if _is_fresh(f.fileno()) else b""
        except OSError:
            return b""

    def write(self, text: bytes) -> None:
        """Write the note and delete old notes."""
        from enroot_py.base import making
        from enroot_py.store.store import Store

        try:
            Store(self._store, create=True)
            directory = os.path.dirname(self._path)
            os.makedirs(directory, 0o700, exist_ok=True)
            with os.scandir(directory) as entries:
                for entry in entries:
                    if not _is_fresh(entry.path):
                        os.unlink(entry.path)
            making.write(self._path, text)
        except (OSError, PenrootError) as e:
            log.debug(f"swarm: {self._path}: {e}")


def _is_fresh(file: int | str) -> bool:
    return 0 <= time.time() - os.stat(file).st_mtime < _NOTE_AGE_S
