"""Find the containers that run on this node.

The helper of a step listens on a socket RUNTIME_PATH/UID/running/CONTAINER/JOB.STEP, which no process in a container
can reach. If the helper is dead, connect(2) fails with ECONNREFUSED, and the caller removes the socket.
"""

from __future__ import annotations

import _socket
import errno
import os
import select
import sys
import time

from enroot_py.base.errors import PenrootError
from enroot_py.base.fds import Fd
from enroot_py.base.locks import flock, is_at

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_NEW = ".new"  # suffix of a socket that does not listen yet
_RETRY_INTERVAL_S = 0.02
_WATCH_AFTER_S = 1  # most containers are ready earlier; after that, the waiting step checks the holder of the lock


class BusyError(PenrootError):
    """Another step holds the lock of a container."""


class _ElsewhereError(PermissionError):
    """A process is in the PID namespace of another job."""


class Peer:
    """The process at the other end of a connection. If check() succeeds, ``pid`` is still its PID.

    The user ID proves nothing, since programs of an image have the same ID. But every program in a container was
    started in another user namespace, and no program can leave its user namespace.
    """

    __slots__ = ("socket", "pid", "_process")

    def __init__(self, socket: _socket.socket) -> None:
        """Check the process. Raises ProcessLookupError if it has ended, PermissionError if it is not trusted."""
        self.socket = socket
        self._process = -1
        try:
            credentials = socket.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, 12)
            self.pid, uid = (int.from_bytes(credentials[at : at + 4], sys.byteorder) for at in (0, 4))
            if not self.pid:
                raise _ElsewhereError(errno.EPERM, "it is in the PID namespace of another job")
            if uid != os.geteuid():
                raise PermissionError(errno.EPERM, f"it belongs to uid {uid}")
            self._process = os.pidfd_open(self.pid)
            self.check()
            # Each message now names its sender. Before connect(2), SO_PASSCRED would bind the socket to an address.
            socket.setsockopt(_socket.SOL_SOCKET, _socket.SO_PASSCRED, 1)
        except BaseException:
            self.close()
            raise

    def check(self) -> None:
        """Check that the process lives outside of containers. Raises ProcessLookupError, PermissionError."""
        try:
            with open(f"/proc/{self.pid}/uid_map") as peer_map, open("/proc/self/uid_map") as own_map:
                inside = peer_map.read() != own_map.read()
        except (FileNotFoundError, PermissionError):
            # hidepid= of proc(5) hides processes that this process must not trace, such as helpers. Processes in the
            # user's containers are not hidden, because this process may trace them.
            inside = False
        if inside:
            raise PermissionError(errno.EPERM, "it is in a container")
        if select.select([self._process], (), (), 0)[0]:
            raise ProcessLookupError(errno.ESRCH, "it has ended")

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection and the pidfd."""
        self.socket.close()
        if self._process >= 0:
            os.close(self._process)
            self._process = -1


def _connect(directory: int, name: str) -> _socket.socket:
    socket = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)
    try:
        socket.connect(f"/proc/self/fd/{directory}/{name}")  # shorter than 108 bytes, unix(7)
    except BaseException:
        socket.close()
        raise
    return socket


class RunningContainers:
    """The running containers of one user on this node. A step is named JOB.STEP."""

    def __init__(self, runtime_path: str, uid: int) -> None:
        self.path = f"{runtime_path}/{uid}/running"

    def lock(self, name: str, seconds: float | None = None) -> Fd:
        """Lock the container ``name`` against steps that make, start or remove it, until the descriptor is closed.

        Raises PenrootError, and BusyError if locking takes longer than ``seconds`` or the holder makes no progress.
        """
        began = time.monotonic()
        directory = f"{self.path}/{name}"
        watch = None
        while True:
            try:
                self._make(directory)
                with Fd(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as fd:
                    while not flock(fd):
                        now = time.monotonic()
                        if seconds is not None and now - began >= seconds:
                            raise BusyError(f"another step has held {directory} for {seconds:.0f} s")
                        if now - began >= _WATCH_AFTER_S:
                            from enroot_py.base import waits  # rarely needed

                            watch = watch or waits.Watch(fd, f"making or removing the container {name}")
                            if reason := watch.look():
                                raise BusyError(f"cannot lock {directory}: {reason}", hint=waits.HINT)
                        time.sleep(_RETRY_INTERVAL_S)
                    if is_at(fd, directory):  # the previous holder may have removed the directory
                        return fd.keep()
            except FileNotFoundError:
                continue
            except OSError as e:
                raise PenrootError(f"cannot lock {directory}: {e.strerror}") from e

    def listen(self, name: str, step: str) -> _socket.socket:
        """Listen on the socket by which other steps find the container ``name`` of ``step``. Raises PenrootError."""
        directory = f"{self.path}/{name}"
        while True:
            listener = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)
            try:
                self._make(directory)
                with Fd(os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as fd:
                    if os.path.lexists(f"{directory}/{step}{_NEW}"):  # left by a killed helper of this step
                        os.unlink(f"{directory}/{step}{_NEW}")
                    listener.bind(f"/proc/self/fd/{fd}/{step}{_NEW}")  # shorter than 108 bytes, unix(7)
                    listener.listen(128)
                    os.rename(f"{step}{_NEW}", step, src_dir_fd=fd, dst_dir_fd=fd)
                return listener
            except FileNotFoundError:
                listener.close()  # another step has just removed the directory
            except OSError as e:
                raise PenrootError(f"cannot make the socket {directory}/{step}: {e.strerror}") from e

    def _make(self, directory: str) -> None:
        """Create missing directories. Raises FileNotFoundError if another step removes one, PenrootError."""
        if not os.path.isdir(os.path.dirname(self.path)):
            raise PenrootError(f"the directory {os.path.dirname(self.path)} was removed")
        # Not makedirs(): it fails if another step removes a directory at the same time.
        for path in (self.path, directory):
            try:
                os.mkdir(path, 0o700)
            except FileExistsError:
                continue

    def forget(self, name: str, step: str) -> None:
        """Remove the step's socket, and directories that are then empty."""
        directory = f"{self.path}/{name}"
        sockets = (f"{directory}/{step}", f"{directory}/{step}{_NEW}") if step else ()
        for path in (*sockets, directory, self.path):
            try:
                (os.unlink if path in sockets else os.rmdir)(path)
            except FileNotFoundError:
                continue
            except OSError:
                return  # other steps still run containers

    def _steps(self, name: str) -> list[str]:
        """Return the steps whose helpers, living or killed, have a socket for the container ``name``."""
        try:
            return [step for step in os.listdir(f"{self.path}/{name}") if not step.endswith(_NEW)]
        except FileNotFoundError:
            return []

    def peers(self, name: str) -> Iterator[tuple[str, Peer]]:
        """Yield the living helpers of the container ``name``, each with its step JOB.STEP.

        Raises PenrootError if another process answers instead of a helper.
        """
        for step in self._steps(name):
            try:
                with Fd(os.open(f"{self.path}/{name}", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as directory:
                    peer = Peer(_connect(directory, step))
            except FileNotFoundError:
                continue
            except (ConnectionRefusedError, ProcessLookupError):
                self.forget(name, step)
                continue
            except _ElsewhereError:
                raise PenrootError(
                    f"the container {name} runs in step {step}, whose job has separate namespaces",
                    hint="use another name: with NamespaceType=namespace/linux, jobs share no container",
                ) from None
            except OSError as e:
                raise PenrootError(
                    f"the process that answers at {self.path}/{name}/{step} "
                    f"is not the helper process of a step: {e.strerror}",
                    hint=f"end that step: scancel {step}; then remove the file",
                ) from e
            yield step, peer

    def others(self, name: str, step: str) -> list[str]:
        """Return the other steps with a helper that holds the container ``name``. Raises PenrootError."""
        others = []
        for other, peer in self.peers(name):
            with peer:
                if other != step:
                    others.append(other)
        return others

    def await_job(self, jobid: int, seconds: float) -> None:
        """Wait at most ``seconds`` until no step of a job holds a container. Raises PenrootError."""
        deadline = time.monotonic() + seconds
        while os.path.isdir(self.path) and time.monotonic() < deadline:
            holding = [step for name in os.listdir(self.path) for step in self.others(name, "")]
            if not any(step.startswith(f"{jobid}.") for step in holding):
                return
            time.sleep(_RETRY_INTERVAL_S)

    def forget_job(self, jobid: int) -> None:
        """Remove the sockets of all steps of a job."""
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            return
        for name in names:
            sockets = os.listdir(f"{self.path}/{name}") if os.path.isdir(f"{self.path}/{name}") else []
            steps = {socket.removesuffix(_NEW) for socket in sockets if socket.startswith(f"{jobid}.")}
            for step in steps or [""]:
                self.forget(name, step)


class Notes:
    """Notes by which the epilog of a job finds containers to remove: links in RUNTIME_PATH/UID.

    A note is made before its container.
    """

    def __init__(self, runtime_path: str, uid: int) -> None:
        self.path = f"{runtime_path}/{uid}"

    def add(self, name: str, directory: str) -> bool:
        """Make the note of a step or container. It links to the ``directory`` to remove, or to ``-`` if there is none.

        Returns whether the note is new. Raises PenrootError.
        """
        link = f"{self.path}/{name}"
        try:
            os.symlink(directory, link)
        except FileExistsError:
            return False
        except OSError as e:
            raise PenrootError(f"cannot write {link}: {e.strerror}") from e
        return True

    def erase(self, name: str) -> None:
        """Remove a note. Raises PenrootError."""
        link = f"{self.path}/{name}"
        try:
            os.unlink(link)
        except FileNotFoundError:
            return
        except OSError as e:
            raise PenrootError(f"cannot remove {link}: {e.strerror}") from e

    def of_job(self, jobid: int) -> list[str]:
        """Return the names of a job's notes."""
        prefixes = (f"pyxis_{jobid}.", f"pyxis_{jobid}_")
        return [name for name in os.listdir(self.path) if name.startswith(prefixes)]

    def of_feature(self, jobid: int, word: str) -> str:
        """Return the name of a feature's note for a job; ``word`` must not be a step number."""
        return f"pyxis_{jobid}.{word}"

    def directory(self, name: str) -> str:
        """Return the directory that a note names, or ``-``. Raises PenrootError."""
        link = f"{self.path}/{name}"
        try:
            return os.readlink(link)
        except OSError as e:
            raise PenrootError(f"cannot read the link {link}: {e.strerror}") from e
