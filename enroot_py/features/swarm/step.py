"""The swarm in a step: its nodes share one pull of an image, or receive a file from srun's host."""

from __future__ import annotations

from enroot_py.base import log
from enroot_py.base.errors import ConfigError, ImageError
from enroot_py.features.swarm.arguments import SwarmArguments
from enroot_py.features.swarm.invitation import Invitation, Swarm, missing

TYPE_CHECKING = False
if TYPE_CHECKING:
    from enroot_py.config.settings import Settings
    from enroot_py.features.swarm.offer import Offer
    from enroot_py.features.swarm.sent import SentFile
    from enroot_py.features.swarm.source import SwarmSource
    from enroot_py.registry.reference import Reference
    from enroot_py.store.store import Image
    from pyxis_py.request.job import Job
    from pyxis_py.request.options import Request
    from pyxis_py.request.settings import PluginSettings

LAUNCHER = "SLURM_LAUNCH_NODE_IPADDR"  # srun's host: srun(1), OUTPUT ENVIRONMENT VARIABLES


def shares(plugin: PluginSettings) -> bool:
    """Return whether srun may be the tracker of an image."""
    return SwarmArguments(plugin).swarm and missing() is None


def offer(job: Job, image: Reference, digest: str, allocation: Job) -> Offer | None:
    """Return a tracker for the image ``digest``, or for the tag of ``image`` if the digest is "": see offer.offer()."""
    from enroot_py.features.swarm import offer

    return offer.offer(job, image, digest, allocation)


def send(job: Job, request: Request, plugin: PluginSettings, *, learns_later: bool) -> SentFile:
    """Return the file that srun sends to its nodes. Raises UsageError, ConfigError, ImageError."""
    from enroot_py.features.swarm import sent

    return sent.check(job, request, SwarmArguments(plugin), learns_later=learns_later)


def receive(job: Job, request: Request, plugin: PluginSettings, settings: Settings) -> Image:
    """Receive the file that srun sends. Return it as an image in this node's store. Raises ConfigError, ImageError."""
    from enroot_py.features.swarm import store_file
    from pyxis_py.request.job import REFUSED

    image = request.image or ""
    origin = f"{request.origins['image']}={image}"
    if error := missing():
        raise ConfigError(f"{origin}: {error}", hint=error.hint)
    digest, invited = job.resolved(image), invitation(job, plugin)
    if digest == REFUSED:
        raise ImageError("")  # srun has reported the reason
    if not digest or invited is None:
        raise ImageError(
            f"{origin}: no srun has offered to send the file",
            hint="give it to srun, on a host where penroot is installed",
        )
    return store_file.receive(image, digest, invited, settings)


class Peers:
    """The other nodes of a step. The core uses this class through the interface Peers in registry/sources.py."""

    def __init__(self, invitation: Invitation) -> None:
        self._invitation = invitation

    def source(self, image: Reference, settings: Settings, root: str) -> SwarmSource:
        """Return a source that downloads the image from other nodes. ``root`` is the root of this node's store."""
        from enroot_py.features.swarm.blob_cache import BlobCache
        from enroot_py.features.swarm.source import SwarmSource
        from enroot_py.registry.sources import open_registry
        from enroot_py.store import layout

        cache = BlobCache(layout.blobs(root), self._invitation.keep)
        return SwarmSource(self._invitation, image.digest, open_registry(image, settings), cache)

    def digest(self) -> str:
        """Return the digest that srun's tracker found for the tag, or "" without a tracker. Raises RegistryError."""
        from enroot_py.features.swarm.source import DigestClient

        return DigestClient(self._invitation).digest()

    def lend(self, image: Reference, settings: Settings, root: str) -> None:
        """Upload a stored image to nodes that lack it. A forked process imports the modules and does the work."""
        from enroot_py.features.swarm.background import run_in_background

        run_in_background(lambda: self.source(image, settings, root).lend())


def peers(job: Job, plugin: PluginSettings) -> Peers | None:
    """Return the other nodes of the step, if srun has a tracker for them."""
    invited = invitation(job, plugin)
    return Peers(invited) if invited else None


def invitation(job: Job, plugin: PluginSettings) -> Invitation | None:
    """Return the invitation of srun's tracker, if any. If the library of swarms is missing, slurmd's log says so."""
    arguments = SwarmArguments(plugin)
    if arguments.swarm and (error := missing()):
        log.info(f"{error}: this node asks the registry itself ({error.hint})")
        return None
    port, _, key = job.swarm.partition(" ")
    node = job.environ.get("SLURM_NODEID", "")
    host = job.environ.get(LAUNCHER, "")
    nodes = job.environ.get("SLURM_STEP_NUM_NODES") or job.environ.get("SLURM_NNODES", "")
    if not (port.isdecimal() and node.isdecimal() and nodes.isdecimal() and host):
        return None
    swarm = Swarm(bytes.fromhex(key), job.step, int(nodes), arguments.swarm_network)
    return Invitation(host, int(port), int(node), swarm, arguments.swarm_keep)
