"""MPI ranks: get the launcher's variables, and share one container between the ranks of a node.

UCX and cross-memory attach work only within one user namespace, so ranks that a launcher starts one by one join the
container of the first rank. The container ends with its last rank. A record (a file) lists the ranks in the container.
A rank locks the record while it makes or joins the container.
"""

from __future__ import annotations

import marshal
import os

from enroot_py.base import locks, proc, trusted
from enroot_py.base.errors import ContainerError
from enroot_py.runtime import environ, pmix, processes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from enroot_py.config.settings import Settings

# Prefixes of variables that launchers, process managers and their users set for ranks.
_LAUNCHERS = (
    *("PMIX_", "PMI_", "SLURM_", "FLUX_", "PALS_"),
    *("OMPI_", "ORTE_", "PRTE_"),
    *("HYDI_", "HYDRA_", "MPI_LOCAL", "MPIR_", "MPICH_", "GFORTRAN_UNBUFFERED", "I_MPI_"),
    *("MPISPAWN_", "MPIRUN_", "MV2_", "MVP_"),
)
# Ends of the names of variables about the host's MPI, which do not apply to the image's MPI.
_HOSTS = ("PREFIX", "LIBDIR", "DATADIR", "component_path", "I_MPI_ROOT", "PMIX_SECURITY_MODE")
_SIZE = ("OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
# Prefixes of variables that select devices for hooks. Ranks with different values get separate containers.
_SELECTORS = ("NVIDIA_", "MELLANOX_")


def variables(host: Mapping[str, str], settings: Settings) -> dict[str, str]:
    """Return the variables that the launcher gives to a rank. Raises ConfigError if MPI would hang."""
    if not (settings.mpi and environ.is_rank(host)):
        return {}
    variables = {key: value for key, value in host.items() if key.startswith(_LAUNCHERS) and not key.endswith(_HOSTS)}
    if settings.remap_root:
        size = next((host[name] for name in _SIZE if host.get(name, "").isdecimal()), "1")
        if pmix.check_root(host, int(size), "--root"):
            return {}  # a single process, usually a shell whose programs are not ranks
    return variables


class Record:
    """The record of the container that the ranks of a launcher share on this node.

    The record is locked until this process executes its program.
    """

    def __init__(
        self, container: Iterable[str], settings: Settings, host: Mapping[str, str], runtime_path: str
    ) -> None:
        """``container`` describes the requested container; the record is in ``runtime_path``. Raises ContainerError."""
        self._rank = environ.rank(host)
        launcher = _launcher(self._rank)
        words = [f"{name}={text}" for name, text, _ in settings.everything()]
        words += [f"{key}={value}" for key, value in host.items() if key.startswith(_SELECTORS) or key == "HOME"]
        words += [os.uname().nodename, host.get("PMIX_NAMESPACE", ""), *container]
        from _blake2 import blake2b

        digest = blake2b(os.fsencode("\0".join(words)), digest_size=12).hexdigest()
        self._directory = _directory(host) or runtime_path
        self._path = f"{self._directory}/ranks-{launcher}-{_started(launcher)}-{digest}"
        self._members: list[tuple[int, int, list[str]]] = []
        self._new_keyring = settings.unshare_keyring
        try:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            reason = "" if locks.flock(self._fd) else _await_rank(self._fd)
        except OSError as e:
            raise ContainerError(
                f"cannot lock {self._path}: {e.strerror}", hint="set ENROOT_JOIN=no for one container per rank"
            ) from e
        if reason:
            hint = "check that process, or set ENROOT_JOIN=no for one container per rank"
            raise ContainerError(f"cannot join the other ranks: {reason}", hint=hint)

    def join(self) -> tuple[dict[str, str], list[str]] | None:
        """Enter the container of the other ranks. Return its variables, and the names of variables with a known origin.

        Return None if the container does not run, or if this rank is in it already: then the caller makes a container.
        """
        try:
            self._members, space, umask, variables, origins = marshal.loads(os.pread(self._fd, 1 << 24, 0))
        except (EOFError, ValueError, TypeError):
            return None  # no rank has made a container, or the rank that made it was killed before it wrote the record
        self._members = [member for member in self._members if _started(member[0]) == member[1]]
        if any(rank == self._rank for _, _, rank in self._members):
            self._members = []
            os.close(self._fd)
            self._fd = -1  # this rank is a member already: make another container
            return None
        for pid, _, _ in self._members:
            try:
                spaces = processes.namespaces(pid, space)
            except OSError:
                continue  # that rank is ending
            self._write(space, umask, variables, origins)
            processes.enter(spaces, pid, new_keyring=self._new_keyring)
            os.chdir("/")
            os.umask(umask)
            return variables, origins
        self._members = []
        return None

    def keep(self, variables: Mapping[str, str], origins: Mapping[str, str], own_names: Iterable[str]) -> None:
        """Let the other ranks join the container of this first rank. Do not pass them the variables ``own_names``."""
        if self._fd < 0:
            return
        umask = os.umask(0o022)
        os.umask(umask)
        shared = {key: value for key, value in variables.items() if key not in own_names}
        self._write(processes.inode(os.getpid(), "mnt"), umask, shared, [key for key in origins if key in shared])

    def sweep(self) -> None:
        """Remove records of ended launchers without a session directory, for example of Hydra."""
        for name in os.listdir(self._directory):
            words = name.split("-")
            if words[0] == "ranks" and len(words) == 4 and _has_ended(int(words[1]), int(words[2])):
                try:
                    os.unlink(f"{self._directory}/{name}")
                except FileNotFoundError:
                    continue  # another rank was faster

    def _write(self, space: int, umask: int, variables: dict[str, str], origins: list[str]) -> None:
        me = os.getpid()
        members = [*self._members, (me, _started(me), self._rank)]
        data = marshal.dumps((members, space, umask, variables, origins))
        os.ftruncate(self._fd, os.pwrite(self._fd, data, 0))


def _await_rank(fd: int) -> str:
    """Wait until another rank has made or joined the container. Return why the wait failed, or ""."""
    from enroot_py.base import waits

    return waits.lock(fd, "starting the shared container of this node's ranks")


def _directory(host: Mapping[str, str]) -> str:
    """Return the launcher's session directory, if it is private to the user, or ""."""
    session = host.get("PMIX_SERVER_TMPDIR", "")
    try:
        trusted_there = session and trusted.place(session, strict=True).st_uid == os.geteuid()
    except OSError:
        return ""
    return session if trusted_there else ""


def _started(pid: int) -> int:
    """Return the start time of a process in ticks after boot, or 0 if it has ended or is hidden."""
    stat = proc.look(pid)
    return stat.started if stat else 0


def _has_ended(pid: int, began: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # another user's process: /proc/PID may be hidden
        pass
    return _started(pid) != began


def _launcher(rank: list[str]) -> int:
    """Return the launcher of this rank: the nearest ancestor that is not part of the rank."""
    pid = os.getppid()
    while any(rank) and pid > 1:
        try:
            if environ.rank(processes.of_process(pid)) != rank:
                break
            pid = proc.Stat(pid).parent
        except OSError:  # another user's process, such as slurmstepd
            break
    return pid
