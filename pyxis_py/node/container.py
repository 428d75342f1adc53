"""The container of a step: which one it gets, and how it is made and entered."""

from __future__ import annotations

import os

from enroot_py.base import linux
from enroot_py.base.errors import ContainerError, MountError
from enroot_py.runtime import namespaces, pmix, rootfs
from enroot_py.runtime.enter import Start, enter
from enroot_py.runtime.mounting import Mount
from enroot_py.store import claims, containers
from pyxis_py.node import owned
from pyxis_py.node.environment import Environment
from pyxis_py.node.image import Image

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pyxis_py.node.step import Step

_XAUTHORITY = "/tmp/.Xauthority-"  # where slurmstepd has what --x11 needs


class Container:
    """What a step runs in: a container of its name that exists or runs, or a new one of its image."""

    def __init__(self, step: Step) -> None:
        self.step, self.environment = step, Environment(step)
        # Its directory, which other nodes see too if they share homes.
        self.name = claims.of_this_node(step.name, step.settings.data_path)
        self.save_attempted = False
        self.used = ""  # the image of a registry that it was made of, with its digest
        self._takes_over = False  # from a helper of this step that was killed

    @property
    def directory(self) -> str:
        """Where it is, or would be."""
        return f"{self.step.settings.data_path}/{self.name}"

    def begin(self) -> None:
        """Before anything is made: note what there will be to remove, should this process be killed.

        Raises ImageError, ConfigError if it could not be saved at the end: no callback of Slurm after the last task
        changes the status with which srun exits, and the work would be lost.
        """
        namespaces.hide()  # from other processes of the user
        if self.step.request.save:
            from pyxis_py.node.save import Save

            Save(self.step).check()
        self._claim_name()
        self._takes_over = not self._note(self.step.own_note)
        # The server of an image, whose parent ends as it is built, becomes our child: Held.let_go waits for it.
        linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)

    def _claim_name(self) -> None:
        """Keep other nodes from its directory, if there is to be one, while this process lives."""
        step = self.step
        if step.leaves_a_directory:
            self._claim = claims.Claim(step.name, step.settings.data_path, kept=step.request.name is not None)
            self.name = self._claim.name

    def _note(self, name: str) -> bool:
        """Note the step or its container for the epilog, and what is to be removed with it; whether that is new."""
        goes_with_it = name == self.step.name or self.goes_with_steps
        return self.step.notes.add(name, self.directory if goes_with_it else "-")

    @property
    def goes_with_steps(self) -> bool:
        """Whether it is removed after the last step that runs it: it was made for a step that gave it no name."""
        return self.step.request.name is None or bool(owned.maker(self.name, self.step.settings))

    def joins_running(self) -> bool:
        """Whether the step goes into a container of its name that runs. Raises ContainerError if it must not."""
        mode = self.step.request.name_mode
        if mode == "create":
            raise ContainerError(
                f"--container-name={self.step.request.name}:create: the container exists already and is running",
                hint="remove :create",
            )
        return mode != "no_exec"

    def directory_id(self) -> tuple[int, int] | None:
        """Device and inode of its directory, which a later one of the same name does not have; None without one."""
        try:
            status = os.stat(self.directory)
        except FileNotFoundError:
            return None
        return status.st_dev, status.st_ino

    @property
    def authority(self) -> str:
        """The file with which programs reach the display of srun --x11, or ""."""
        path = self.step.job.environ.get("XAUTHORITY", "")
        return path if path.startswith(_XAUTHORITY) and os.path.exists(path) else ""

    def node_mounts(self, *, remap_root: bool) -> list[Mount]:
        """What the step needs of the node: the batch script, the display, PMIx."""
        mounts = []
        if self.step.job.script:
            mounts.append(_bind(self.step.job.script, ("x-create=file", "ro"), "batch script"))
        if self.authority:
            mounts.append(_bind(self.authority, ("x-create=file", "ro", "noexec"), "srun --x11"))
        of_pmix = pmix.directories(self.environment.mpi, remap_root=remap_root)
        return [*mounts, *(_bind(path, ("x-create=dir", mode, "noexec"), what) for path, mode, what in of_pmix)]

    def prepare(self) -> rootfs.Source:
        """Its root file system, imported and created if needed. Raises PenrootError."""
        if self.step.settings.remap_root:
            self.environment.check_pmix()
        self._check_sources()
        return self._existing() or self._create()

    def _check_sources(self) -> None:
        """Raise MountError if the source of a mount is not there, or is no squashfs file if it has to be one."""
        request = self.step.request
        for mount in request.mounts:
            origin = mount.origin or request.origins["mounts"]
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
                hint = f"it must exist on the node {self.step.job.node}" if missing else "use a path that you can read"
                raise MountError(f"{origin}: {why}: {mount.source}", hint=hint) from e

    def _existing(self) -> rootfs.Source | None:
        """The container that has the name of --container-name. Raises ContainerError if it must not be used."""
        name, mode = self.step.request.name, self.step.request.name_mode
        if name is None:
            return None
        if mode == "exec":
            raise ContainerError(
                f"--container-name={name}:exec: the container is not running on this node",
                hint="remove :exec to start it",
            )
        if self.name not in containers.names(self.step.settings):
            return None
        if mode == "create":
            raise ContainerError(
                f"--container-name={name}:create: the container exists already",
                hint="remove :create, or remove the container: penroot remove " + self.name,
            )
        return containers.open_container(self.name, self.step.settings)

    def _create(self) -> rootfs.Source:
        """The root file system of the image, or a container made of it. Raises PenrootError."""
        name, image = self.step.request.name, self.step.request.image
        if image is None:
            raise ContainerError(
                f"--container-name={name}: there is no such container on this node",
                hint=self._other_name(name or "") or "add --container-image to create it",
            )
        if name is None and self.step.leaves_a_directory:
            return self._create_for_steps(image)
        if name is not None and self.step.plugin.container_scope == "job":
            self._note(self.step.name)
        return self._made_of(image)

    def _made_of(self, image: str) -> rootfs.Source:
        made = Image(self.step, image, self.name)
        source = made.source()
        self.used = made.used
        return source

    def _create_for_steps(self, image: str) -> rootfs.Source:
        """Make a container that goes with the steps that run it."""
        settings, node = self.step.settings, self.step.job.node
        if self._takes_over and owned.maker(self.name, settings)[:1] in ([], [node]):
            # A helper of this very step made it and was killed. The lock of the name was that one's too.
            owned.remove(self.name, settings)
            self._claim_name()
        source = self._made_of(image)
        owned.mark(self.directory, node)
        owned.sweep(settings, node)
        return source

    def _other_name(self, name: str) -> str:
        """How to name what the user may mean: a container of another job, or one of `penroot create`."""
        settings = self.step.settings
        if self.name != self.step.name:
            mine = "add --container-image to create one on this node"
            other = claims.holder(self.step.name, settings.data_path)
            return f"it is that of node {other}, where a step runs it: {mine}"
        if self.step.plugin.container_scope == "job":
            return "add --container-image to create it: on this cluster, names are valid within one job"
        if name not in containers.names(settings):
            return ""
        if name.startswith("pyxis_"):
            return f"the container {name} is --container-name={name.removeprefix('pyxis_')}"
        return f"the container {name} is none of a step, whose names begin so: penroot create --name pyxis_{name}"

    def enter(self, source: rootfs.Source) -> tuple[dict[str, str], dict[str, str], str]:
        """Move this process into the container. Raises PenrootError.

        Returns its environment, what it would have of the variables of --container-env, and its working directory.
        """
        step, environment = self.step, self.environment
        if source.upper and step.settings.rootfs_writable and source.shared < 0:
            claims.refuse_changed(source)
        source.lends = True  # to steps that join later
        if step.request.name is None:
            source.label = step.name  # for `penroot list -f`
        if self._runs_entrypoint:
            from pyxis_py.node import entrypoint  # while the host's files are there
        container = enter(
            Start(
                source=source,
                settings=step.settings,
                host=step.host,
                superuser=step.superuser,
                # Slurm's own come last, so that no tmpfs of the user hides them.
                mounts=(*step.request.fstab(), *self.node_mounts(remap_root=step.settings.remap_root)),
                env=environment.chosen(),
                file=environment.of_file if step.request.file else None,
                program=step.job.command,
                in_step=True,
            )
        )
        container.environ = environment.without_task(container.environ)
        container.environ |= environment.fit_pmix(container.environ, remap_root=step.settings.remap_root)
        if not self._runs_entrypoint:
            container.environ.setdefault("SHLVL", "0")  # as behind the shell that runs an image's script
            return container.environ, container.below, container.image.workdir if container.image else "/"
        environ, workdir = entrypoint.run(container, self._confine, shown=bool(step.request.entrypoint_log))
        return environ, container.below, workdir

    def _confine(self) -> None:
        """Leave this process the privileges of a task."""
        if not self.step.superuser:
            namespaces.confine(remap_root=self.step.settings.remap_root)

    @property
    def _runs_entrypoint(self) -> bool:
        asked = self.step.request.entrypoint
        return self.step.plugin.execute_entrypoint if asked is None else asked


def _bind(path: str, flags: tuple[str, ...], what: str) -> Mount:
    """A mount of the node's at its own path."""
    return Mount(path, path, "none", (*flags, "bind", "nosuid", "nodev", "private"), 0, what)
