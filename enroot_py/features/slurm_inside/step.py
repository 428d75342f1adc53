"""Slurm's programs in the container of a step, also in one that another step has started."""

from __future__ import annotations

import os

from enroot_py.base import linux, paths
from enroot_py.config.settings import BIN, HERE
from enroot_py.features.slurm_inside.options import SLURM
from enroot_py.features.slurm_inside.settings import SETTINGS, InsideSettings
from enroot_py.runtime import rootfs
from enroot_py.runtime.mounts import Mount

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from pyxis_py.held import Held
    from pyxis_py.step import Step


def settings(step: Step) -> dict[str, object]:
    """The settings of a step that this feature decides."""
    return {"slurm": step.request.value(SLURM)}


def attach(step: Step, container: Held) -> Programs | None:
    """What a running container gets when a step joins it; another step may have brought it already."""
    search = container.environ.get("PATH", "")
    if not InsideSettings(step.settings).slurm or BIN in search.split(":"):
        return None
    if container.remap_root:
        from enroot_py.features.slurm_inside import slurm

        slurm.warn_root()
    container.environ = {**container.environ, "PATH": f"{BIN}:{search}" if search else BIN}
    return Programs(step)


class Programs:
    """Slurm's programs for a running container: the settings and variables of the step, and who asks for them."""

    target = HERE
    what = "Slurm's programs"

    def __init__(self, step: Step) -> None:
        self._settings = step.settings
        self._host = step.host
        self._origin = step.settings.origin(SETTINGS["ENROOT_SLURM"])
        self._scratch = rootfs.make_scratch(step.settings)
        self._uid = os.geteuid()

    def tree(self) -> tuple[Mount, int, Callable[[int], None]]:
        """In a child's own mount namespace: make the directory, and detach it.

        The function is for later, with the root of the container.
        """
        from enroot_py.features.slurm_inside import slurm
        from enroot_py.runtime import hooks

        rootfs.mount_scratch(self._scratch)
        root = os.open(f"{self._scratch}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        node = slurm.fill(root, self._host, self._origin)
        with paths.open_in(root, HERE) as here:
            clone = linux.OPEN_TREE_CLONE | linux.OPEN_TREE_CLOEXEC
            tree = linux.open_tree(here, "", clone | linux.AT_EMPTY_PATH | linux.AT_RECURSIVE)
        users = slurm.users(node)  # before the container's database of users is in the place of the node's
        caller = hooks.caller(self._host, self._uid, os.getegid())

        def add_users(root: int) -> None:
            os.close(paths.open_in(root, "/etc/passwd", os.O_PATH, linux.RESOLVE_NO_XDEV))
            slurm.add_users(hooks.Context(root, "/", self._settings, {}, caller), users)

        return Mount(HERE, HERE, "none", "x-create=dir,rbind", 0, self._origin), tree, add_users
