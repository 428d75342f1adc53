"""``penroot doctor``: check whether containers can run on this machine, and suggest fixes.

The checks change nothing: a test container runs in a child process. ``pyxis-py check`` does the same for Slurm steps.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import glob
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from enroot_py.base import filesystems, linux, log, mountinfo, trees, trusted, workers
from enroot_py.base.errors import ImageError, PenrootError
from enroot_py.base.fds import Fd
from enroot_py.base.features import plugged
from enroot_py.config.settings import Settings
from enroot_py.runtime import isolated, mounting, mounts, pods, rootfs, squashfuse
from enroot_py.store import format


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check: ``ok``, ``warn`` if some containers will fail, or ``bad``, with a ``fix``."""

    verdict: str
    what: str
    fix: str = ""


def findings(settings: Settings) -> Iterator[Finding]:
    """Run all checks, in the order in which a start depends on them."""
    yield from machine()
    yield from programs()
    yield data_path(settings.data_path)
    yield from cache_path(settings)
    yield from acls(settings)
    yield from inodes(dict.fromkeys((settings.data_path, settings.cache_path)))
    yield from of_features(settings)


def machine() -> Iterator[Finding]:
    """Check the kernel and /dev/fuse, on which containers depend with and without Slurm."""
    yield kernel()
    yield from namespace_limits()
    yield from container()
    yield from selinux()
    yield hidepid()
    yield from fuse()


def of_features(settings: Settings) -> Iterator[Finding]:
    """Run the checks of features."""
    for feature in plugged("doctor"):
        yield from feature.findings(settings)


def report(results: Iterable[Finding]) -> bool:
    """Print findings, and return False if any is bad."""
    good = True
    for finding in results:
        good = good and finding.verdict != "bad"
        fix = f"\n     fix: {finding.fix}" if finding.fix else ""
        print(f"{finding.verdict:<5}{finding.what}{fix}", flush=True)
    return good


def _sysctl(name: str) -> int | None:
    try:
        with open("/proc/sys/" + name.replace(".", "/")) as file:
            return int(file.read())
    except (OSError, ValueError):
        return None  # unknown to this kernel


def kernel() -> Finding:
    """Check for the newest system call that penroot needs: distributions backport calls to older versions."""
    release = os.uname().release
    try:
        linux.mount_setattr(-1, "", 0, 0, 0, 0)
    except OSError as e:
        if e.errno == errno.ENOSYS:
            return Finding("bad", f"the kernel is Linux {release}, and containers need {linux.FLOOR}", "upgrade it")
    return Finding("ok", f"the kernel is Linux {release}")


def namespace_limits() -> Iterator[Finding]:
    limits: tuple[tuple[str, Callable[[int], bool], int, str], ...] = (
        ("user.max_user_namespaces", lambda value: value < 100, 15000, "bad"),
        ("user.max_mnt_namespaces", lambda value: value < 100, 15000, "bad"),
        ("kernel.unprivileged_userns_clone", lambda value: value == 0, 1, "bad"),
        # A warning: an AppArmor profile may exempt the interpreter. container() below finds out.
        ("kernel.apparmor_restrict_unprivileged_userns", lambda value: value == 1, 0, "warn"),
    )
    where = f"{pods.MACHINE}: " if pods.is_read_only("/proc/sys") else ""
    for name, wrong, right, verdict in limits:
        value = _sysctl(name)
        if value is None:
            continue
        if wrong(value):
            fix = f"{where}echo {name}={right} > /etc/sysctl.d/80-penroot.conf; sysctl --system"
            yield Finding(verdict, f"{name} is {value}: users cannot create container namespaces", fix)
        else:
            yield Finding("ok", f"{name} is {value}")


def container() -> Iterator[Finding]:
    """Start a container as an ordinary user, up to its root file system. No version or setting predicts the result."""
    if error := _failure(_mount_root):
        advice = (
            "modprobe overlay; fix the kernel and user namespaces above; "
            "if AppArmor restricts user namespaces, add a profile for " + os.path.realpath(sys.executable)
        )
        fix = getattr(error, "hint", "") or advice
        yield Finding("bad", f"an ordinary user cannot start a container: {error}", fix)
        return
    yield Finding("ok", "an ordinary user can mount an overlay in a user namespace, and switch the root to it")
    if error := _failure(_mount_proc):
        fix = getattr(error, "hint", "")
        yield Finding("warn", f"containers with a private PID namespace cannot start: {error}", fix)


def _failure(task: Callable[[], None]) -> OSError | PenrootError | None:
    """Run a task in a child process, and return its error. The task's mounts end with the child."""
    try:
        workers.run([task], 1)
    except (OSError, PenrootError) as e:
        return e
    return None


_NOBODY = 65534


def _enter(private: int) -> None:
    """Enter container namespaces as an ordinary user, and these ``private`` ones too. Raises PenrootError."""
    # Root of a user namespace that maps no other user cannot become nobody, and need not.
    with contextlib.suppress(OSError):
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    isolated.enter(os.geteuid(), os.getegid(), private, superuser=False)


def _mount_root(scratch: str = "/tmp") -> None:
    """Mount an overlay as a start does, on a tmpfs over ``scratch``. Raises OSError, PenrootError."""
    _enter(0)
    rootfs.mount_scratch(scratch)
    lowerdirs = (f"{scratch}/upper", f"{scratch}/work")
    mounting.attach_at(rootfs.overlay(lowerdirs, "", "", ["userxattr"]), f"{scratch}/root")
    rootfs.switch(f"{scratch}/root")


def _mount_proc() -> None:
    """Mount /proc as ``start --pid`` does. Raises PenrootError."""
    _enter(linux.CLONE_NEWPID)
    with Fd(os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as root:
        for mount in isolated.mounts_of(linux.CLONE_NEWPID, []):
            mounts.execute(mount, root)


def selinux(root: str = "/sys/fs/selinux") -> Iterator[Finding]:
    """Check whether SELinux may deny steps of slurmd what container() above could do: selinux(8)."""
    try:
        with open(f"{root}/enforce") as file:
            enforcing = file.read().strip() == "1"
    except OSError:
        return  # not built in, or disabled
    if enforcing:
        yield Finding(
            "warn",
            "SELinux enforces its policy: in the domain of slurmd it may deny namespaces, mounts and /dev/fuse",
            "after a failed step: ausearch -m avc -ts recent | audit2allow -M penroot; semodule -i penroot.pp",
        )
    else:
        yield Finding("ok", "SELinux denies nothing (permissive)")


def hidepid(path: str = "/proc/self/mountinfo") -> Finding:
    """Check whether /proc hides processes of other users: proc(5)."""
    on_proc = [mount for mount in mountinfo.read(path) if mount.target == "/proc"]
    hidden = dict(on_proc[-1].settings()).get("hidepid", "0") if on_proc else "0"
    if hidden in ("0", "off"):
        return Finding("ok", "/proc shows all processes")
    return Finding(
        "warn",
        f"/proc is mounted with hidepid={hidden}: steps run, but users of a shared store cannot see who else uses it",
        "mount -o remount,hidepid=0 /proc, or give each user a store: ENROOT_CACHE_PATH in enroot.conf",
    )


def fuse() -> Iterator[Finding]:
    # In a pod, a device plugin may withhold the device from containers that need no FUSE.
    verdict = "warn" if pods.is_made() else "bad"
    try:
        info = os.stat("/dev/fuse")
    except FileNotFoundError:
        what = "there is no /dev/fuse: squashfs images cannot be mounted, layers in the store can"
        yield Finding(verdict, what, pods.without_fuse(squashfuse.INSTEAD))
        return
    mode = stat.S_IMODE(info.st_mode)
    if not stat.S_ISCHR(info.st_mode) or mode & 0o006 != 0o006:
        fix = """echo 'KERNEL=="fuse", MODE="0666"' > /etc/udev/rules.d/80-fuse.rules; chmod 666 /dev/fuse"""
        yield Finding("bad", f"/dev/fuse has mode {mode:04o}: users cannot mount squashfs images", fix)
    else:
        yield Finding("ok", f"/dev/fuse has mode {mode:04o}")
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC))
    except PermissionError as e:
        if e.errno == errno.EPERM:  # the mode gives EACCES
            slurm_fix = "/dev/fuse in cgroup_allowed_devices_file.conf if this Slurm reads it, else ConstrainDevices=no"
            yield Finding(
                verdict,
                "the device cgroup of this process denies /dev/fuse: squashfs images cannot be mounted",
                pods.without_fuse(squashfuse.INSTEAD) if pods.is_made() else slurm_fix,
            )
    server = squashfuse.installed("squashfuse_ll", "squashfuse")
    if server:
        yield Finding("ok", f"{server} mounts squashfs images")
    else:
        yield Finding("bad", "squashfuse is not installed: squashfs images cannot be mounted", "install squashfuse")


def programs() -> Iterator[Finding]:
    """Check for programs of other packages that some verbs run. Starting a stored image needs none."""
    for program, purpose in (("mksquashfs", "import and export cannot write"), ("unsquashfs", "create cannot unpack")):
        if path := shutil.which(program):
            yield Finding("ok", f"{program} is {path}")
        else:
            what = f"{program} is not installed: {purpose} squashfs images"
            yield Finding("warn", what, "install squashfs-tools")


_STICKY = "chmod 1777 DIRECTORY (for an emptyDir: by an initContainer), or set a private directory in enroot.conf"


def _distrust(path: str) -> str:
    """Return why other users could replace ``path``, or "" if none can."""
    try:
        trusted.place(f"{path}/any")
    except OSError as e:
        return e.strerror if e.errno == errno.EPERM and e.strerror else ""
    return ""


def data_path(path: str) -> Finding:
    """Check the caller's directory of containers, as an example of all users'."""
    fix = "use a local disk: ENROOT_DATA_PATH /var/tmp/penroot-$(id -u) in enroot.conf"
    kind = filesystems.kind(path)
    if kind in filesystems.NETWORK:
        return Finding("warn", f"containers are in {path}, a network file system ({kind}): no overlay, slow", fix)
    if why := _distrust(path):
        return Finding("bad", f"containers are in {path}, which {why}", _STICKY)
    if kind == "overlay":
        what = f"containers are in {path}, which {pods.ON_OVERLAY}: they cannot keep changes"
        return Finding("bad", what, pods.volume("ENROOT_DATA_PATH"))
    there = filesystems.existing(path)
    if os.statvfs(there).f_flag & os.ST_NOEXEC:
        return Finding("bad", f"containers are in {path}, mounted noexec: their programs cannot be executed", fix)
    nosuid = ", nosuid" if os.statvfs(there).f_flag & os.ST_NOSUID else ""
    return Finding("ok", f"containers are in {path} ({kind}{nosuid})")


def cache_path(settings: Settings) -> Iterator[Finding]:
    """Check the directory and the format of the store."""
    path = settings.cache_path
    kind = filesystems.kind(path)
    if why := _distrust(path):
        yield Finding("bad", f"images are stored in {path}, which {why}", _STICKY)
        return
    try:
        format.check(path, mark=False)
    except ImageError as e:
        yield Finding("bad", str(e), e.hint)
        return
    if kind == "overlay":
        what = f"images are stored in {path}, which {pods.ON_OVERLAY}: layers that delete files cannot be stored"
        yield Finding("bad", what, pods.volume("ENROOT_CACHE_PATH"))
        return
    if kind not in filesystems.NETWORK:
        yield Finding("ok", f"images are stored in {path} ({kind})")
        return
    what = f"images are stored in {path}, a network file system ({kind}): each as one squashfs file, mounted with FUSE"
    yield Finding("warn", what, "use a local disk: ENROOT_CACHE_PATH /var/tmp/penroot-$(id -u) in enroot.conf")


def acls(settings: Settings) -> Iterator[Finding]:
    """Check for ACLs on trees of images and containers, which an overlay cannot copy: acl(5).

    penroot creates its trees without ACLs. With enroot and older versions they inherited a default ACL.
    """
    beneath = {settings.cache_path: ("layers/*/fs", "images/*/head/fs"), settings.data_path: ("*", "*/upper")}
    for place, patterns in beneath.items():
        paths = (path for pattern in patterns for path in glob.iglob(f"{glob.escape(place)}/{pattern}"))
        inherited = [path for path in paths if _has_acl(path)]
        if inherited:
            number = log.many(len(inherited), "tree")
            what = f"{number} in {place} inherited a default ACL; their containers fail to start: {inherited[0]}"
            yield Finding("bad", what, f"setfacl -R -b {place} (package acl), or remove and import them again")
        elif _has_acl(filesystems.existing(place)):
            yield Finding("ok", f"{place} has a default ACL; images and containers do not inherit it")


def _has_acl(directory: str) -> bool:
    try:
        return not {*trees.ACLS}.isdisjoint(os.listxattr(directory))
    except OSError:
        return False


_SMALL_IMAGE_FILES, _LARGE_IMAGE_FILES = 10_000, 100_000


def inodes(paths: Iterable[str]) -> Iterator[Finding]:
    """Check that the file system and the caller's quota have room for the files of images."""
    for path in paths:
        directory = filesystems.existing(path)
        info = os.statvfs(directory)
        free = [info.f_favail] if info.f_files else []  # 0: the file system creates inodes on demand
        left = inode_quota(directory)
        free += [] if left is None else [left]
        if not free:
            continue
        why = "your quota" if left is not None and left == min(free) else "the file system"
        if min(free) >= _LARGE_IMAGE_FILES:
            yield Finding("ok", f"{path} has room for {min(free)} files")
            continue
        fix = "setquota -u USER 0 0 0 0 " + directory if why == "your quota" else "penroot cache prune"
        what = f"{path} has room for {min(free)} files ({why}): large images have {_LARGE_IMAGE_FILES} and more"
        verdict = "bad" if min(free) < _SMALL_IMAGE_FILES else "warn"
        yield Finding(verdict, what, f"{fix}; or set ENROOT_STORE_FORM=squashfs")


class _Quota(ctypes.Structure):
    """struct if_dqblk of quotactl(2)."""

    _fields_ = (
        *(
            (name, ctypes.c_uint64)
            for name in ("bhard", "bsoft", "space", "ihard", "isoft", "inodes", "btime", "itime")
        ),
        ("valid", ctypes.c_uint32),
    )


_QUOTACTL_FD = 443  # the same on all architectures since Linux 5.14
_GET_USER_QUOTA = 0x800007 << 8


def inode_quota(path: str) -> int | None:
    """Return how many more files the caller's quota allows on the file system of ``path``, None for no limit."""
    libc = ctypes.CDLL(None, use_errno=True)
    quota = _Quota()
    with Fd(os.open(path, os.O_RDONLY | os.O_CLOEXEC)) as fd:
        failed = libc.syscall(_QUOTACTL_FD, fd, _GET_USER_QUOTA, os.getuid(), ctypes.byref(quota))
    limits = [limit for limit in (quota.ihard, quota.isoft) if limit]
    return max(0, min(limits) - quota.inodes) if not failed and limits else None
