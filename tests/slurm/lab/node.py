"""Process 1 of the lab, and process 1 of each of its nodes.

``python3 -I node.py SPEC`` makes the lab's namespaces (a PID namespace and the network that holds the switch), forks
one child per node, and prints one line per node: its name and its process id, or its name and the error. A node has its
own PID, network, mount, UTS, IPC and cgroup namespaces. All of them end with the lab's first process: the kernel kills
every process of a PID namespace with its process 1 (pid_namespaces(7)), nested ones included, and drops namespaces,
mounts and network devices with their last process.

Nothing here changes the machine: a node's /etc is an overlay in its own mount namespace, and its other directories are
bind mounts there.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import signal
import socket
import stat
import sys
from typing import Any, NoReturn

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import cgroups  # type: ignore[import-not-found]  # noqa: E402 run as a script, not as part of the package

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWPID, CLONE_NEWNET, CLONE_NEWCGROUP = 0x20000000, 0x40000000, 0x2000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
NS_GET_MNTNS_ID = 0x8008B705  # <linux/nsfs.h>
MS_BIND, MS_REC, MS_PRIVATE, MS_SHARED = 0x1000, 0x4000, 1 << 18, 1 << 20

# Directories besides /etc into which packages install files; with `apart`, each node has its own.
APART = ("/usr", "/opt", "/var/lib/apt", "/var/lib/dpkg", "/var/cache")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p)


def unshare(flags: int) -> None:
    """unshare(2)."""
    if _libc.unshare(flags) != 0:
        raise OSError(ctypes.get_errno(), f"unshare({flags:#x}): {os.strerror(ctypes.get_errno())}")


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """mount(2)."""
    if _libc.mount(source.encode(), target.encode(), kind.encode(), flags, options.encode()) != 0:
        raise OSError(ctypes.get_errno(), f"mount {source} on {target}: {os.strerror(ctypes.get_errno())}")


def bind(source: str, target: str) -> None:
    mount(source, target, flags=MS_BIND)


def main(spec: dict[str, Any]) -> None:
    cgroups.create(f"{spec['branch']}/lab")
    cgroups.join(f"{spec['branch']}/lab")
    unshare(CLONE_NEWPID)
    if os.fork() == 0:
        become_lab(spec)


def become_lab(spec: dict[str, Any]) -> NoReturn:
    os.setsid()
    unshare(CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWUTS | CLONE_NEWIPC)
    mount("none", "/", flags=MS_REC | MS_PRIVATE)
    cpus = os.sched_getaffinity(0)
    first = min(cpus, key=next_namespace)
    for node in spec["nodes"]:
        if os.fork() == 0:
            os.sched_setaffinity(0, {first})
            spec["cpus"] = cpus
            become_node(spec, node)
    # /proc still belongs to the machine's PID namespace, and shows this process's id there.
    report(f". {os.readlink('/proc/self')}")
    close_stdout()
    reap()


def next_namespace(cpu: int) -> int:
    """Return the approximate number of a mount namespace made on ``cpu``; 0 before Linux 6.11.

    job_container/tmpfs keeps the mount namespace of a job by a bind mount. The kernel refuses the mount (EINVAL) if the
    number of the job's namespace is lower than the number of slurmd's namespace. Since Linux 6.18, each processor has
    its own supply of numbers. So the lab makes a node on the processor with the lowest numbers, like a machine's first
    process.
    """
    receive, send = os.pipe()
    if os.fork() == 0:
        number = bytearray(8)
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, {cpu})
            unshare(CLONE_NEWNS)
            with open("/proc/self/ns/mnt") as namespace:
                fcntl.ioctl(namespace, NS_GET_MNTNS_ID, number)
        os.write(send, number)
        os._exit(0)
    number = os.read(receive, 8)
    os.close(receive)
    os.close(send)
    os.wait()
    return int.from_bytes(number, sys.byteorder)


def become_node(spec: dict[str, Any], name: str) -> NoReturn:
    """Create the namespaces of a node and fork its process 1, which stays. The caller's process ends."""
    with reporting_failures(name):
        branch = f"{spec['branch']}/{name}"
        cgroups.create(branch)
        cgroups.join(branch)
        unshare(CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWCGROUP)
        os.sched_setaffinity(0, spec["cpus"])
        if os.fork() > 0:
            os._exit(0)
        os.setsid()
        pid = os.readlink("/proc/self")
        socket.sethostname(name)
        os.umask(0o022)
        mount_tree(spec["root"], name, spec["apart"], spec["prefix"])
        # The nodes' cables share processors. BBR would underestimate the capacity of a cable, and use half of it.
        write("/proc/sys/net/ipv4/tcp_congestion_control", "reno\n")
        if spec["configless"] and name != "ctl":
            mount("tmpfs", "/etc/slurm", "tmpfs", options="mode=755")  # slurmd asks slurmctld for its configuration
        report(f"{name} {pid}")
    close_stdout()
    reap()


def mount_tree(root: str, name: str, apart: bool, prefix: str | None) -> None:
    """Give this mount namespace its own /etc, /home, /run, /tmp, /var/{tmp,spool,log}, /dev/shm, /proc, /sys."""
    hierarchies = cgroups.hierarchies()  # read before /proc and /sys change
    tree = os.open(prefix, os.O_PATH) if prefix else -1
    own = f"{root}/nodes/{name}"
    memory = f"{own}/memory"
    mount("none", "/", flags=MS_REC | MS_PRIVATE)
    mount("tmpfs", memory, "tmpfs", options="mode=755")

    # Bind mounts would need mount points for files that the machine lacks, so /etc is an overlay. Its upper directory
    # is on tmpfs, so it works even if the machine's / is an overlay.
    own_layer(memory, "/etc", f"{root}/etc:/etc")
    write("/etc/hostname", name + "\n")
    for shared in () if apart else ("slurm", "enroot"):  # one directory for all nodes, editable while the lab is up
        bind(f"{root}/etc/{shared}", f"/etc/{shared}")
    for directory in APART if apart else ():
        own_layer(memory, directory, directory)

    bind(f"{root}/home", "/home")
    for directory in ("tmp", "var/tmp", "var/spool", "var/log"):
        bind(f"{own}/{directory}", f"/{directory}")
    mount("tmpfs", "/run", "tmpfs", MS_NOSUID, "mode=755")
    for directory, mode in {"lock": 0o1777, "mount": 0o755, "munge": 0o755, "user": 0o755}.items():
        os.mkdir(f"/run/{directory}")
        os.chmod(f"/run/{directory}", mode)
    if prefix and not os.path.exists(prefix):  # PREFIX is a source tree that these mounts hide
        os.makedirs(prefix)
        bind(f"/proc/self/fd/{tree}", prefix)
    munge = os.stat(f"{root}/etc/munge/munge.key")
    os.chown("/run/munge", munge.st_uid, munge.st_gid)

    mount("tmpfs", "/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777")
    fuse = os.stat("/dev/fuse")
    # Ordinary users need the device. The machine's own device node keeps its mode.
    os.mknod(f"{memory}/fuse", 0o600 | stat.S_IFCHR, fuse.st_rdev)
    os.chmod(f"{memory}/fuse", 0o666)
    bind(f"{memory}/fuse", "/dev/fuse")

    mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    mount("sysfs", "/sys", "sysfs", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    mount_cgroups(hierarchies)

    mount("tmpfs", root, "tmpfs", MS_RDONLY, "mode=755")  # nodes do not see each other's files
    mount("none", "/", flags=MS_REC | MS_SHARED)  # as systemd does: tests must notice mounts that propagate


def own_layer(memory: str, directory: str, lower: str) -> None:
    """Mount an overlay that keeps this node's writes in a directory private."""
    upper, work = (f"{memory}/{kind}{directory.replace('/', '.')}" for kind in ("upper", "work"))
    os.mkdir(upper)
    os.mkdir(work)
    mount("overlay", directory, "overlay", options=f"lowerdir={lower},upperdir={upper},workdir={work}")


def mount_cgroups(hierarchies: list[cgroups.Hierarchy]) -> None:
    """Mount each hierarchy at its usual place. In this cgroup namespace, the root of each is the node's cgroup."""
    flags = MS_NOSUID | MS_NODEV | MS_NOEXEC
    if all(h.mountpoint != "/sys/fs/cgroup" for h in hierarchies):
        mount("tmpfs", "/sys/fs/cgroup", "tmpfs", flags, "mode=755")
    for h in sorted(hierarchies, key=lambda h: h.mountpoint):
        os.makedirs(h.mountpoint, exist_ok=True)
        mount("cgroup", h.mountpoint, "cgroup2" if h.is_v2 else "cgroup", flags, h.options)
        names = h.options.split(",")
        if len(names) > 1:
            for controller in names:
                with contextlib.suppress(FileExistsError):
                    os.symlink(os.path.basename(h.mountpoint), f"/sys/fs/cgroup/{controller}")
        if h.is_v2 and h.mountpoint == "/sys/fs/cgroup":
            cgroups.enter_leaf(h.mountpoint)
            # slurmstepd moves from a job's cgroup to the root, but only the root of a real machine accepts processes.
            bind(f"{h.mountpoint}/init/cgroup.procs", f"{h.mountpoint}/cgroup.procs")


def reap() -> NoReturn:
    """Be process 1: reap orphans until the kernel ends this process."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    while True:
        try:
            os.wait()
        except ChildProcessError:
            signal.sigwait({signal.SIGCHLD})


def report(line: str) -> None:
    os.write(1, f"{line}\n".encode())  # one write: lines of several nodes do not mix


def close_stdout() -> None:
    """Close stdout, which tells the lab's starter that the output is complete."""
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)


@contextlib.contextmanager
def reporting_failures(name: str) -> Any:
    try:
        yield
    except OSError as e:
        report(f"{name} ! {e}")
        os._exit(1)


def write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
