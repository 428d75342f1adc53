"""A step on one node: its request, and its settings."""

from __future__ import annotations

import os

from enroot_py import __version__
from enroot_py.base.features import parts
from enroot_py.base.operations import Operation
from enroot_py.config import settings as enroot_settings
from enroot_py.runtime import namespaces
from pyxis_py.node.running import Notes, RunningContainers
from pyxis_py.request import options
from pyxis_py.request import settings as plugin_settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from enroot_py.config.settings import Settings
    from pyxis_py.request.job import Job


class Step:
    """A step on this node: its request and settings, which do not change. container.py makes the container."""

    def __init__(self, job: Job) -> None:
        """Parse the request and load the settings. Raises UsageError, ConfigError."""
        self.job = job
        self.request = options.parse(job.options, job.environ, job.cwd, job.describe)
        self.plugin = plugin_settings.load(job.arguments)
        if job.is_batch and not self.plugin.sbatch_support:
            options.refuse_all(job.options, "sbatch")
            self.request = options.parse((), {})
        # Hooks and importers of the site read these variables.
        self.host = {
            **job.host(),
            **(self.request.file.for_hooks(job.environ) if self.request.file else {}),
            "PATH": os.environ.get("PATH", ""),
            "PYXIS_RUNTIME_PATH": self.plugin.runtime_path,
            "PYXIS_VERSION": __version__,
            "SLURM_JOB_UID": str(job.uid),
            "SLURM_JOB_GID": str(job.numbers["gid"]),
        }
        self.settings = self._settings()
        self.superuser = namespaces.privileged(self.settings)
        self.running = RunningContainers(self.plugin.runtime_path, job.uid)
        self.notes = Notes(self.plugin.runtime_path, job.uid)
        scope = f"{job.jobid}_" if self.plugin.container_scope == "job" else ""
        self.name = f"pyxis_{scope}" + (self.request.name or job.step)  # the name of the container

    def _settings(self) -> Settings:
        requested: dict[str, object] = {
            "mpi": False,  # Slurm sets the MPI variables of each task, and the step mounts the MPI files
            "mount_home": self.request.mount_home,
            "remap_root": self.request.remap_root,
            "rootfs_writable": self.request.writable,
            **{f"unshare_{kind}": True for kind in self.request.unshare},
        }
        for settings_of in parts("settings"):
            requested |= settings_of(self)
        changes = {name: value for name, value in requested.items() if value is not None}
        settings = enroot_settings.load(self.host).replace("option", **changes)
        file = self.request.file
        return settings.with_devices(file.devices(self.job.environ), file.path) if file else settings

    def operation(self) -> Operation:
        """Return a context manager to record the making of the container."""
        job, request = self.job, self.request
        image = request.image if request.image and request.is_file(job.cwd) else ""
        facts: dict[str, str | int] = {"job": job.jobid, "step": job.step, "container": request.name or ""}
        return Operation("step", self.settings, image=image, timed=job.is_verbose, **facts)

    @property
    def own_note(self) -> str:
        """Return the name of the step's note, which does not depend on the container's name."""
        return f"pyxis_{self.job.step}"

    @property
    def leaves_a_directory(self) -> bool:
        """Return whether a new container of this step needs a directory under the data path."""
        return self.request.name is not None or bool(self.request.save) or self.settings.rootfs_writable
