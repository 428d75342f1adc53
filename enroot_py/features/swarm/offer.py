"""The tracker of a swarm in the process that srun has for a step."""

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
    from collections.abc import Callable

    from enroot_py.features.swarm.invitation import Invitation
    from enroot_py.features.swarm.messages import Progress
    from enroot_py.features.swarm.progress import Display
    from enroot_py.features.swarm.tracker_process import Documents
    from enroot_py.registry.reference import Reference
    from pyxis_py.request.channel import Channel
    from pyxis_py.request.job import Job

_STDERR = 4  # that of srun: execute() of coprocess.c
_INFO = 3  # of srun's levels, slurm/src/common/log.h: less is --quiet
RATE = 250e6  # bytes a second that srun's host, where others work, gives to nodes without a registry
_REMEMBERED = 3600  # seconds for which nodes are believed to keep an image


def offer(job: Job, image: Reference, digest: str, allocation: Job) -> Offer | None:
    """A tracker for an image with that digest, unless all nodes have it, as far as is known, or no port is free."""
    hint = Hint(job, digest, allocation)
    if hint.holds:
        return None
    try:
        return ImageOffer(job, image, digest, allocation, hint)
    except OSError as e:
        log.debug(f"swarm: {e.strerror}: each node asks the registry")
    return None


class Offer:
    """A tracker for the nodes of an allocation, in the process that srun has for it. Raises OSError."""

    seed_descriptors: tuple[int, ...] = ()
    counts = True  # shows what came from the registry

    def __init__(self, name: str, networks: str, allocation: Job) -> None:
        self._allocation = allocation
        self._name, self._networks = name, networks
        self._display: Display | None = None
        self._key = os.urandom(32)
        first, last = (allocation.numbers.get(name, 0) for name in ("firstport", "lastport"))
        self._ports = range(first, last + 1)
        self._listener = listener(self._ports)
        self._loud = allocation.numbers.get("loglevel", 0) >= _INFO
        self._port = self._listener.getsockname()[1]
        self.invitation = f"{self._port} {self._key.hex()}"

    def serve(self, channel: Channel) -> None:
        """As long as srun is there, whatever the user types: that is for srun."""
        for number in signals.UNHEARD:
            _signal.signal(number, _signal.SIG_IGN)
        gc.enable()
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a connection for each node
        from enroot_py.features.swarm.invitation import Swarm  # not before: srun waits
        from enroot_py.features.swarm.tracker_process import TrackerProcess

        nodes = self._allocation.numbers["nodes"]
        self._swarm = Swarm(self._key, self._allocation.step, nodes, self._networks)
        tracker_process = TrackerProcess(self._swarm, self, self._listener.detach())
        tracker_process.serve(channel.socket.fileno())
        if self._display is not None:
            self._display.end()
        if tracker_process.all_have_it:
            self.all_have_it()

    def all_have_it(self) -> None:
        """Called at the end, where they do."""

    def show(self, image: Documents, progress: Callable[[], Progress], *, ended: bool) -> None:
        from enroot_py.features.swarm.progress import Display

        if self._display is None and self._loud:
            self._display = Display(_STDERR, self._name, sum(image.sizes), self._swarm.nodes, counts=self.counts)
        if self._display is not None:
            self._display.show(progress, ended=ended)

    def documents(self) -> Documents:
        """See tracker_process.Home. Raises PenrootError."""
        raise NotImplementedError

    def seed(self) -> None:
        """See tracker_process.Home. Raises PenrootError, OSError."""
        raise NotImplementedError

    @property
    def own(self) -> Invitation:
        """That of the seed."""
        from enroot_py.features.swarm.invitation import Invitation
        from enroot_py.features.swarm.messages import SEED

        return Invitation("127.0.0.1", self._port, SEED, self._swarm, ports=self._ports)


class ImageOffer(Offer):
    """The tracker of an image of a registry."""

    def __init__(self, job: Job, image: Reference, digest: str, allocation: Job, hint: Hint) -> None:
        arguments = SwarmArguments(plugin_settings.load(job.arguments))
        super().__init__(str(image), arguments.swarm_network, allocation)
        self._job, self._keep = job, arguments.swarm_keep
        self._named = image
        self._image = image.at(digest)
        self._hint = hint

    def all_have_it(self) -> None:
        self._hint.write()

    def documents(self) -> Documents:
        """The manifest and the config, when the first node wants them. Raises PenrootError."""
        from enroot_py.config import settings
        from enroot_py.features.swarm.tracker_process import Documents
        from enroot_py.registry import authorization
        from enroot_py.registry.platforms import architecture
        from enroot_py.registry.sources import open_source

        loaded = settings.load(self._job.host(), in_job=False)
        source = open_source(self._image, loaded)
        manifest = source.manifest()
        config = source.config(manifest)
        sizes = [layer.size for layer in manifest.layers]
        evidence = b""
        if loaded.policies:
            from enroot_py.store import policies

            evidence = policies.admission(loaded).evidence(self._named, manifest.digest, manifest.named, loaded)
        tokens = authorization.tokens()
        return Documents(manifest.named, manifest.data, config, architecture(None), sizes, tokens, evidence=evidence)

    def seed(self) -> None:
        """Be one. Raises PenrootError, OSError."""
        from enroot_py.config import settings
        from enroot_py.features.swarm.blob_cache import BlobCache
        from enroot_py.features.swarm.source import SwarmSource
        from enroot_py.registry.sources import open_registry
        from enroot_py.store import layout
        from enroot_py.store.store import Store

        loaded = settings.load(self._job.host(), in_job=False)
        place = Store(loaded.cache_path, create=True).root
        blob_cache = BlobCache(layout.blobs(place), self._keep)
        SwarmSource(self.own, self._image.digest, open_registry(self._image, loaded), blob_cache).seed(RATE)


class Hint:
    """On srun's host: the nodes of an allocation, all of which have had an image a while ago.

    They need no tracker then. Where they have it no more each of them asks the registry, so it is soon forgotten.
    """

    def __init__(self, job: Job, digest: str, allocation: Job) -> None:
        self._note = Note(job, digest)
        self._nodes = allocation.nodelist.encode()

    @property
    def holds(self) -> bool:
        """Whether all of them have it, as far as is known."""
        return self._note.read(len(self._nodes) + 1) == self._nodes != b""

    def write(self) -> None:
        """Remember them."""
        if self._nodes:
            self._note.write(self._nodes)


class Note:
    """What is remembered of something with a digest, on srun's host, for a while."""

    def __init__(self, job: Job, digest: str) -> None:
        from enroot_py.config import settings
        from enroot_py.store import layout

        self._store = settings.load(job.host(), in_job=False).cache_path
        self._path = layout.swarm(self._store, digest)

    def read(self, most: int) -> bytes:
        """The first bytes of it; none where there is none."""
        from enroot_py.base import trusted

        try:
            with open(trusted.file(self._path), "rb") as f:
                return f.read(most) if _is_fresh(f.fileno()) else b""
        except OSError:
            return b""

    def write(self, text: bytes) -> None:
        """Remember it, and forget what is of long ago."""
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
    return 0 <= time.time() - os.stat(file).st_mtime < _REMEMBERED
