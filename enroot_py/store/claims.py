"""Which node uses a container, and which process changes it: two mounts of one upper directory corrupt each other.

Nodes may share the data path, as in homes on a file server. A step holds a lock, flock(2), on the
file ``.NAME.node`` beside the container NAME for as long as it runs; the file names the step's node.
Where another node holds the lock, this one makes and uses NAME@NODE. On one node the mounts of
processes say who changes a container. Source: the kernel's filesystems/overlayfs, "Sharing and copying layers".
"""

from __future__ import annotations

import os
import time

from enroot_py.base import trusted
from enroot_py.base.errors import ContainerError
from enroot_py.base.fds import Fd
from enroot_py.base.locks import flock, is_at
from enroot_py.runtime import processes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from enroot_py.runtime.rootfs import Source

_OPEN = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_LONGEST = 256  # bytes of the name of a node
_MOMENT = 0.02  # seconds
_PATIENCE = 2.0  # seconds until whoever has a claim alone is not waited for


class Claim:
    """Which container this node uses as ``name``: that one, or NAME@NODE where another node has it.

    A container that is not ``kept`` goes with its step: one that another node has left behind is not used either.
    Where the data path has no locks, ``name`` is used as it is.
    """

    __slots__ = ("name", "_fd")

    def __init__(self, name: str, data_path: str, *, kept: bool) -> None:
        node = os.uname().nodename
        own = f"{name}@{node}"
        self.name = name
        try:
            trusted.place(data_path, make=True)
            if os.path.lexists(f"{data_path}/{own}") or not self._hold(name, node, data_path, kept=kept):
                self.name = own
                self._hold(own, node, data_path, kept=kept)
        except OSError:
            return  # whoever makes something there reports what is wrong with the place

    def _hold(self, name: str, node: str, data_path: str, *, kept: bool) -> bool:
        """Lock the container ``name`` for this node; False where it is another node's. Raises OSError."""
        path = _file(name, data_path)
        until = time.monotonic() + _PATIENCE
        while True:
            with Fd(os.open(path, _OPEN | os.O_CREAT, 0o600)) as fd:
                if flock(fd):
                    others = _node(fd) not in ("", node)
                    if others and not kept and os.path.lexists(f"{data_path}/{name}"):
                        return False  # its helper was killed, and the other node will remove it
                    if is_at(fd, path):
                        os.ftruncate(fd, os.pwrite(fd, os.fsencode(node), 0))
                # With the other steps of this node. Who has it alone is about to share it, or only looks who has it.
                shared = flock(fd, shared=True)
                if (shared or time.monotonic() >= until) and is_at(fd, path):
                    if _node(fd) != node:
                        return False
                    self._fd = fd.keep()
                    return True
            time.sleep(_MOMENT)


def of_this_node(name: str, data_path: str) -> str:
    """The name that this node has claimed for ``name``, or would claim."""
    node = os.uname().nodename
    own = f"{name}@{node}"
    return own if os.path.lexists(f"{data_path}/{own}") or holder(name, data_path) not in ("", node) else name


def holder(name: str, data_path: str) -> str:
    """The node that has a container for itself while its steps run, or ""."""
    try:
        file = os.open(_file(name, data_path), _OPEN)
    except OSError:
        return ""
    with Fd(file) as fd:
        return "" if flock(fd) else _node(fd)


def forget(name: str, data_path: str, *, made: bool) -> None:
    """Remove the claim of a container that is gone; where it was never ``made``, unless another node has claimed it."""
    if made or holder(name, data_path) in ("", os.uname().nodename):
        try:
            os.unlink(_file(name, data_path))
        except OSError:
            return  # there is none, or none that matters


def change_alone(source: Source) -> None:
    """Keep others from changing a container until this process executes its program; call it before the mount.

    Raises ContainerError where another process is changing it, or is about to and does not go on.
    """
    data_path, name = os.path.split(source.changes)
    node = os.uname().nodename
    began = time.monotonic()
    watch = None
    try:
        fd = os.open(_file(name, data_path), _OPEN | os.O_CREAT, 0o600)
        while not flock(fd):
            if (other := _node(fd)) not in ("", node):
                raise _taken(name, f"a step on node {other}", f"use that node, or wait: squeue --nodelist={other}")
            refuse_changed(source)
            if flock(fd, shared=True):
                break  # a step holds it that changes nothing
            time.sleep(_MOMENT)  # another start is at this point
            if time.monotonic() - began < _PATIENCE:
                continue
            from enroot_py.base import waits

            watch = watch or waits.Watch(fd, f"starting the container {name}")
            if why := watch.look():
                raise ContainerError(f"cannot change the container {name}: {why}", hint=waits.HINT)
        else:
            os.ftruncate(fd, os.pwrite(fd, os.fsencode(node), 0))
    except OSError:
        pass  # the place has no locks
    refuse_changed(source)


def refuse_changed(source: Source) -> None:
    """Raise ContainerError where a process of this node is changing a container."""
    process = processes.changing(source.upper)
    if process is None:
        return
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(process.started))
    who = f"process {process.pid} ({process.comm}) on {os.uname().nodename}, since {since},"
    hint = f"penroot exec {process.pid} COMMAND to run in it too, or start without --rw"
    raise _taken(process.name, who, hint)


def _taken(name: str, who: str, hint: str) -> ContainerError:
    return ContainerError(f"{who} is changing the container {name}: two at once would corrupt it", hint=hint)


def _file(name: str, data_path: str) -> str:
    return f"{data_path}/.{name[:200]}.node"


def _node(fd: int) -> str:
    return os.fsdecode(os.pread(fd, _LONGEST, 0)).strip()
