"""Find, list and join running containers, by /proc.

No daemon and no record lists all running containers: the root mount of a process names its container. Sources:
proc(5), namespaces(7).
"""

from __future__ import annotations

import os
import sys

from enroot_py.base import linux, mountinfo, proc
from enroot_py.base.errors import ContainerError
from enroot_py.base.fds import Fd
from enroot_py.base.mountinfo import Mounted
from enroot_py.config.settings import Settings
from enroot_py.runtime import detached, execute, named, rootfs
from enroot_py.runtime.namespaces import hide

# Namespaces in the order in which they can be joined: the user namespace gives the capabilities to join the others,
# setns(2).
_NAMESPACES = ("user", "cgroup", "ipc", "uts", "net", "pid", "mnt")
UNKNOWN = "<unknown>"
_NS_GET_USERNS, _NS_GET_OWNER_UID = 0xB701, 0xB704  # ioctl_ns(2)
_ROOT_BYTES = 256  # number of bytes to read from mountinfo at a time
_MAX_READS = 100  # repetitions of a comparison while the directory changes
_FUSE = "fuse-overlayfs:"  # prefix of the mount source of fuseoverlay.py
_BATCH = "4294967291"
STEPS = {_BATCH: "batch", "4294967290": "interactive"}  # SLURM_BATCH_SCRIPT, SLURM_INTERACTIVE_STEP of slurm.h


class Process:
    """A process of a running container. ``name`` is UNKNOWN for an unnamed container outside Slurm."""

    __slots__ = ("name", "pid", "comm", "state", "started", "cpu", "mntns", "userns", "command")

    def __init__(self, name: str, pid: int, mntns: int) -> None:
        """Read /proc/PID. Raises OSError if the process has ended or is not ours."""
        stat = proc.Stat(pid)
        self.name = name
        self.pid = pid
        self.comm = stat.comm
        self.state = stat.state
        self.started = seconds(stat.started)
        self.cpu = stat.processor_s()
        self.mntns = mntns
        self.userns = inode(pid, "user")
        with Fd(os.open(f"/proc/{pid}/cmdline", os.O_RDONLY | os.O_CLOEXEC)) as fd:
            self.command = os.fsdecode(fd.content().replace(b"\0", b" ")).strip() or f"[{self.comm}]"


def seconds(ticks: int) -> float:
    """Return a start time of proc.Stat in seconds since the epoch."""
    global _boot
    if not _boot:
        with open("/proc/stat") as f:
            _boot = next(int(line.split()[1]) for line in f if line.startswith("btime "))
    return _boot + ticks / os.sysconf("SC_CLK_TCK")


_boot = 0


def running(settings: Settings) -> list[Process]:
    """Return the user's running containers, sorted by name and age."""
    containers = filter(None, (_oldest(pids, space, settings) for space, pids in by_mount_namespace().items()))
    return sorted(containers, key=lambda p: (p.name == UNKNOWN, p.name, p.started))


def by_mount_namespace() -> dict[int, list[int]]:
    """Return mount namespace -> processes that this process may inspect, without this process's mount namespace."""
    spaces: dict[str, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            try:
                spaces.setdefault(os.readlink(f"/proc/{entry}/ns/mnt"), []).append(int(entry))
            except OSError:  # the process has ended, or belongs to another user
                continue
    spaces.pop(os.readlink("/proc/self/ns/mnt"), None)
    return {int(link[5:-1]): pids for link, pids in spaces.items()}  # mnt:[4026531841]


def _oldest(pids: list[int], space: int, settings: Settings) -> Process | None:
    """Return the oldest of ``pids`` (of one mount namespace) that is in a container of the user, or None."""
    ages = []
    for pid in pids:
        try:
            ages.append((proc.Stat(pid).started if len(pids) > 1 else 0, pid))
        except OSError:
            continue
    for _, pid in sorted(ages):
        try:
            name = container_of(pid, settings)
            if name is not None:
                return Process(name, pid, space)
        except OSError:
            continue
    return None


def inode(pid: int, namespace: str) -> int:
    """Return the inode number that identifies a process's namespace. Raises OSError."""
    return os.stat(f"/proc/{pid}/ns/{namespace}").st_ino


def container_of(pid: int, settings: Settings) -> str | None:
    """Return the name of the user's container in which ``pid`` runs.

    Returns UNKNOWN if the container has no name, or None if ``pid`` is in no container of the user. Raises OSError.
    """
    name = _container(pid, settings)
    return name if name is not None and _is_own(pid) else None


def _container(pid: int, settings: Settings) -> str | None:
    """Do the same as container_of(), but do not check the user: the root mount of ``pid`` names its container."""
    root = _root_mount(pid)
    if root is None:
        return None
    data, fuse = settings.data_path + "/", root.source.startswith(_FUSE)
    if not fuse and root.fstype != "overlay":
        # mountinfo shows the path of a bound directory within its file system, which may be mounted anywhere.
        name = root.root.rpartition("/")[2]
        return name if name and _is_root(pid, data + name) else None
    options = [("userxattr", ""), ("upperdir", root.source.removeprefix(_FUSE))] if fuse else root.settings()
    for key, path in options:
        if path.startswith(data):
            name = path[len(data) :].partition("/")[0]
            removed = key == "upperdir" and not fuse and not _changes(pid, path)
            return UNKNOWN if removed or name[0] == "." else name  # a hidden name is from store/throwaway.py
    label = root.source.removeprefix(_FUSE).partition(":")[0]
    if ("userxattr", "") not in options:
        return None
    return label if label.startswith("pyxis_") else UNKNOWN  # a step's container has a label: Source.label


def _root_mount(pid: int) -> Mounted | None:
    """Return the mount that is the root of a process. Raises OSError."""
    # The root is among the first mounts. The kernel formats only the part that is read.
    with Fd(os.open(f"/proc/{pid}/mountinfo", os.O_RDONLY | os.O_CLOEXEC)) as fd:
        rest = b""
        while part := os.read(fd, _ROOT_BYTES):
            lines, _, rest = (rest + part).rpartition(b"\n")
            for mount in mountinfo.parse(lines + b"\n") if lines else ():
                if mount.target == "/":
                    return mount
    return None


def changing(upper: str) -> Process | None:
    """Return the process with the lowest PID in a container with the upper directory ``upper``, or None."""
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
        except OSError:  # the process has ended, or belongs to another user
            continue
    return None


def _changes(pid: int, upper: str) -> bool:
    """Return whether the overlay of a process uses the directory ``upper``, not a removed directory of that name.

    Compares ctimes: the root of an overlay has the times of its upper directory, and nobody can set a ctime, inode(7).
    """
    try:
        for _ in range(_MAX_READS):
            before = os.stat(upper).st_ctime_ns
            if os.stat(f"/proc/{pid}/root").st_ctime_ns == before:
                return True
            if os.stat(upper).st_ctime_ns == before:
                return False
    except FileNotFoundError:
        return False
    except PermissionError:
        pass
    return True  # the check is not possible


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
            pass  # another user's process: the target may be a job with the same number
        else:
            if outside:
                hint = f"penroot list --fancy shows running containers; to join a step of a job: penroot exec {pid}.0"
                raise ContainerError(f"process {pid} is not in a container", hint=hint)
            return pid
    if member := _of_record(target, settings) or _named(target, settings):
        return member
    for process in running(settings):
        if process.name in (target, f"pyxis_{target}"):
            if process.name == target and not target.startswith("pyxis_"):  # no hint for steps: nothing would remove it
                named.write(target, rootfs.make_scratch(settings), process.pid)
            return process.pid
    if member := _of_job(target, settings):
        return member
    if pid:
        return pid  # joining.Joined reports the error
    raise ContainerError(
        f"no running container {target} on {os.uname().nodename}",
        hint="penroot list --fancy shows the running containers",
    )


def _of_record(name: str, settings: Settings) -> int:
    """Return a process of the detached container ``name``, or 0."""
    record = detached.find(name, settings)
    if record is None:
        return 0
    with record:
        return inside(record.program, settings)


def inside(pid: int, settings: Settings) -> int:
    """Return ``pid`` if it is in a container, else a child of ``pid`` that is in a container, else 0."""
    return next((each for each in (pid, *proc.children(pid)) if pid and is_inside(each, settings)), 0)


def is_inside(pid: int, settings: Settings) -> bool:
    """Return whether a process is in a container of the user, and this process is not in the same container."""
    return _other_container(pid, settings) is not None


def _other_container(pid: int, settings: Settings) -> str | None:
    """Return the name of the user's container in which ``pid`` runs, if it is not this process's container."""
    try:
        return container_of(pid, settings) if inode(pid, "mnt") != inode(os.getpid(), "mnt") else None
    except OSError:  # the process has ended, or belongs to another user
        return None


def _named(name: str, settings: Settings) -> int:
    """Return a process of the named container ``name`` without looking at all processes, or 0."""
    if not name or "/" in name or not os.path.isdir(f"{settings.data_path}/{name}"):
        return 0
    pids = named.candidates(name, rootfs.make_scratch(settings))
    return next((pid for pid in pids if _other_container(pid, settings) == name), 0)


def _of_job(target: str, settings: Settings) -> int:
    """Return a process in a container of a Slurm JOBID[.STEPID], or 0. squeue shows names for some steps: STEPS."""
    job, _, step = target.partition(".")
    if not job.isdecimal():
        return 0
    for pid in sorted(map(int, filter(str.isdecimal, os.listdir("/proc")))):
        try:
            environ = of_process(pid)
        except OSError:  # the process has ended, or belongs to another user
            continue
        own = environ.get("SLURM_STEP_ID", _BATCH)  # a batch script does not have the variable
        if environ.get("SLURM_JOB_ID") == job and step in ("", own, STEPS.get(own)) and is_inside(pid, settings):
            return pid
    return 0


def of_process(pid: int) -> dict[str, str]:
    """Return the environment with which ``pid`` was executed. Raises OSError."""
    with open(f"/proc/{pid}/environ", "rb") as f:
        pairs = (entry.partition(b"=") for entry in f.read().split(b"\0") if entry)
        return {os.fsdecode(key): os.fsdecode(value) for key, _, value in pairs}


def owner_of(space: int) -> int:
    """Return the UID of the user who created a user namespace (a descriptor)."""
    from fcntl import ioctl

    return int.from_bytes(ioctl(space, _NS_GET_OWNER_UID, bytes(4)), sys.byteorder)


def _is_own(pid: int) -> bool:
    """Return whether the user created the container of a process: anybody can choose a mount's name. Raises OSError."""
    with Fd(os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)) as space:
        return os.path.samestat(os.fstat(space), os.stat("/proc/self/ns/user")) or owner_of(space) == os.geteuid()


def namespaces(pid: int, mnt: int = 0) -> dict[str, int]:
    """Open the namespaces of ``pid`` in which this process is not, in the order in which they can be joined.

    ``mnt`` is the required inode number of the mount namespace, or 0 for any. Raises OSError.
    """
    if mnt and inode(pid, "mnt") != mnt:
        raise ProcessLookupError(pid)
    names = [name for name in _NAMESPACES if inode(pid, name) != inode(os.getpid(), name)]
    spaces = {name: os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC) for name in names}
    if "pid" in spaces and "user" in spaces:
        # If the program is root, the PID namespace, and perhaps the network namespace, belong to the outer user
        # namespace (see isolated.enter()).
        from fcntl import ioctl

        owner = ioctl(spaces["pid"], _NS_GET_USERNS)
        if not os.path.samestat(os.fstat(owner), os.fstat(spaces["user"])):
            outer = [name for name in ("pid", "net") if name in spaces]
            return {"outer": owner, **{name: spaces.pop(name) for name in outer}, **spaces}
        os.close(owner)
    return spaces


def enter(spaces: dict[str, int], pid: int, *, new_keyring: bool) -> None:
    """Enter the namespaces of ``pid`` and close their descriptors. Raises ContainerError."""
    hide()  # from the programs in the container
    execute.withhold(new_keyring=new_keyring)
    rootfs.import_no_files()
    try:
        for namespace in spaces.values():
            with Fd(namespace):
                linux.setns(namespace, 0)
    except OSError as e:
        raise ContainerError(f"cannot join process {pid}: {e.strerror}", hint="check that it is your container") from e
