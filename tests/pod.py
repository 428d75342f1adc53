"""A pod on this machine: the environment that a Kubernetes runtime gives a container, made of namespaces.

``python -m tests.pod [OPTION]... -- COMMAND`` runs a command in a pod, as root. Without options, the pod is as
containerd makes it for a manifest without a securityContext. Each option stands for a field of the manifest. One
difference remains: there is no AppArmor, so --apparmor imitates its refusals by a seccomp filter. Sources: the OCI
runtime specification, "Masked Paths" and "Readonly Paths"; Docker's "Seccomp security profiles".
"""

from __future__ import annotations

import argparse
import ctypes
import os
import pathlib
import platform
import struct
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from enroot_py.base import linux

_MASKED = (
    *("/proc/acpi", "/proc/asound", "/proc/interrupts", "/proc/kcore", "/proc/keys", "/proc/latency_stats"),
    *("/proc/timer_list", "/proc/timer_stats", "/proc/sched_debug", "/proc/scsi"),
    *("/sys/firmware", "/sys/devices/virtual/powercap"),
)
_READ_ONLY = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
# CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID, SETPCAP, NET_BIND_SERVICE, NET_RAW, SYS_CHROOT, MKNOD,
# AUDIT_WRITE, SETFCAP: capabilities(7)
_CAPABILITIES = frozenset((0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 27, 29, 31))
_SYS_ADMIN = 21
_PR_CAPBSET_DROP = 24  # prctl(2)

_NUMBERS = {  # numbers of system calls, on x86_64 and aarch64
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "mount_setattr": (442, 442),
    "clone": (56, 220),
    "clone3": (435, 435),
}
# Docker's profile allows these with CAP_SYS_ADMIN, and never allows pivot_root.
_ADMIN_CALLS = "unshare setns mount umount2 open_tree move_mount fsopen fsconfig fsmount mount_setattr clone".split()
_MOUNT_RULE_CALLS = "mount move_mount umount2 pivot_root".split()  # apparmor.d(5): "deny mount"
_EPERM, _EACCES, _ENOSYS = 1, 13, 38

_NEW_NAMESPACES = linux.CLONE_NEWNS | linux.CLONE_NEWPID | linux.CLONE_NEWNET | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS
_MOUNT_FLAGS = linux.MS_NOSUID | linux.MS_NODEV | 0x8  # MS_NOEXEC


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.pod")
    for name, field in (
        ("privileged", "privileged: true"),
        ("proc-unmasked", "procMount: Unmasked"),
        ("own-users", "hostUsers: false"),
        ("no-users", "user.max_user_namespaces=0 on the machine"),
        ("seccomp", "seccompProfile: {type: RuntimeDefault}"),
        ("apparmor", "the AppArmor profile of a runtime"),
        ("sys-admin", "capabilities: {add: [SYS_ADMIN]}"),
        ("no-new-privileges", "allowPrivilegeEscalation: false"),
        ("host-network", "hostNetwork: true"),
        ("read-only-root", "readOnlyRootFilesystem: true"),
    ):
        parser.add_argument(f"--{name}", action="store_true", help=field)
    parser.add_argument("--device", action="append", default=[], help="add a file of /dev, as a device plugin does")
    parser.add_argument("--host-path", action="append", default=[], help="add a file of /dev that the pod cannot open")
    parser.add_argument("--volume", action="append", default=[], help="add an emptyDir or hostPath, from this path")
    parser.add_argument("--read-only-volume", action="append", default=[], help="add a volume with readOnly: true")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="pod-", dir="/mnt") as base, _group(options.host_path) as group:
        status = _status(lambda: _make(options, base, group))
    return status if status >= 0 else 128 - status


@contextmanager
def _group(denied: Sequence[str]) -> Iterator[pathlib.Path | None]:
    """Yield a version 1 cgroup that denies the devices ``denied``, or None if there are none."""
    if not denied:
        yield None
        return
    group = pathlib.Path(f"/sys/fs/cgroup/devices/pod-{os.getpid()}")
    group.mkdir()
    try:
        for name in denied:
            number = os.stat(f"/dev/{name}").st_rdev
            (group / "devices.deny").write_text(f"c {os.major(number)}:{os.minor(number)} rwm")
        yield group
    finally:
        group.rmdir()


def _status(function: Callable[[], int]) -> int:
    """Call a function in a child, and return the child's exit status."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    linux.prctl(linux.PR_SET_PDEATHSIG, 9)
    status = 125
    try:
        status = function()
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(status)


def _make(options: argparse.Namespace, base: str, group: pathlib.Path | None) -> int:
    """Act as a runtime on the machine: create the root file system and the volumes, then the namespaces."""
    if group:
        (group / "cgroup.procs").write_text(str(os.getpid()))
    linux.unshare(linux.CLONE_NEWNS)
    linux.mount(None, "/", None, linux.MS_REC | linux.MS_PRIVATE)
    linux.mount("tmpfs", base, "tmpfs", 0)
    upper, work, root = (f"{base}/{name}" for name in ("upper", "work", "root"))
    for directory in (upper, work, root):
        os.mkdir(directory, 0o755)
    linux.mount("overlay", root, "overlay", 0, f"lowerdir=/,upperdir={upper},workdir={work}")
    for name in ("subuid", "subgid"):  # absent from images
        pathlib.Path(f"{root}/etc/{name}").unlink(missing_ok=True)
    for volume in (*options.volume, *options.read_only_volume):
        _bind(volume, root + volume, read_only=volume in options.read_only_volume)
    if options.read_only_root:
        linux.mount_setattr(linux.AT_FDCWD, root, 0, linux.MOUNT_ATTR_RDONLY, 0, 0)
    if options.own_users or options.no_users:  # each user namespace has its own limit of user namespaces
        _enter_users()
    linux.unshare(_NEW_NAMESPACES & ~linux.CLONE_NEWNET if options.host_network else _NEW_NAMESPACES)
    return _status(lambda: _run(options, root))


def _enter_users() -> None:
    """Enter a user namespace that maps every user to itself."""
    parent, (entered, enters) = os.getpid(), os.pipe()
    mapper = os.fork()
    if mapper == 0:
        os.read(entered, 1)
        for name in ("uid_map", "gid_map"):
            pathlib.Path(f"/proc/{parent}/{name}").write_text("0 0 4294967295")
        os._exit(0)
    linux.unshare(linux.CLONE_NEWUSER)
    os.write(enters, b"x")
    assert os.waitpid(mapper, 0)[1] == 0


def _run(options: argparse.Namespace, root: str) -> int:
    """Act as a runtime in process 1 of the pod, and execute the command."""
    whole = options.privileged or options.proc_unmasked
    read_only = 0 if options.privileged else linux.MS_RDONLY
    _bind(root, root)  # lock mounts that come from the parent user namespace
    linux.mount("proc", f"{root}/proc", "proc", _MOUNT_FLAGS)
    if options.no_users:
        pathlib.Path(f"{root}/proc/sys/user/max_user_namespaces").write_text("0")
    linux.mount("sysfs", f"{root}/sys", "sysfs", _MOUNT_FLAGS | read_only)
    _bind("/sys/fs/cgroup", f"{root}/sys/fs/cgroup", read_only=not options.privileged)
    _make_dev(f"{root}/dev", [*options.device, *options.host_path])
    for path in () if whole else _MASKED:
        if os.path.isdir(root + path):
            linux.mount("tmpfs", root + path, "tmpfs", linux.MS_RDONLY)
        elif os.path.exists(root + path):
            linux.mount("/dev/null", root + path, None, linux.MS_BIND)
    for path in () if whole else _READ_ONLY:
        if os.path.exists(root + path):
            _bind(root + path, root + path, read_only=True)
    os.chdir(root)
    linux.pivot_root(".", ".")
    linux.umount2(".", linux.MNT_DETACH)
    os.chdir("/")
    if options.no_new_privileges:
        linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    if not options.privileged:
        _restrict(options)
    os.execvp(options.command[0], options.command)


def _make_dev(dev: str, devices: Sequence[str]) -> None:
    linux.mount("tmpfs", dev, "tmpfs", linux.MS_NOSUID, "mode=755")
    for name in (*_DEVICES, *devices):
        _bind(f"/dev/{name}", f"{dev}/{name}")
    for name, kind, data in (
        ("pts", "devpts", "newinstance,ptmxmode=0666,mode=0620"),
        ("shm", "tmpfs", "mode=1777"),
        ("mqueue", "mqueue", ""),
    ):
        os.mkdir(f"{dev}/{name}")
        linux.mount(kind, f"{dev}/{name}", kind, _MOUNT_FLAGS & ~linux.MS_NODEV, data)
    for name, target in (("ptmx", "pts/ptmx"), ("fd", "/proc/self/fd")):
        os.symlink(target, f"{dev}/{name}")


def _bind(source: str, target: str, *, read_only: bool = False) -> None:
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    elif not os.path.exists(target):
        pathlib.Path(target).touch()
    linux.mount(source, target, None, linux.MS_BIND | linux.MS_REC)
    if read_only:
        linux.mount_setattr(linux.AT_FDCWD, target, linux.AT_RECURSIVE, linux.MOUNT_ATTR_RDONLY, 0, 0)


def _restrict(options: argparse.Namespace) -> None:
    """Install the seccomp(2) filters, then drop capabilities: without no_new_privs, a filter needs CAP_SYS_ADMIN."""
    if options.seccomp:
        admins = {} if options.sys_admin else {**dict.fromkeys(_ADMIN_CALLS, _EPERM), "clone3": _ENOSYS}
        _install({"pivot_root": _EPERM, **admins})
    if options.apparmor:
        _install(dict.fromkeys(_MOUNT_RULE_CALLS, _EACCES))
    kept = _CAPABILITIES | ({_SYS_ADMIN} if options.sys_admin else set())
    for capability in range(int(pathlib.Path("/proc/sys/kernel/cap_last_cap").read_text()) + 1):
        if capability not in kept:
            linux.prctl(_PR_CAPBSET_DROP, capability)
    mask = sum(1 << capability for capability in kept)
    linux.capset(mask, mask, 0)


def _install(errors: Mapping[str, int]) -> None:
    """Install a seccomp(2) filter: system calls fail with these errors, but clone(2) only with namespace flags."""
    load, equal, has, end = 0x20, 0x15, 0x45, 0x06  # BPF_LD | BPF_W | BPF_ABS, BPF_JMP | BPF_JEQ, … | BPF_JSET, BPF_RET
    allow, fail = (end, 0, 0, 0x7FFF0000), 0x00050000  # SECCOMP_RET_ALLOW, SECCOMP_RET_ERRNO
    program = [(load, 0, 0, 0)]  # offset of the call's number
    for name, error in errors.items():
        number = _NUMBERS[name][platform.machine() == "aarch64"]
        if name == "clone":  # the first argument, at offset 16: all of CLONE_NEW*
            program += [
                (equal, 0, 4, number),
                (load, 0, 0, 16),
                (has, 0, 1, 0x7E020000),
                (end, 0, 0, fail | error),
                allow,
            ]
        else:
            program += [(equal, 0, 1, number), (end, 0, 0, fail | error)]
    program += [allow]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    head = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(program), ctypes.addressof(code)))
    linux.prctl(22, 2, ctypes.addressof(head))  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
