"""Add Slurm's programs to a container that another step has started."""

from __future__ import annotations

import os

from enroot_py.base import linux, paths
from enroot_py.config.settings import HERE as SLURM_DIRECTORY
from enroot_py.features.slurm_inside import slurm
from enroot_py.features.slurm_inside.settings import SETTINGS
from enroot_py.runtime import hooks, rootfs
from enroot_py.runtime.mounting import Mount

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from pyxis_py.node.step import Step


class Programs:
    """Slurm's programs for a running container, with the settings and variables of the joining step."""

    target = SLURM_DIRECTORY
    what = "Slurm's programs"

    def __init__(self, step: Step) -> None:
        self._settings = step.settings
        self._host = step.host
        self._origin = step.settings.origin(SETTINGS["ENROOT_SLURM"])
        self._scratch = rootfs.make_scratch(step.settings)
        self._uid = os.geteuid()

    def tree(self) -> tuple[Mount, int, Callable[[int], None]]:
        """Fill SLURM_DIRECTORY in the private mount namespace of this child process.

        Return the mount entry, a descriptor of the detached mount, and add_users(). In the container's /etc/passwd,
        add_users(root) adds SlurmUser and SlurmdUser; ``root`` is a descriptor of the container's root directory.
        """
        rootfs.mount_scratch(self._scratch)
        scratch_root = os.open(f"{self._scratch}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        node = slurm.fill(scratch_root, self._host, self._origin)
        with paths.open_in(scratch_root, SLURM_DIRECTORY) as directory:
            clone = linux.OPEN_TREE_CLONE | linux.OPEN_TREE_CLOEXEC
            tree = linux.open_tree(directory, "", clone | linux.AT_EMPTY_PATH | linux.AT_RECURSIVE)
        users = slurm.users(node)  # look them up now: after setns(2), pwd would read the container's /etc/passwd
        caller = hooks.caller(self._host, self._uid, os.getegid())

        def add_users(root: int) -> None:
            os.close(paths.open_in(root, "/etc/passwd", os.O_PATH, linux.RESOLVE_NO_XDEV))
            slurm.add_users(hooks.Context(root, "/", self._settings, {}, caller), users)

        return (
            Mount(SLURM_DIRECTORY, SLURM_DIRECTORY, "none", ("x-create=dir", "rbind"), 0, self._origin),
            tree,
            add_users,
        )
