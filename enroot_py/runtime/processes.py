"""Find running containers in /proc, list and join them.

A container has no daemon and no record of its own while it runs; its root
mount says which one it is. Sources: proc(5), namespaces(7).
"""

from __future__ import annotations

import os
import sys

from enroot_py.base import linux, mountinfo, proc
from enroot_py.base.errors import ContainerError
from enroot_py.base.fds import Fd
from enroot_py.base.mountinfo import Mounted
from enroot_py.config.settings import Settings
from enroot_py.runtime import environ, execute, rootfs, supervise
from enroot_py.runtime.namespaces import confine, hide

# In the order in which they can be joined: the user namespace gives the
# capabilities for the others, setns(2).
_NAMESPACES = ("user", "cgroup", "ipc", "uts", "net", "pid", "mnt")
UNKNOWN = "<unknown>"
_NS_GET_USERNS, _NS_GET_OWNER_UID = 0xB701, 0xB704  # ioctl_ns(2)
_LOOKS = 100  # at a directory that changes meanwhile
_FUSE = "fuse-overlayfs:"  # what fuseoverlay.py writes before the path


class Process:
    """The oldest process of a running container; ``name`` is UNKNOWN if it was started from an image without Slurm."""

    __slots__ = ("name", "pid", "comm", "state", "started", "cpu", "mntns", "userns", "command")

    def __init__(self, name: str, pid: int, mntns: int) -> None:
        """Read /proc/PID. Raises OSError if the process has ended or is not ours."""
        stat = proc.Stat(pid)
        self.name = name
        self.pid = pid
        self.comm = stat.comm
        self.state = stat.state
        self.started = _boot_time() + stat.started / os.sysconf("SC_CLK_TCK")
        self.cpu = stat.processor_s()
        self.mntns = mntns
        self.userns = inode(pid, "user")
        with open(f"/proc/{pid}/cmdline", "rb") as f:
            self.command = os.fsdecode(f.read().replace(b"\0", b" ")).strip() or f"[{self.comm}]"


def running(settings: Settings) -> list[Process]:
    """Return the user's running containers, by name and age."""
    ours = inode(os.getpid(), "mnt")
    oldest: dict[int, Process] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdecimal():
            continue
        try:
            mntns = inode(int(entry), "mnt")
            name = _container(int(entry), settings) if mntns != ours else None
            if name is None or not _is_own(int(entry)):
                continue
            process = Process(name, int(entry), mntns)
        except OSError:  # it has gone, or is somebody else's
            continue
        first = oldest.get(mntns)
        if first is None or (process.started, process.pid) < (first.started, first.pid):
            oldest[mntns] = process
    return sorted(oldest.values(), key=lambda p: (p.name == UNKNOWN, p.name, p.started))


def inode(pid: int, namespace: str) -> int:
    """Return the identity of a process's namespace. Raises OSError."""
    return os.stat(f"/proc/{pid}/ns/{namespace}").st_ino


def _boot_time() -> int:
    with open("/proc/stat") as f:
        return next(int(line.split()[1]) for line in f if line.startswith("btime "))


def _container(pid: int, settings: Settings) -> str | None:
    """Return the container that has the root mount of ``pid``: its name, UNKNOWN, or None for another mount."""
    root = _root_mount(pid)
    if root is None:
        return None
    data, fuse = settings.data_path + "/", root.source.startswith(_FUSE)
    if not fuse and root.fstype != "overlay":
        # A bind of a directory is named from the root of its own file system, which may be mounted anywhere.
        name = root.root.rpartition("/")[2]
        return name if name and _is_root(pid, data + name) else None
    options = [("userxattr", ""), ("upperdir", root.source.removeprefix(_FUSE))] if fuse else root.settings()
    for key, place in options:
        if place.startswith(data):
            name = place[len(data) :].partition("/")[0]
            removed = key == "upperdir" and not fuse and not _changes(pid, place)
            return UNKNOWN if removed or name[0] == "." else name  # hidden: store/throwaway.py
    label = root.source.removeprefix(_FUSE).partition(":")[0]
    if ("userxattr", "") not in options:
        return None
    return label if label.startswith("pyxis_") else UNKNOWN  # of a step: Source.label


def _root_mount(pid: int) -> Mounted | None:
    """Return the mount that is the root of a process. Raises OSError."""
    return next((mount for mount in mountinfo.read(f"/proc/{pid}/mountinfo") if mount.target == "/"), None)


def changing(upper: str) -> Process | None:
    """Return the lowest PID in a container with the upper directory ``upper``, or None."""
    seen = {inode(os.getpid(), "mnt")}
    for entry in sorted(filter(str.isdecimal, os.listdir("/proc")), key=int):
        try:
            mntns = inode(int(entry), "mnt")
            if mntns in seen:
                continue
            seen.add(mntns)
            root = _root_mount(int(entry)) if _is_own(int(entry)) else None
            if root is None:
                continue
            if ("upperdir", upper) in root.settings() and _changes(int(entry), upper) or root.source == _FUSE + upper:
                return Process(os.path.basename(os.path.dirname(upper)), int(entry), mntns)
        except OSError:  # it has gone, or is somebody else's
            continue
    return None


def _changes(pid: int, upper: str) -> bool:
    """Whether the overlay of a process has the directory ``upper``, not one of that name that was removed before.

    The root of an overlay has the times of its upper directory, and nobody sets the time of a change, inode(7).
    """
    try:
        for _ in range(_LOOKS):
            before = os.stat(upper).st_ctime_ns
            if os.stat(f"/proc/{pid}/root").st_ctime_ns == before:
                return True
            if os.stat(upper).st_ctime_ns == before:
                return False
    except FileNotFoundError:
        return False
    except PermissionError:
        pass
    return True  # for all that can be seen


def _is_root(pid: int, directory: str) -> bool:
    """Return whether a directory is the root of a process."""
    try:
        return os.path.samestat(os.stat(f"/proc/{pid}/root"), os.stat(directory))
    except OSError:
        return False


def find(target: str, settings: Settings) -> int:
    """Return the PID to join for a PID, a container's name, or a Slurm JOBID[.STEPID]. Raises ContainerError."""
    pid = int(target) if target.isdecimal() and os.path.exists(f"/proc/{target}") else 0
    if pid:
        try:
            outside = inode(pid, "mnt") == inode(os.getpid(), "mnt")
        except OSError:
            pass  # another user's: a job may have the same number
        else:
            if outside:
                hint = f"penroot list --fancy shows running containers; a step of a job: penroot exec {pid}.0"
                raise ContainerError(f"process {pid} is not in a container", hint=hint)
            return pid
    for process in running(settings):
        if process.name in (target, f"pyxis_{target}") or _of_job(process.pid, target):
            return process.pid
    if pid:
        return pid  # join() says why that cannot be
    raise ContainerError(
        f"no running container {target} on {os.uname().nodename}",
        hint="penroot list --fancy shows the running containers",
    )


def _of_job(pid: int, target: str) -> bool:
    job, _, step = target.partition(".")
    if not job.isdecimal():
        return False
    try:
        environ = of_process(pid)
    except OSError:
        return False
    return environ.get("SLURM_JOB_ID") == job and step in ("", environ.get("SLURM_STEP_ID"))


def of_process(pid: int) -> dict[str, str]:
    """Return the environment with which ``pid`` was executed. Raises OSError."""
    with open(f"/proc/{pid}/environ", "rb") as f:
        pairs = (entry.partition(b"=") for entry in f.read().split(b"\0") if entry)
        return {os.fsdecode(key): os.fsdecode(value) for key, _, value in pairs}


def join(pid: int, settings: Settings) -> tuple[dict[str, str], set[str], bool]:
    """Enter the namespaces and the working directory of ``pid``.

    Return the environment of ``pid``, the names of the namespaces, and whether ``pid`` has an empty capability bounding
    set. Only children of this process are in the PID namespace. Raises ContainerError.
    """
    try:
        environ = of_process(pid)
        cwd = os.readlink(f"/proc/{pid}/cwd")
        spaces = namespaces(pid)
        confined = _is_bounded(pid)
    except FileNotFoundError as e:
        raise ContainerError(f"no process {pid}", hint="penroot list --fancy shows running containers") from e
    except OSError as e:
        raise ContainerError(f"cannot join process {pid}: {e.strerror}", hint="check that it is your container") from e
    _check_owner(spaces, pid)
    enter(spaces, pid, new_keyring=settings.unshare_keyring)
    os.chdir(cwd if os.path.isdir(cwd) else "/")
    return environ, set(spaces), confined


def _owner(space: int) -> int:
    """Return the user who made an open user namespace."""
    from fcntl import ioctl

    return int.from_bytes(ioctl(space, _NS_GET_OWNER_UID, bytes(4)), sys.byteorder)


def _is_own(pid: int) -> bool:
    """Return whether the user made the container of a process. Others can name a mount as they like. Raises OSError."""
    with Fd(os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)) as space:
        return os.path.samestat(os.fstat(space), os.stat("/proc/self/ns/user")) or _owner(space) == os.geteuid()


def _check_owner(spaces: dict[str, int], pid: int) -> None:
    """Refuse to enter another user's container, as root could. Raises ContainerError.

    Its files would decide what root of the node executes there, and its root could trace that program.
    """
    if "user" in spaces and (owner := _owner(spaces["user"])) != os.geteuid():
        raise ContainerError(
            f"process {pid} is in a container of user {owner}", hint="run penroot exec as that user: setpriv(1), su(1)"
        )


def _is_bounded(pid: int) -> bool:
    """Return whether the capability bounding set of ``pid`` is empty. Raises OSError."""
    with open(f"/proc/{pid}/status", errors="surrogateescape") as f:
        return any(line.startswith("CapBnd:") and not int(line.split()[1], 16) for line in f)


def namespaces(pid: int, mnt: int = 0) -> dict[str, int]:
    """Open the namespaces of a process that differ from ours, in the order in which they can be joined.

    ``mnt`` is what its mount namespace must be. Raises OSError.
    """
    if mnt and inode(pid, "mnt") != mnt:
        raise ProcessLookupError(pid)
    names = [name for name in _NAMESPACES if inode(pid, name) != inode(os.getpid(), name)]
    spaces = {name: os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC) for name in names}
    if "pid" in spaces and "user" in spaces:
        # Root's PID namespace belongs to the user namespace around the program's: isolated.enter().
        from fcntl import ioctl

        owner = ioctl(spaces["pid"], _NS_GET_USERNS)
        if not os.path.samestat(os.fstat(owner), os.fstat(spaces["user"])):
            return {"outer": owner, "pid": spaces.pop("pid"), **spaces}
        os.close(owner)
    return spaces


def enter(spaces: dict[str, int], pid: int, *, new_keyring: bool) -> None:
    """Enter the namespaces of ``pid`` and close their descriptors. Raises ContainerError."""
    hide()  # from what runs there
    execute.withhold(new_keyring=new_keyring)
    rootfs.import_no_files()
    try:
        for namespace in spaces.values():
            with Fd(namespace):
                linux.setns(namespace, 0)
    except OSError as e:
        raise ContainerError(f"cannot join process {pid}: {e.strerror}", hint="check that it is your container") from e


def execute_in(target: str, command: tuple[str, ...], env: tuple[str, ...], settings: Settings) -> int:
    """``penroot exec``: run ``command`` in a running container; returns its exit status. Raises PenrootError."""
    given = environ.of_options(env, os.environ)
    variables, joined, confined = join(find(target, settings), settings)
    is_root, forks = os.geteuid() == 0, "pid" in joined
    variables.update(given)
    if settings.close_descriptors:
        execute.close_descriptors(variables)
    child = supervise.fork() if forks else 0
    if child:
        return supervise.wait(child)
    if not is_root or "user" in joined:  # ENROOT_ALLOW_SUPERUSER creates no user namespace
        confine(remap_root=is_root and not confined)
    execute.execute(command, variables)
