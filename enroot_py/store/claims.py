"""Let one process at a time change a container, because two mounts of one upper directory corrupt the directory.

Nodes may share the data path, for example in home directories on a file server. A running step holds flock(2) on the
file ``.NAME.node`` beside the container NAME. The file names the step's node. If another node holds the lock, this
node uses the container NAME@NODE. Within a node, the mounts show which process changes a container.
Source: the kernel's filesystems/overlayfs, "Sharing and copying layers".
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
_MAX_NODE_NAME_BYTES = 256
_RETRY_INTERVAL_S = 0.02
_EXCLUSIVE_LOCK_TIMEOUT_S = 2.0


class Claim:
    """A lock on a container. The attribute ``name`` is NAME, or NAME@NODE if another node holds the lock on NAME.

    A container that is not ``kept`` is removed with its step. If another node left such a container NAME behind, the
    attribute is NAME@NODE, too. On a file system without locks, it is NAME.
    """

    __slots__ = ("name", "_fd")

    def __init__(self, name: str, data_path: str, *, kept: bool) -> None:
        node = os.uname().nodename
        own_name = f"{name}@{node}"
        self.name = name
        try:
            trusted.place(data_path, make=True)
            if os.path.lexists(f"{data_path}/{own_name}") or not self._hold(name, node, data_path, kept=kept):
                self.name = own_name
                self._hold(own_name, node, data_path, kept=kept)
        except OSError:
            return  # creating the container will report the error

    def _hold(self, name: str, node: str, data_path: str, *, kept: bool) -> bool:
        """Lock the container ``name`` for this node. Return False if another node holds it. Raises OSError."""
        path = _file(name, data_path)
        deadline = time.monotonic() + _EXCLUSIVE_LOCK_TIMEOUT_S
        while True:
            with Fd(os.open(path, _OPEN | os.O_CREAT, 0o600)) as fd:
                if flock(fd):
                    is_foreign = _node(fd) not in ("", node)
                    if is_foreign and not kept and os.path.lexists(f"{data_path}/{name}"):
                        return False  # the other node's helper process was killed; that node will remove the container
                    if is_at(fd, path):
                        os.ftruncate(fd, os.pwrite(fd, os.fsencode(node), 0))
                # Share the lock with other steps of this node. Exclusive locks are held only briefly: wait for them.
                shared = flock(fd, shared=True)
                if (shared or time.monotonic() >= deadline) and is_at(fd, path):
                    if _node(fd) != node:
                        return False
                    self._fd = fd.keep()
                    return True
            time.sleep(_RETRY_INTERVAL_S)


def of_this_node(name: str, data_path: str) -> str:
    """Return the name that this node has claimed, or would claim, for the container ``name``."""
    node = os.uname().nodename
    own_name = f"{name}@{node}"
    return own_name if os.path.lexists(f"{data_path}/{own_name}") or holder(name, data_path) not in ("", node) else name


def holder(name: str, data_path: str) -> str:
    """Return the node whose steps hold the container's lock, or ""."""
    try:
        file = os.open(_file(name, data_path), _OPEN)
    except OSError:
        return ""
    with Fd(file) as fd:
        return "" if flock(fd) else _node(fd)


def forget(name: str, data_path: str, *, made: bool) -> None:
    """Remove the lock file of a removed container. If the container was never ``made``, keep another node's lock."""
    if made or holder(name, data_path) in ("", os.uname().nodename):
        try:
            os.unlink(_file(name, data_path))
        except OSError:
            return


def change_alone(source: Source) -> None:
    """Lock a container for changes until this process executes its program. Call this before mounting.

    Raises ContainerError if another process is changing the container, or holds the lock and makes no progress.
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
                break  # a step that changes nothing holds the lock
            time.sleep(_RETRY_INTERVAL_S)  # another start holds the exclusive lock
            if time.monotonic() - began < _EXCLUSIVE_LOCK_TIMEOUT_S:
                continue
            from enroot_py.base import waits

            watch = watch or waits.Watch(fd, f"starting the container {name}")
            if reason := watch.look():
                raise ContainerError(f"cannot change the container {name}: {reason}", hint=waits.HINT)
        else:
            os.ftruncate(fd, os.pwrite(fd, os.fsencode(node), 0))
    except OSError:
        pass  # the file system has no locks
    refuse_changed(source)


def refuse_changed(source: Source) -> None:
    """Raise ContainerError if a process of this node is changing the container."""
    process = processes.changing(source.upper)
    if process is None:
        return
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(process.started))
    holder_text = f"process {process.pid} ({process.comm}) on {os.uname().nodename}, since {since},"
    hint = f"run a command in that container: penroot exec {process.pid} COMMAND; or start without --rw"
    raise _taken(process.name, holder_text, hint)


def _taken(name: str, holder_text: str, hint: str) -> ContainerError:
    return ContainerError(
        f"{holder_text} is changing the container {name}: a second writer would corrupt it", hint=hint
    )


def _file(name: str, data_path: str) -> str:
    return f"{data_path}/.{name[:200]}.node"


def _node(fd: int) -> str:
    return os.fsdecode(os.pread(fd, _MAX_NODE_NAME_BYTES, 0)).strip()
