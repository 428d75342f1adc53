"""Choose, make and enter the container of a step."""

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

_XAUTHORITY = "/tmp/.Xauthority-"  # prefix of slurmstepd's file for --x11


class Container:
    """The container of a step: the container of --container-name, running or not, or a new container of the image."""

    def __init__(self, step: Step) -> None:
        self.step, self.environment = step, Environment(step)
        # The name of the container's directory. Nodes may share the data path, so the name may end in @NODE.
        self.name = claims.of_this_node(step.name, step.settings.data_path)
        self.save_attempted = False
        self.used = ""  # the registry image of the container, with digest
        self._takes_over = False  # True if an earlier helper of this step was killed

    @property
    def directory(self) -> str:
        """Return the path of the container's directory, whether it exists or not."""
        return f"{self.step.settings.data_path}/{self.name}"

    def begin(self) -> None:
        """Before anything is made, record what must be removed if this process is killed.

        Raises ImageError or ConfigError if --container-save cannot succeed. An error after the last task would come
        too late: no callback of Slurm can change the exit status of srun then, and the work would be lost.
        """
        namespaces.hide()  # from other processes of the user
        if self.step.request.save:
            from pyxis_py.node.save import Save

            Save(self.step).check()
        self._claim_name()
        self._takes_over = not self._note(self.step.own_note)
        # Adopt squashfuse, the server of the image, when its parent has ended: Held.let_go() waits for squashfuse.
        linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)

    def _claim_name(self) -> None:
        """If the container needs a directory, claim its name: other nodes cannot use it while this process lives."""
        step = self.step
        if step.leaves_a_directory:
            self._claim = claims.Claim(step.name, step.settings.data_path, kept=step.request.name is not None)
            self.name = self._claim.name

    def _note(self, name: str) -> bool:
        """Write a note about the step or its container for the epilog. Return whether the note is new."""
        goes_with_it = name == self.step.name or self.goes_with_steps
        return self.step.notes.add(name, self.directory if goes_with_it else "-")

    @property
    def goes_with_steps(self) -> bool:
        """Return whether the last step in the container removes it: yes, if it was made without --container-name."""
        return self.step.request.name is None or bool(owned.maker(self.name, self.step.settings))

    def joins_running(self) -> bool:
        """Return whether to join the running container of this name: False for :no_exec. Raises ContainerError."""
        mode = self.step.request.name_mode
        if mode == "create":
            raise ContainerError(
                f"--container-name={self.step.request.name}:create: the container exists already and is running",
                hint="remove :create",
            )
        return mode != "no_exec"

    def directory_id(self) -> tuple[int, int] | None:
        """Return device and inode of the directory, or None. A new directory of the same name has another inode."""
        try:
            status = os.stat(self.directory)
        except FileNotFoundError:
            return None
        return status.st_dev, status.st_ino

    @property
    def authority(self) -> str:
        """Return the X authority file of srun --x11, or ""."""
        path = self.step.job.environ.get("XAUTHORITY", "")
        return path if path.startswith(_XAUTHORITY) and os.path.exists(path) else ""

    def node_mounts(self, *, remap_root: bool) -> list[Mount]:
        """Return mounts of node files that the step needs: the batch script, the display, PMIx."""
        mounts = []
        if self.step.job.script:
            mounts.append(_bind(self.step.job.script, ("x-create=file", "ro"), "batch script"))
        if self.authority:
            mounts.append(_bind(self.authority, ("x-create=file", "ro", "noexec"), "srun --x11"))
        of_pmix = pmix.directories(self.environment.mpi, remap_root=remap_root)
        return [*mounts, *(_bind(path, ("x-create=dir", mode, "noexec"), purpose) for path, mode, purpose in of_pmix)]

    def prepare(self) -> rootfs.Source:
        """Return the root file system; import and create it if needed. Raises PenrootError."""
        if self.step.settings.remap_root:
            self.environment.check_pmix()
        self._check_sources()
        return self._existing() or self._create()

    def _check_sources(self) -> None:
        """Raise MountError if the source of a mount does not exist, or is no squashfs file despite the flag sqsh."""
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
                reason = "source path does not exist" if missing else f"source path: {e.strerror}"
                hint = f"create it on the node {self.step.job.node}" if missing else "use a path that you can read"
                raise MountError(f"{origin}: {reason}: {mount.source}", hint=hint) from e

    def _existing(self) -> rootfs.Source | None:
        """Return the existing container of --container-name, or None. Raises ContainerError if it must not be used."""
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
        """Return the root file system of the image, or of a new container. Raises PenrootError."""
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
        step_image = Image(self.step, image, self.name)
        source = step_image.source()
        self.used = step_image.used
        return source

    def _create_for_steps(self, image: str) -> rootfs.Source:
        """Make a container that is removed after its last step."""
        settings, node = self.step.settings, self.step.job.node
        if self._takes_over and owned.maker(self.name, settings)[:1] in ([], [node]):
            # A killed helper of the same step may have made the container. The killed helper also held the name's lock.
            owned.remove(self.name, settings)
            self._claim_name()
        source = self._made_of(image)
        owned.mark(self.directory, node)
        owned.sweep(settings, node)
        return source

    def _other_name(self, name: str) -> str:
        """Return a hint if the user may mean a container of another node, another job or `penroot create`, else ""."""
        settings = self.step.settings
        if self.name != self.step.name:
            mine = "add --container-image to create one on this node"
            other = claims.holder(self.step.name, settings.data_path)
            return f"a step on node {other} runs the container of that name: {mine}"
        if self.step.plugin.container_scope == "job":
            return "add --container-image to create it: on this cluster, names are valid within one job"
        if name not in containers.names(settings):
            return ""
        if name.startswith("pyxis_"):
            return f"for the container {name}, use --container-name={name.removeprefix('pyxis_')}"
        return f"containers of steps are named pyxis_NAME; recreate it: penroot create --name pyxis_{name} IMAGE"

    def enter(self, source: rootfs.Source) -> tuple[dict[str, str], dict[str, str], str]:
        """Move this process into the container. Raises PenrootError.

        Returns the environment, the values that --container-env and the environment file have replaced in it, and the
        working directory.
        """
        step, environment = self.step, self.environment
        if source.upper and step.settings.rootfs_writable and source.shared < 0:
            claims.refuse_changed(source)
        source.lends = True  # steps may join later
        if step.request.name is None:
            source.label = step.name  # for `penroot list -f`
        if self._runs_entrypoint:
            from pyxis_py.node import entrypoint  # import it while the host's files are reachable
        container = enter(
            Start(
                source=source,
                settings=step.settings,
                host=step.host,
                superuser=step.superuser,
                # Mounts for Slurm come last: a tmpfs of the user could hide earlier mounts.
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
            container.environ.setdefault("SHLVL", "0")  # in enroot, a shell starts the command
            return container.environ, container.below, container.image.workdir if container.image else "/"
        environ, workdir = entrypoint.run(container, self._confine, shown=bool(step.request.entrypoint_log))
        return environ, container.below, workdir

    def _confine(self) -> None:
        """Reduce this process to the privileges of a task."""
        if not self.step.superuser:
            namespaces.confine(remap_root=self.step.settings.remap_root)

    @property
    def _runs_entrypoint(self) -> bool:
        requested = self.step.request.entrypoint
        return self.step.plugin.execute_entrypoint if requested is None else requested


def _bind(path: str, flags: tuple[str, ...], purpose: str) -> Mount:
    """Return a bind mount of a node path on the same path."""
    return Mount(path, path, "none", (*flags, "bind", "nosuid", "nodev", "private"), 0, purpose)
