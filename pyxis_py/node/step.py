"""Decisions of a step: which container it gets, and how it is made and entered."""

from __future__ import annotations

import os

from enroot_py import __version__
from enroot_py.base import linux, log
from enroot_py.base.errors import ContainerError, ImageError, MountError, PenrootError, RefusedError
from enroot_py.base.features import parts
from enroot_py.base.recording import Recording
from enroot_py.config import settings as enroot_settings
from enroot_py.runtime import namespaces, pmix, rootfs
from enroot_py.runtime.enter import Start, enter
from enroot_py.runtime.mounting import Mount
from enroot_py.store import claims, containers
from pyxis_py.node.running import Notes, RunningContainers
from pyxis_py.request import options
from pyxis_py.request import settings as plugin_settings
from pyxis_py.request.channel import tell
from pyxis_py.request.job import CARRIED, PINNED, RESOLVED, VERBOSE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from enroot_py.config.settings import Settings
    from enroot_py.store.store import Image
    from enroot_py.swarm.invitation import Invitation
    from pyxis_py.node.held import Held
    from pyxis_py.node.importer import Importer
    from pyxis_py.request.job import Job

# Languages of the host mean nothing in an image that has other locales.
_LANGUAGES = ("LANG", "LANGUAGE", "LC_ALL")
_OF_TASKS = ("SLURM_", "PMI_", "PMIX_", "PALS_")
_XAUTHORITY = "/tmp/.Xauthority-"  # where slurmstepd has what --x11 needs
_KINDS = {"net": "network", "ipc": "IPC", "uts": "UTS"}


class Step:
    """One step on one node, as the plugin describes it."""

    def __init__(self, job: Job) -> None:
        """Raises UsageError, ConfigError."""
        self.job = job
        self.request = options.parse(job.options, job.environ, job.cwd, job.describe)
        self.plugin = plugin_settings.load(job.arguments)
        if job.is_batch and not self.plugin.sbatch_support:
            options.check_switched_off(job.options, "sbatch")
            self.request = options.parse((), {})
        # Hooks and importers of a site read these.
        self.host = {
            **job.host(),
            **(self.request.file.for_hooks(job.environ) if self.request.file else {}),
            "PATH": os.environ.get("PATH", ""),
            "PYXIS_RUNTIME_PATH": self.plugin.runtime_path,
            "PYXIS_VERSION": __version__,
            "SLURM_JOB_UID": str(job.uid),
            "SLURM_JOB_GID": str(job.numbers["gid"]),
        }
        # Where the type is none Slurm takes it away, mpi_process_env(), but not the variables of a PMIx around it.
        self.mpi = {"SLURM_MPI_TYPE": "none", **job.environ}
        self.settings = self._settings()
        self.superuser = namespaces.privileged(self.settings)
        self.running = RunningContainers(self.plugin.runtime_path, job.uid)
        self.notes = Notes(self.plugin.runtime_path, job.uid)
        scope = f"{job.jobid}_" if self.plugin.container_scope == "job" else ""
        self._takes_over = False  # from a helper of this step that was killed
        self.save_attempted = False
        self.used = ""  # the image of a registry that it runs, with its digest
        self.name = f"pyxis_{scope}" + (self.request.name or job.step)
        # Its directory, which other nodes see too where homes are shared.
        self.container = claims.of_this_node(self.name, self.settings.data_path)

    def _settings(self) -> Settings:
        asked: dict[str, object] = {
            "mpi": False,  # each task has its variables from Slurm, and the step sees to its files
            "mount_home": self.request.mount_home,
            "remap_root": self.request.remap_root,
            "rootfs_writable": self.request.writable,
            **{f"unshare_{kind}": True for kind in self.request.unshare},
        }
        for settings_of in parts("settings"):
            asked |= settings_of(self)
        changes = {name: value for name, value in asked.items() if value is not None}
        settings = enroot_settings.load(self.host).replace("option", **changes)
        file = self.request.file
        return settings.with_devices(file.devices(self.job.environ), file.path) if file else settings

    def recording(self) -> Recording:
        """For a ``with``, in which the step gets its container."""
        job, request = self.job, self.request
        image = request.image if request.image and request.is_file(job.cwd) else ""
        facts: dict[str, str | int] = {"job": job.jobid, "step": job.step, "container": request.name or ""}
        return Recording("step", self.settings, image=image, timed=job.is_verbose, **facts)

    @property
    def directory(self) -> str:
        """Where the container is, or would be."""
        return f"{self.settings.data_path}/{self.container}"

    def begin(self) -> None:
        """Before anything is made: note what there will be to remove, should this process be killed.

        Raises ImageError, ConfigError where the container could not be saved at the end: no callback of Slurm
        after the last task changes the status with which srun exits, and the work would be lost.
        """
        namespaces.hide()  # from other processes of the user
        if self.request.save:
            from pyxis_py.node import leave

            leave.Save(self).check()
        self._claim_name()
        self._takes_over = not self._note(self.own_note)
        # The server of an image, whose parent ends as it is built, becomes our child: Held.let_go waits for it.
        linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)

    def _claim_name(self) -> None:
        """Keep other nodes from the directory of the container, if there is to be one, while this process lives."""
        if self.leaves_a_directory:
            self._claim = claims.Claim(self.name, self.settings.data_path, kept=self.request.name is not None)
            self.container = self._claim.name

    @property
    def own_note(self) -> str:
        """Under which name the step is noted, whatever its container is called."""
        return f"pyxis_{self.job.step}"

    def _note(self, name: str) -> bool:
        """Note the step or its container for the epilog, and what is to be removed with it; whether that is new."""
        goes_with_it = name == self.name or self.goes_with_steps
        return self.notes.add(name, self.directory if goes_with_it else "-")

    @property
    def leaves_a_directory(self) -> bool:
        """Whether a new container of this step takes room under the data path."""
        return self.request.name is not None or bool(self.request.save) or self.settings.rootfs_writable

    @property
    def goes_with_steps(self) -> bool:
        """Whether nobody wants the container after the steps that run it: it was made for one without a name."""
        if self.request.name is None:
            return True
        from pyxis_py.node import leave

        return bool(leave.maker(self.container, self.settings))

    def joins_running(self) -> bool:
        """Whether the step goes into a container of its name that runs. Raises ContainerError where it must not."""
        mode = self.request.name_mode
        if mode == "create":
            raise ContainerError(
                f"--container-name={self.request.name}:create: the container exists already and is running",
                hint="use it without :create",
            )
        return mode != "no_exec"

    def directory_id(self) -> tuple[int, int] | None:
        """What tells the container's directory from another of the same name; None where it has none."""
        try:
            status = os.stat(self.directory)
        except FileNotFoundError:
            return None
        return status.st_dev, status.st_ino

    def check_attached(self, container: Held) -> None:
        """What the step asks for beyond a running container. Raises ContainerError where that cannot be had."""
        for kind in self.request.unshare:
            if kind not in container.spaces:
                raise ContainerError(
                    f"--container-unshare={kind}: the running container {self.request.name} is "
                    f"not in a separate {_KINDS[kind]} namespace",
                    hint=f"leave it out, or use another container: --container-name={self.request.name}:no_exec",
                )
        said = [mount.origin or self.request.origins["mounts"] for mount in self.request.mounts]
        for origin in dict.fromkeys(said):
            tell(f"ignoring {origin} when attaching to a running container")
        if self.request.remap_root not in (None, container.remap_root):
            origin = self.request.origins["remap_root"]
            tell(f"ignoring {origin} when attaching to a running container: it keeps the user that it was started with")
        if step := container.served:
            # Slurm kills it with its step, and a user cannot move a process into another one's cgroup.
            log.warn(
                f"files of the running container {self.request.name} come from a process of step {step} and are gone "
                "when that one ends; a container with a name is unpacked, and :no_exec gives a step mounts of its own"
            )

    @property
    def authority(self) -> str:
        """The file with which programs reach the display of srun --x11, or ""."""
        path = self.job.environ.get("XAUTHORITY", "")
        return path if path.startswith(_XAUTHORITY) and os.path.exists(path) else ""

    def node_mounts(self, *, remap_root: bool) -> list[Mount]:
        """What the step needs of the node: the batch script, the display, PMIx."""
        mounts = []
        if self.job.script:
            mounts.append(_bind(self.job.script, ("x-create=file", "ro"), "batch script"))
        if self.authority:
            mounts.append(_bind(self.authority, ("x-create=file", "ro", "noexec"), "srun --x11"))
        return [*mounts, *self._pmix_mounts(remap_root=remap_root)]

    def _pmix_mounts(self, *, remap_root: bool) -> list[Mount]:
        return [
            _bind(path, ("x-create=dir", mode, "noexec"), what)
            for path, mode, what in pmix.directories(self.mpi, remap_root=remap_root)
        ]

    def pmix_stores(self) -> dict[str, str]:
        """What a task is told of PMIx in a container that runs already, whose files are not looked at."""
        return pmix.stores(self.mpi) if pmix.used(self.mpi) else {}

    def _fit_pmix(self, inside: Mapping[str, str]) -> dict[str, str]:
        """In the container: what its PMIx needs to get on with the server. Raises ConfigError where it would not."""
        libraries = pmix.Libraries(os.path.exists, inside.get("LD_LIBRARY_PATH", ""))
        if self.job.is_first_of_several_tasks and (why := pmix.mismatch(self.mpi["SLURM_MPI_TYPE"], libraries)):
            log.warn(why)
        if not pmix.used(self.mpi):
            return {}
        return pmix.told(self.mpi, libraries, inside, remap_root=self.settings.remap_root)

    def check_pmix(self) -> None:
        if why := pmix.check_root(self.mpi, self.job.tasks):
            log.warn(why)

    def prepare(self) -> rootfs.Source:
        """The root file system of the step, imported and created where that is needed. Raises PenrootError."""
        if self.settings.remap_root:
            self.check_pmix()
        self._check_sources()
        return self._existing() or self._create()

    def _check_sources(self) -> None:
        """Raise MountError for the source of a mount that is not there, or is no squashfs file where one is to be."""
        for mount in self.request.mounts:
            origin = mount.origin or self.request.origins["mounts"]
            try:
                if mount.is_squashfs:
                    from enroot_py.runtime import data

                    os.close(data.open_file(mount.source))
                elif mount.source.startswith("/"):
                    os.stat(mount.source)
            except MountError as e:
                raise MountError(f"{origin}: {e}", hint=e.hint) from e
            except OSError as e:
                missing = isinstance(e, FileNotFoundError)
                why = "source path does not exist" if missing else f"source path: {e.strerror}"
                hint = f"it must exist on the node {self.job.node}" if missing else "give a path that you may read"
                raise MountError(f"{origin}: {why}: {mount.source}", hint=hint) from e

    def _existing(self) -> rootfs.Source | None:
        """The container that has the name of --container-name. Raises ContainerError where it must not be used."""
        name, mode = self.request.name, self.request.name_mode
        if name is None:
            return None
        if mode == "exec":
            raise ContainerError(
                f"--container-name={name}:exec: the container is not running on this node",
                hint="use it without :exec, and it is started",
            )
        if self.container not in containers.names(self.settings):
            return None
        if mode == "create":
            raise ContainerError(
                f"--container-name={name}:create: the container exists already",
                hint="use it without :create, or remove it: penroot remove " + self.container,
            )
        return containers.open_container(self.container, self.settings)

    def _create(self) -> rootfs.Source:
        """The root file system of the image, or a container made of it. Raises PenrootError."""
        name, image = self.request.name, self.request.image
        if image is None:
            raise ContainerError(
                f"--container-name={name}: there is no such container on this node",
                hint=self._other_name(name or "") or "give --container-image too, and it is made",
            )
        if name is None and self.leaves_a_directory:
            return self._create_for_steps(image)
        if name is not None and self.plugin.container_scope == "job":
            self._note(self.name)
        return self._from_image(image)

    def _create_for_steps(self, image: str) -> rootfs.Source:
        """Make a container that goes with the steps that run it."""
        from pyxis_py.node import leave

        if self._takes_over and leave.maker(self.container, self.settings)[:1] in ([], [self.job.node]):
            # A helper of this very step made it and was killed. The lock of the name was that one's too.
            leave.remove(self.container, self.settings)
            self._claim_name()
        source = self._from_image(image)
        leave.mark(self)
        leave.sweep(self)
        return source

    def _other_name(self, name: str) -> str:
        """How to name what the user may mean: a container of another job, or one of `penroot create`."""
        if self.container != self.name:
            mine = "give --container-image too, and this node makes one of its own"
            other = claims.holder(self.name, self.settings.data_path)
            return f"it is that of node {other}, where a step runs it: {mine}"
        if self.plugin.container_scope == "job":
            return "names hold within one job on this cluster: give --container-image too, and it is made"
        if name not in containers.names(self.settings):
            return ""
        if name.startswith("pyxis_"):
            return f"the container {name} is --container-name={name.removeprefix('pyxis_')}"
        return f"the container {name} is none of a step, whose names begin so: penroot create --name pyxis_{name}"

    @property
    def importer(self) -> Importer | None:
        """The site's own importer, if the image of this step comes from it."""
        if not self.plugin.importer or not self.request.is_reference(self.job.cwd):
            return None
        from pyxis_py.node.importer import Importer

        return Importer(self.plugin.importer, self.host)

    def _from_image(self, image: str) -> rootfs.Source:
        if importer := self.importer:
            return self._from_importer(importer, image)
        if self.request.sent:
            return self._from_srun(image)
        return self._from_file(image) if self.request.is_file(self.job.cwd) else self._from_reference(image)

    def _from_file(self, image: str) -> rootfs.Source:
        path = os.path.join(self.job.cwd or "/", image)
        if not image.startswith(("/", ".")):
            log.warn(f"the image is the file {path}; write ./{image} for it, docker://{image} for a registry's")
        if self.request.name is not None:
            # Kept containers do not depend on a file that their user may move.
            log.info(f"unpacking {path}")
            return containers.unpack(self.container, path, self.settings)
        return self._of_file(path)

    def _of_file(self, path: str) -> rootfs.Source:
        source = containers.find_file(path, self.settings)
        return containers.temporary(self.container, source, self.settings) if self.leaves_a_directory else source

    def _from_reference(self, image: str) -> rootfs.Source:
        from enroot_py.registry import reference
        from enroot_py.store import pull

        ref = reference.parse(image, self.job.cwd)
        # Of several tasks one looks at the last line only; a batch step has none.
        if self.job.tasks <= 1:
            tell(f"importing docker image: {image}")
        pin, refused = self.job.pin(self.request, ref), self.job.refused(ref)
        if self.plugin.resolve_tags and self.job.is_first_of_several_nodes and not (pin or refused or ref.digest):
            log.warn(f"srun could not resolve the tag of {ref}: each node does, and one may see another image")
        try:
            stored = pull.pull(ref, self.settings, pin=pin, invitation=self._invitation())
        except PenrootError as e:
            if refused and isinstance(e, RefusedError) or not str(e):
                raise ImageError("") from e  # srun has printed it, or one node does, for all
            why = str(e) if str(e).startswith(f"{image}: ") else f"{image}: {e}"
            raise ImageError(f"failed to import docker image: {why}", hint=e.hint) from e
        tell(f"imported docker image: {image}")
        self.used = str(ref) if ref.digest else f"{ref}@{pin.digest if pin else stored.digest}"
        return self._of_stored(stored, str(ref))

    def _invitation(self) -> Invitation | None:
        if not self.job.swarm:
            return None
        from pyxis_py.submit import swarm

        return swarm.invitation(self.job, self.plugin)

    def _of_stored(self, stored: Image, name: str) -> rootfs.Source:
        if not self.leaves_a_directory:
            return containers.of_image(self.container, stored)
        return containers.create(self.container, stored.path, self.settings, name)

    def _from_srun(self, image: str) -> rootfs.Source:
        """The squashfs file that srun sends, when this node has it in its store. Raises ImageError."""
        from pyxis_py.submit import sent

        stored = sent.received(self.job, self.request, self.plugin, self.settings)
        if not self.settings.unpack:
            return self._of_stored(stored, image)
        return self._of_file(stored.file)

    def _from_importer(self, importer: Importer, image: str) -> rootfs.Source:
        uri = self.job.uri(self.request, image)
        containers.admit_imported(uri, self.settings)
        if self.job.tasks <= 1:
            tell(f"importing docker image: {image}")
        path = importer.get(uri)
        tell(f"imported docker image: {image}")
        try:
            return self._from_file(path)
        finally:
            if self.request.name is not None:
                importer.release()

    def chosen(self) -> dict[str, str]:
        """The variables of --container-env."""
        return options.chosen(self.request.env, self.job.environ)

    def of_file(self, image: Mapping[str, str]) -> dict[str, tuple[str | None, str]]:
        """What the environment file sets and unsets where the image sets ``image``; --container-env goes before it."""
        file, names = self.request.file, self.in_file()
        said = file.variables(image, self.job.environ) if file else {}
        return {name: variable for name, variable in said.items() if name in names}

    def in_file(self) -> set[str]:
        """The variables that the environment file sets or unsets, whatever to."""
        return set(self.request.file.by_name("env")) - self.chosen().keys() if self.request.file else set()

    def enter(self, source: rootfs.Source) -> tuple[dict[str, str], dict[str, str], str]:
        """Move this process into the container. Raises PenrootError.

        Returns its environment, what it would have of the variables of --container-env, and its working directory.
        """
        if source.upper and self.settings.rootfs_writable and source.shared < 0:
            claims.refuse_changed(source)
        source.lends = True  # to steps that join later
        if self.request.name is None:
            source.label = self.name  # for `penroot list -f`
        if self._runs_entrypoint:
            from pyxis_py.node import entrypoint  # while the host's files are there
        container = enter(
            Start(
                source=source,
                settings=self.settings,
                host=self.host,
                superuser=self.superuser,
                mounts=self._mounts(),
                env=self.chosen(),
                file=self.of_file if self.request.file else None,
                program=self.job.command,
                in_step=True,
            )
        )
        for name in [name for name, value in container.environ.items() if self._is_of_a_task(name, value)]:
            del container.environ[name]
        container.environ.update(self._fit_pmix(container.environ))
        if not self._runs_entrypoint:
            container.environ.setdefault("SHLVL", "0")  # as behind the shell that runs an image's script
            return container.environ, container.below, container.image.workdir if container.image else "/"
        environ, workdir = entrypoint.run(container, self._confine, shown=bool(self.request.entrypoint_log))
        return environ, container.below, workdir

    def _confine(self) -> None:
        """Leave this process the privileges of a task."""
        if not self.superuser:
            namespaces.confine(remap_root=self.settings.remap_root)

    def _mounts(self) -> tuple[Mount, ...]:
        """What the step mounts: Slurm's own come last, so that no tmpfs of the user hides them."""
        return *self.request.fstab(), *self.node_mounts(remap_root=self.settings.remap_root)

    def _is_of_a_task(self, name: str, value: str) -> bool:
        """Whether a hook has copied a variable of Slurm for this task. Other tasks, and other steps, have their own."""
        own = self.job.environ
        return name.startswith(_OF_TASKS) and own.get(name) == value or pmix.is_copy(name, value, own)

    @property
    def _runs_entrypoint(self) -> bool:
        return self.plugin.execute_entrypoint if (asked := self.request.entrypoint) is None else asked

    @property
    def _tells_pytorch(self) -> bool:
        """Whether PyTorch gets its own names for what Slurm says of tasks; at CSCS a file has to ask for that."""
        said = self.request.file.annotation("com.pyxis.pytorch_remap_vars") if self.request.file else None
        wanted, _ = said or (True, "")
        return wanted

    def environ(
        self, image: Mapping[str, str], task: Job, *, remap_root: bool
    ) -> tuple[dict[str, str], tuple[str, ...]]:
        """What to set and what to unset in a task: the image wins, except for --container-env."""
        kept = self.chosen()
        assign = {name: value for name, value in image.items() if name not in kept}
        if ("PYTORCH_VERSION" in image or "PYTORCH_VERSION" in self.job.environ) and self._tells_pytorch:
            from pyxis_py.node import pytorch

            assign.update(pytorch.variables(task, image))
        if "PENROOT_GPUS" in image:
            from pyxis_py.node import gpus

            assign.update(gpus.variables(task, image))
        # Of the names that are not here the task has the job's values.
        assign.update({name: value for name, value in kept.items() if self.job.environ.get(name) != value})
        drop = tuple(name for name in (*_LANGUAGES, *self.in_file()) if name not in kept and name not in assign)
        # In a batch script each srun is to have the file, and the tags, as sbatch has read them.
        ours = (RESOLVED, VERBOSE) if self.job.is_batch else (RESOLVED, VERBOSE, CARRIED, PINNED)
        return assign, (*drop, *pmix.withheld(self.mpi, remap_root=remap_root), *ours)


def _bind(path: str, flags: tuple[str, ...], what: str) -> Mount:
    """A mount of the node's at its own path."""
    return Mount(path, path, "none", (*flags, "bind", "nosuid", "nodev", "private"), 0, what)
