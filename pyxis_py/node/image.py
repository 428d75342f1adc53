"""Turn the image of a step into the root file system of a container."""

from __future__ import annotations

import os

from enroot_py.base import log
from enroot_py.base.digests import Pin
from enroot_py.base.errors import ImageError, PenrootError, RefusedError
from enroot_py.base.features import parts
from enroot_py.store import containers
from pyxis_py.request.channel import tell
from pyxis_py.request.job import REFUSED

TYPE_CHECKING = False
if TYPE_CHECKING:
    from enroot_py.registry.sources import Peers
    from enroot_py.runtime import rootfs
    from enroot_py.store.store import Image as Stored
    from pyxis_py.node.importer import Importer
    from pyxis_py.node.step import Step


class Image:
    """The image of --container-image."""

    def __init__(self, step: Step, requested: str, container: str) -> None:
        """``container`` is the name of the container's directory, if any."""
        self._step, self._requested, self._container = step, requested, container
        self._job, self._request, self._settings = step.job, step.request, step.settings
        self.used = ""  # the registry image, with its digest

    def source(self) -> rootfs.Source:
        """Import the image and return its root file system, with a private directory if the container needs one.

        Raises PenrootError.
        """
        if importer := site_importer(self._step):
            return self._from_importer(importer)
        if self._request.sent:
            return self._from_srun()
        return self._from_file(self._requested) if self._request.is_file(self._job.cwd) else self._from_reference()

    def _from_file(self, image: str) -> rootfs.Source:
        path = os.path.join(self._job.cwd or "/", image)
        if not image.startswith(("/", ".")):
            log.warn(f"using the file {path}; write ./{image} for a file, docker://{image} for a registry image")
        if self._request.name is not None:
            # A named container must not depend on a file that the user may move.
            log.info(f"unpacking {path}")
            return containers.unpack(self._container, path, self._settings)
        return self._of_file(path)

    def _of_file(self, path: str) -> rootfs.Source:
        source = containers.find_file(path, self._settings)
        if not self._step.leaves_a_directory:
            return source
        return containers.temporary(self._container, source, self._settings)

    def _from_reference(self) -> rootfs.Source:
        from enroot_py.registry import reference
        from enroot_py.store import pull

        job, image = self._job, self._requested
        ref = reference.parse(image, job.cwd)
        # With several tasks, print only the line at the end of the import: users look only at the last line.
        if job.tasks <= 1:
            tell(f"importing docker image: {image}")
        pin, refused = job.pin(self._request, ref), job.resolved(ref.uri()) == REFUSED
        peers = self._peers()
        # With --container-name, srun resolves the tag only when a node without the container asks, as this node does.
        asks_srun = bool(peers and job.swarm and self._request.name) and not (pin or refused or ref.digest)
        try:
            if asks_srun and peers and (digest := peers.digest()):
                pin = Pin(digest)
            resolves = self._step.plugin.resolve_tags and (job.is_first_of_several_nodes or asks_srun)
            if resolves and not (pin or refused or ref.digest):
                effect = "each node resolves it, and nodes may get different images"
                log.warn(f"srun could not resolve the tag of {ref}, so {effect}")
            stored = pull.pull(ref, self._settings, pin=pin, peers=peers)
        except PenrootError as e:
            if refused and isinstance(e, RefusedError) or not str(e):
                raise ImageError("") from e  # srun or one of the nodes prints the error once
            reason = str(e) if str(e).startswith(f"{image}: ") else f"{image}: {e}"
            raise ImageError(f"failed to import docker image: {reason}", hint=e.hint) from e
        tell(f"imported docker image: {image}")
        self.used = str(ref) if ref.digest else f"{ref}@{pin.digest if pin else stored.digest}"
        return self._of_stored(stored, str(ref))

    def _peers(self) -> Peers | None:
        """Return the other nodes of the step as a source, if a feature shares images among them."""
        job = self._job
        if not (job.swarm or job.is_first_of_several_nodes):
            return None
        return next(filter(None, (peers(job, self._step.plugin) for peers in parts("peers"))), None)

    def _of_stored(self, stored: Stored, name: str) -> rootfs.Source:
        if not self._step.leaves_a_directory:
            return containers.of_image(self._container, stored)
        return containers.create(self._container, stored.path, self._settings, name)

    def _from_srun(self) -> rootfs.Source:
        """Return the squashfs file that srun sends, after it has arrived in this node's store. Raises ImageError."""
        for receive in parts("receive"):
            stored: Stored = receive(self._job, self._request, self._step.plugin, self._settings)
            return self._of_file(stored.file) if self._settings.unpack else self._of_stored(stored, self._requested)
        raise ImageError(f"{self._requested}: this installation of penroot receives no files from srun")

    def _from_importer(self, importer: Importer) -> rootfs.Source:
        uri = self._pinned_uri()
        containers.admit_imported(uri, self._settings)
        if self._job.tasks <= 1:
            tell(f"importing docker image: {self._requested}")
        path = importer.get(uri)
        tell(f"imported docker image: {self._requested}")
        try:
            return self._from_file(path)
        finally:
            if self._request.name is not None:
                importer.release()

    def _pinned_uri(self) -> str:
        """Return the URI of the image, with the digest if the step knows it. Raises PenrootError."""
        from enroot_py.registry import reference

        image = reference.parse(self._requested, self._job.cwd)
        pin = self._job.pin(self._request, image)
        if pin and isinstance(image, reference.Reference):
            return image.at(pin.digest).uri()
        return self._requested if "://" in self._requested else f"{reference.DOCKER}{self._requested}"


def site_importer(step: Step) -> Importer | None:
    """Return the site's importer if it must import the image of this step, else None."""
    if not step.plugin.importer or not step.request.is_reference(step.job.cwd):
        return None
    from pyxis_py.node.importer import Importer

    return Importer(step.plugin.importer, step.host)
