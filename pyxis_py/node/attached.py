"""Mount MPI and X11 files of the node in a running container for a step that joins it, and detach them at the end.

A child mounts and detaches, because a process that has entered the namespaces of the container cannot leave them.
Programs of the container run meanwhile, and can change the container's paths. So each target of a mount is opened only
once, and each mount is detached by its descriptor.
"""

from __future__ import annotations

import errno
import os

from enroot_py.base import linux, log, paths
from enroot_py.base.errors import ContainerError, PenrootError
from enroot_py.base.fds import Fd
from enroot_py.base.features import parts
from enroot_py.runtime import mounting, pmix, rootfs
from enroot_py.runtime.mounting import Mount
from pyxis_py.node.held import AddedMounts, enter_user, in_child

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import Protocol

    from pyxis_py.node.held import Answer, Held

    class Extra(Protocol):
        """A mount that a feature adds to a running container. ``what`` names it in messages.

        tree() is called in a child with a private mount namespace. It returns the mount, the detached tree, and a
        function. The function takes a descriptor of the container's root, and adds users to the container.
        """

        target: str
        what: str

        def tree(self) -> tuple[Mount, int, Callable[[int], None]]: ...


_CLONE = linux.OPEN_TREE_CLONE | linux.OPEN_TREE_CLOEXEC


def prepare(held: Held) -> AddedMounts | None:
    """Mount the files of the node that a joining step needs in a running container. Raises ContainerError."""
    container, step = held.container, held.step
    if held.remap_root:
        container.environment.check_pmix()
    wanted, name = container.node_mounts(remap_root=held.remap_root), step.request.name
    extras: list[Extra] = [extra for attach in parts("attach") if (extra := attach(step, held))]
    if not wanted and not extras:
        return None
    try:
        added = add_mounts(held.spaces, held.unsealed, wanted, extras)
    except PenrootError as e:
        if step.job.script or extras:
            raise ContainerError(f"cannot prepare the running container {name}: {e}", hint=e.hint) from e
        log.warn(f"MPI and X11 may not work in the running container {name}: {e}")
        return None
    needed = {**dict.fromkeys(filter(None, (step.job.script,)), "the batch script")}
    needed |= {extra.target: extra.what for extra in extras}
    for target, why in added.failed.items():
        if target in needed:
            detach_mounts(held.spaces, added)
            raise ContainerError(
                f"cannot mount {needed[target]} in the running container {name}: {target}: {why}",
                hint=f"for a separate container: --container-name={name}:no_exec",
            )
        # Only warn: steps without MPI or X11 do not need these mounts, and PMIx has fallbacks for some of them.
        what = "X11" if target == container.authority else "MPI"
        log.warn(f"{what} may not work in the running container {name}: {target}: {why}")
    for target in (pmix.MUNGE, *(extra.target for extra in extras)):
        added.leave(target)  # other steps may use these mounts
    return added


def finish(held: Held, added: AddedMounts) -> None:
    """At the end of the step, detach its mounts from the container, which may still run."""
    step = held.step
    try:
        others = step.running.others(step.name, step.job.step)
        if any(other.startswith(f"{step.job.jobid}.") for other in others):
            added.leave(held.container.authority)  # other steps of the job use the X authority file too
        if added.attached:
            detach_mounts(held.spaces, added)
    except PenrootError as e:
        log.warn(f"mounts of step {step.job.step} stay in the running container {step.request.name}: {e}")


def add_mounts(
    spaces: Mapping[str, int], unsealed: int, wanted: Sequence[Mount], extras: Sequence[Extra]
) -> AddedMounts:
    """Mount ``wanted`` and ``extras`` in the container with the namespaces ``spaces``.

    ``unsealed`` is a writable mount of the root file system, or -1. Mount points for a read-only container are made in
    it. Raises PenrootError if nothing could be mounted.
    """
    pairs, fds = in_child(lambda: _add_mounts(spaces, unsealed, wanted, extras))
    attached = dict(zip((value for key, value in pairs if key == "attached"), fds, strict=True))
    failed = dict(value.split("\n", 1) for key, value in pairs if key == "failed")
    return AddedMounts(attached, failed)


def detach_mounts(spaces: Mapping[str, int], added: AddedMounts) -> None:
    """Detach added mounts from the container. Raises PenrootError."""
    in_child(lambda: _detach_mounts(spaces, added.attached.values()))
    for target in list(added.attached):
        added.leave(target)


def _add_mounts(spaces: Mapping[str, int], unsealed: int, wanted: Sequence[Mount], extras: Sequence[Extra]) -> Answer:
    enter_user(spaces)
    # open_tree(2) clones only mounts of a mount namespace that the caller's user namespace owns. So copy the node's.
    linux.unshare(linux.CLONE_NEWNS)
    linux.mount_setattr(linux.AT_FDCWD, "/", linux.AT_RECURSIVE, 0, 0, linux.MS_SLAVE)
    trees: list[tuple[Mount, int]] = []
    failed: list[tuple[str, str]] = []
    for mount in wanted:
        try:
            trees.append((mount, _clone(mount)))
        except OSError as e:
            failed.append(("failed", f"{mount.target}\n{e.strerror}"))
    later = []
    for extra in extras:
        mount, tree, add_users = extra.tree()
        trees.append((mount, tree))
        later.append(add_users)
    rootfs.import_no_files()
    linux.setns(spaces["mnt"], linux.CLONE_NEWNS)
    root = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    attached: list[tuple[str, str]] = []
    fds = []
    for mount, tree in trees:
        try:
            if _attach(mount, tree, root, unsealed):
                attached.append(("attached", mount.target))
                fds.append(tree)
        except OSError as e:
            failed.append(("failed", f"{mount.target}\n{e.strerror}"))
    for add_users in later:
        try:
            add_users(root if unsealed < 0 else unsealed)
        except (PenrootError, OSError) as e:
            log.warn(f"the container's /etc/passwd lacks the user that Slurm runs as: {e}")
    return [*attached, *failed], fds


def _clone(mount: Mount) -> int:
    tree = linux.open_tree(linux.AT_FDCWD, mount.source, _CLONE)
    linux.mount_setattr(tree, "", linux.AT_EMPTY_PATH, mount.attributes, 0, mount.propagation)
    return tree


def _attach(mount: Mount, tree: int, root: int, unsealed: int) -> bool:
    """Attach a tree to its target. Return False if the target has this mount already. Raises OSError."""
    make = paths.make_directory if "x-create=dir" in mount.words else paths.make_file
    try:
        target = _open(root, mount.target)
    except FileNotFoundError:
        try:
            os.close(make(root, mount.target, 0, named=True, entered=True))
        except OSError as e:
            if e.errno != errno.EROFS or unsealed < 0:
                raise
            # Use the writable mount of the same file system; the mount that programs see stays read-only.
            os.close(make(unsealed, mount.target, 0, named=True, entered=True))
        target = _open(root, mount.target)
    with target:
        # Has the first step, another step, or an earlier helper of this step already mounted the tree?
        if os.path.sameopenfile(tree, target) or "rbind" in mount.words and _is_mounted(root, mount.target):
            return False
        mounting.attach(tree, target)
    return True


def _is_mounted(root: int, path: str) -> bool:
    above, _, name = path.rpartition("/")
    with paths.open_in(root, above) as directory:
        try:
            os.close(paths.open_in(directory, name, os.O_PATH, linux.RESOLVE_NO_XDEV))
        except OSError as e:
            return e.errno == errno.EXDEV
    return False


def _open(root: int, path: str) -> Fd:
    """Open the target of a mount. A path that crosses a mount must not contain a symbolic link. Raises OSError."""
    try:
        return paths.open_in(root, path, os.O_PATH, linux.RESOLVE_NO_XDEV)
    except OSError as e:
        if e.errno != errno.EXDEV:
            raise
    try:
        return paths.open_in(root, path, os.O_PATH, linux.RESOLVE_NO_SYMLINKS)
    except OSError as e:
        raise paths.Foreign(path) if e.errno == errno.ELOOP else e from e


def _detach_mounts(spaces: Mapping[str, int], attached: Iterable[int]) -> Answer:
    # umount2(2) takes only a path. A path beneath the node's /proc/self/fd leads to the mount and nowhere else. The
    # /proc of the container may be forged.
    descriptors = os.open("/proc/self/fd", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    enter_user(spaces)
    rootfs.import_no_files()
    linux.setns(spaces["mnt"], linux.CLONE_NEWNS)
    os.fchdir(descriptors)
    for mount in attached:
        try:
            linux.umount2(str(int(mount)), linux.MNT_DETACH)
        except OSError as e:
            if e.errno != errno.EINVAL:  # root of the container has unmounted the target
                raise
    return [], []
