"""What a step brings into a container that another step has made: mounts, while the programs of both run in it.

Done by a child: it moves into the namespaces of the container, and there is no way back.
"""

from __future__ import annotations

import errno
import os

from enroot_py.base import linux, paths
from enroot_py.base.errors import PenrootError
from enroot_py.base.fds import Fd
from enroot_py.runtime import mounts, namespaces

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from enroot_py.runtime.mounts import Mount

_CLONE = linux.OPEN_TREE_CLONE | linux.OPEN_TREE_CLOEXEC


def bring(spaces: Mapping[str, int], wanted: Sequence[Mount]) -> str:
    """Bind directories of the node in the container with the namespaces ``spaces``; why not, else empty."""
    return _in_child(lambda: _bring(spaces, wanted))


def take_back(spaces: Mapping[str, int], brought: Sequence[Mount]) -> str:
    """Detach them again; why not, else empty."""
    return _in_child(lambda: _take_back(spaces, brought))


def _in_child(act: Callable[[], None]) -> str:
    read, write = os.pipe()
    with Fd(write):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                act()
                status = 0
            except (PenrootError, OSError) as e:
                os.write(write, os.fsencode(str(e)))
            finally:
                os._exit(status)
    with open(read, "rb") as answer:
        why = os.fsdecode(answer.read())
    _, status = os.waitpid(child, 0)
    return why or (f"the process that mounts ended with status {os.waitstatus_to_exitcode(status)}" if status else "")


def _enter_user(spaces: Mapping[str, int]) -> None:
    namespaces.hide()
    if "user" in spaces:  # not where root keeps its privileges
        linux.setns(spaces["user"], linux.CLONE_NEWUSER)


def _bring(spaces: Mapping[str, int], wanted: Sequence[Mount]) -> None:
    _enter_user(spaces)
    # Mounts are cloned in a namespace that the caller's user namespace owns, open_tree(2): a copy of the node's.
    linux.unshare(linux.CLONE_NEWNS)
    trees = [linux.open_tree(linux.AT_FDCWD, mount.source, _CLONE) for mount in wanted]
    for mount, tree in zip(wanted, trees, strict=True):
        linux.mount_setattr(tree, "", linux.AT_EMPTY_PATH, mount.attributes, 0, mount.propagation)
    linux.setns(spaces["mnt"], linux.CLONE_NEWNS)
    root = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    for mount, tree in zip(wanted, trees, strict=True):
        target = _make(root, mount.target)
        if not os.path.sameopenfile(tree, target):  # else the first step has it, or an earlier helper of this one
            mounts.attach(tree, target)


def _make(root: int, path: str) -> int:
    """Open a directory of the container to mount on, made as `mounts` does. Raises OSError."""
    try:
        return paths.make_directory(root, path, 0, named=True, entered=True)
    except OSError as e:
        if e.errno != errno.EROFS:
            raise
    # Through a mount of our own; what the programs see stays read-only.
    view = linux.open_tree(root, "", _CLONE | linux.AT_EMPTY_PATH)
    linux.mount_setattr(view, "", linux.AT_EMPTY_PATH, 0, linux.MOUNT_ATTR_RDONLY, 0)
    os.close(paths.make_directory(view, path, 0, entered=True))
    return paths.open_in(root, path)


def _take_back(spaces: Mapping[str, int], brought: Sequence[Mount]) -> None:
    _enter_user(spaces)
    linux.setns(spaces["mnt"], linux.CLONE_NEWNS)
    for mount in brought:
        linux.umount2(mount.target, linux.MNT_DETACH)
