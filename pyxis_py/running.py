"""Containers that run on this node: how one step finds the container of another.

The helper of a step notes its abstract address as a symbolic link
RUNTIME_PATH/UID/running/CONTAINER/JOB.STEP. A link whose helper is dead is
known by ECONNREFUSED and removed by whoever finds it.
"""

import _socket
import fcntl
import os

from enroot_py.errors import PenrootError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from pyxis_py.job import Job


class Registry:
    """The running containers of one user on this node."""

    def __init__(self, runtime_path: str, uid: int) -> None:
        self.path = f"{runtime_path}/{uid}/running"

    def lock(self, name: str, meanwhile: "Callable[[], None] | None" = None) -> int:
        """Wait until no other step makes, starts or removes the container ``name``; closing the descriptor ends that.

        ``meanwhile`` is called again and again until then. Raises PenrootError.
        """
        directory = f"{self.path}/{name}"
        while True:
            try:
                self._make(directory)
                fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                _flock(fd, meanwhile)
                # Whoever had it may have removed the directory.
                if os.stat(directory).st_ino == os.fstat(fd).st_ino:
                    return fd
                os.close(fd)
            except FileNotFoundError:
                continue
            except OSError as e:
                raise PenrootError(f"cannot lock {directory}: {e.strerror}") from e

    def add(self, name: str, job: "Job", address: str) -> None:
        """Note that a step runs the container ``name``. Raises PenrootError."""
        directory = f"{self.path}/{name}"
        link = f"{directory}/{job.jobid}.{job.stepid}"
        while True:
            try:
                self._make(directory)
                os.symlink(address, link)
                return
            except FileExistsError:
                self._forget(name, f"{job.jobid}.{job.stepid}")  # of a helper of this very step that was killed
            except FileNotFoundError:
                continue  # another step has just removed the directory
            except OSError as e:
                raise PenrootError(f"cannot write {link}: {e.strerror}") from e

    def _make(self, directory: str) -> None:
        """Make what is missing. Raises FileNotFoundError where another step removes it, PenrootError."""
        if not os.path.isdir(os.path.dirname(self.path)):
            raise PenrootError(f"somebody has removed {os.path.dirname(self.path)}")
        # Not makedirs(): it fails where somebody removes what it has found to be there.
        for path in (self.path, directory):
            try:
                os.mkdir(path, 0o700)
            except FileExistsError:
                continue

    def remove(self, name: str, job: "Job") -> None:
        """Forget it; what is gone already is gone."""
        self._forget(name, f"{job.jobid}.{job.stepid}")

    def _forget(self, name: str, step: str) -> None:
        directory = f"{self.path}/{name}"
        for function, path in ((os.unlink, f"{directory}/{step}"), (os.rmdir, directory), (os.rmdir, self.path)):
            if path.endswith("/"):
                continue
            try:
                function(path)
            except FileNotFoundError:
                continue
            except OSError:
                return  # other steps run it too, or other containers

    def addresses(self, name: str) -> "list[tuple[str, str]]":
        """Step and address of each helper that says that it runs ``name``; it may be dead."""
        found = []
        try:
            steps = os.listdir(f"{self.path}/{name}")
        except FileNotFoundError:
            return []
        for step in steps:
            try:
                found.append((step, os.readlink(f"{self.path}/{name}/{step}")))
            except FileNotFoundError:
                continue
        return found

    def others(self, name: str, jobid: int, stepid: int) -> "list[str]":
        """The steps besides this one whose helpers hold the container ``name``."""
        found = []
        for step, address in self.addresses(name):
            if step == f"{jobid}.{stepid}":
                continue
            socket = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)
            try:
                socket.connect("\0" + address)
                found.append(step)
            except ConnectionRefusedError:
                self.forget_dead(name, step)
            finally:
                socket.close()
        return found

    def forget_dead(self, name: str, step: str) -> None:
        """Remove the link of a helper that does not answer."""
        self._forget(name, step)

    def forget_job(self, jobid: int) -> None:
        """Remove the links of all steps of a job."""
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            return
        for name in names:
            steps = [step for step, _ in self.addresses(name) if step.startswith(f"{jobid}.")]
            for step in steps or [""]:
                self._forget(name, step)


def _flock(fd: int, meanwhile: "Callable[[], None] | None") -> None:
    if meanwhile is None:
        fcntl.flock(fd, fcntl.LOCK_EX)
        return
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            meanwhile()


def note(runtime_path: str, uid: int, container: str, directory: str) -> None:
    """Say, before it is made, that a step or a container of a job is to go with it: the epilog removes what is left.

    ``directory`` is what goes with it, ``-`` for nothing but the link itself.

    Raises PenrootError.
    """
    link = f"{runtime_path}/{uid}/{container}"
    try:
        os.symlink(directory, link)
    except FileExistsError:
        return
    except OSError as e:
        raise PenrootError(f"cannot write {link}: {e.strerror}") from e


def erase(runtime_path: str, uid: int, container: str) -> None:
    """The container is removed. Raises PenrootError."""
    link = f"{runtime_path}/{uid}/{container}"
    try:
        os.unlink(link)
    except FileNotFoundError:
        return
    except OSError as e:
        raise PenrootError(f"cannot remove {link}: {e.strerror}") from e


def noted(runtime_path: str, uid: int, jobid: int) -> "list[tuple[str, str]]":
    """Container and directory of all that a job was to leave behind."""
    directory = f"{runtime_path}/{uid}"
    found = []
    for name in os.listdir(directory):
        if name.startswith((f"pyxis_{jobid}.", f"pyxis_{jobid}_")):
            found.append((name, os.readlink(f"{directory}/{name}")))
    return found
