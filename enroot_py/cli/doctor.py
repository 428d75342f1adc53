"""``penroot doctor``: whether containers can run on this machine, and for what is wrong the way to mend it.

Looks, and tries what only a try can tell; changes nothing. ``pyxis-py check`` does the same for steps of Slurm.
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
    """One thing that was looked at: ``ok``, ``warn`` where some steps will suffer, or ``bad``; ``fix`` says how."""

    verdict: str
    what: str
    fix: str = ""


def findings(settings: Settings) -> Iterator[Finding]:
    """Everything that is worth a look, in the order in which a start meets it."""
    yield from machine()
    yield from programs()
    yield data_path(settings.data_path)
    yield from cache_path(settings)
    yield from acls(settings)
    yield from inodes(dict.fromkeys((settings.data_path, settings.cache_path)))
    yield from of_features(settings)


def machine() -> Iterator[Finding]:
    """What containers need of the kernel and of /dev/fuse, with Slurm and without."""
    yield kernel()
    yield from namespace_limits()
    yield from container()
    yield from selinux()
    yield hidepid()
    yield from fuse()


def of_features(settings: Settings) -> Iterator[Finding]:
    """What features find."""
    for feature in plugged("doctor"):
        yield from feature.findings(settings)


def report(results: Iterable[Finding]) -> bool:
    """Print them; False where something is wrong."""
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
        return None  # this kernel does not have it


def kernel() -> Finding:
    """Whether it has the newest system call that we need; distributions add calls to older versions."""
    release = os.uname().release
    try:
        linux.mount_setattr(-1, "", 0, 0, 0, 0)
    except OSError as e:
        if e.errno == errno.ENOSYS:
            return Finding("bad", f"the kernel is Linux {release}, and containers need {linux.FLOOR}", "a newer kernel")
    return Finding("ok", f"the kernel is Linux {release}")


def namespace_limits() -> Iterator[Finding]:
    limits: tuple[tuple[str, Callable[[int], bool], int, str], ...] = (
        ("user.max_user_namespaces", lambda value: value < 100, 15000, "bad"),
        ("user.max_mnt_namespaces", lambda value: value < 100, 15000, "bad"),
        ("kernel.unprivileged_userns_clone", lambda value: value == 0, 1, "bad"),
        # A profile may allow it to the interpreter all the same: the try below decides.
        ("kernel.apparmor_restrict_unprivileged_userns", lambda value: value == 1, 0, "warn"),
    )
    where = f"{pods.MACHINE}: " if pods.is_read_only("/proc/sys") else ""
    for name, wrong, right, verdict in limits:
        value = _sysctl(name)
        if value is None:
            continue
        if wrong(value):
            fix = f"{where}echo {name}={right} > /etc/sysctl.d/80-penroot.conf; sysctl --system"
            yield Finding(verdict, f"{name} is {value}: users may not make the namespaces of a container", fix)
        else:
            yield Finding("ok", f"{name} is {value}")


def container() -> Iterator[Finding]:
    """Start one as an ordinary user, up to its root file system: no version and no setting tells what this does."""
    if error := _failure(_mount_root):
        advice = (
            "modprobe overlay, and see above for the kernel and user namespaces; "
            "with AppArmor's restriction a profile for " + os.path.realpath(sys.executable)
        )
        fix = getattr(error, "hint", "") or advice
        yield Finding("bad", f"an ordinary user cannot start a container: {error}", fix)
        return
    yield Finding("ok", "an ordinary user can mount an overlay in a user namespace, and make it the root directory")
    if error := _failure(_mount_proc):
        fix = getattr(error, "hint", "")
        yield Finding("warn", f"containers with processes of their own cannot start: {error}", fix)


def _failure(task: Callable[[], None]) -> OSError | PenrootError | None:
    """Why a task fails in a child of its own, whose mounts go with it."""
    try:
        workers.run([task], 1)
    except (OSError, PenrootError) as e:
        return e
    return None


_NOBODY = 65534


def _enter(own: int) -> None:
    """Enter the namespaces of a container as an ordinary user, with some of its ``own``. Raises PenrootError."""
    # Root of a user namespace that holds nobody else cannot become him, and need not.
    with contextlib.suppress(OSError):
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    isolated.enter(os.geteuid(), os.getegid(), own, superuser=False)


def _mount_root(scratch: str = "/tmp") -> None:
    """What a start does with any root file system; ``scratch`` is covered here alone. Raises OSError, PenrootError."""
    _enter(0)
    rootfs.mount_scratch(scratch)
    lowerdirs = (f"{scratch}/upper", f"{scratch}/work")
    mounting.attach_at(rootfs.overlay(lowerdirs, "", "", ["userxattr"]), f"{scratch}/root")
    rootfs.switch(f"{scratch}/root")


def _mount_proc() -> None:
    """What a start with --pid does. Raises PenrootError."""
    _enter(linux.CLONE_NEWPID)
    with Fd(os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as root:
        for mount in isolated.mounts_of(linux.CLONE_NEWPID, []):
            mounts.execute(mount, root)


def selinux(root: str = "/sys/fs/selinux") -> Iterator[Finding]:
    """Whether its policy may refuse what the try above did as root's service would not: selinux(8)."""
    try:
        with open(f"{root}/enforce") as file:
            enforcing = file.read().strip() == "1"
    except OSError:
        return  # this kernel does not have it, or it is switched off
    if enforcing:
        yield Finding(
            "warn",
            "SELinux enforces its policy: in the domain of slurmd it may refuse namespaces, mounts and /dev/fuse",
            "after a step that fails: ausearch -m avc -ts recent | audit2allow -M penroot; semodule -i penroot.pp",
        )
    else:
        yield Finding("ok", "SELinux refuses nothing (permissive)")


def hidepid(path: str = "/proc/self/mountinfo") -> Finding:
    """Whether users see only their own processes: proc(5)."""
    on_proc = [mount for mount in mountinfo.read(path) if mount.target == "/proc"]
    hidden = dict(on_proc[-1].settings()).get("hidepid", "0") if on_proc else "0"
    if hidden in ("0", "off"):
        return Finding("ok", "/proc shows all processes")
    return Finding(
        "warn",
        f"/proc is mounted with hidepid={hidden}: steps run, but who shares a store does not see who else uses it",
        "mount -o remount,hidepid=0 /proc, or a store for each user: ENROOT_CACHE_PATH in enroot.conf",
    )


def fuse() -> Iterator[Finding]:
    # Where a device plugin gives devices, those who need none go without.
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
        if e.errno == errno.EPERM:  # EACCES is the mode's
            slurms = "/dev/fuse in cgroup_allowed_devices_file.conf where Slurm has that, else ConstrainDevices=no"
            yield Finding(
                verdict,
                "the device cgroup of this process denies /dev/fuse: squashfs images cannot be mounted",
                pods.without_fuse(squashfuse.INSTEAD) if pods.is_made() else slurms,
            )
    server = squashfuse.installed("squashfuse_ll", "squashfuse")
    if server:
        yield Finding("ok", f"squashfs images are mounted by {server}")
    else:
        yield Finding("bad", "squashfuse is not installed: squashfs images cannot be mounted", "install squashfuse")


def programs() -> Iterator[Finding]:
    """Others' programs that some verbs need; a start of what is stored needs none."""
    for program, purpose in (("mksquashfs", "import and export cannot write"), ("unsquashfs", "create cannot unpack")):
        if path := shutil.which(program):
            yield Finding("ok", f"{program} is {path}")
        else:
            what = f"{program} is not installed: {purpose} squashfs images"
            yield Finding("warn", what, "install squashfs-tools")


_STICKY = "chmod 1777 DIRECTORY, of an emptyDir by an initContainer; or a directory of your own in enroot.conf"


def _doubt(path: str) -> str:
    """Why what others could have put there in place of ``path`` is not believed; "" where nobody could."""
    try:
        trusted.place(f"{path}/any")
    except OSError as e:
        return e.strerror if e.errno == errno.EPERM and e.strerror else ""
    return ""


def data_path(path: str) -> Finding:
    """Where containers are; that of the caller stands for all users'."""
    fix = "a local disk for ENROOT_DATA_PATH, in enroot.conf: /var/tmp/penroot-$(id -u)"
    kind = filesystems.kind(path)
    if kind in filesystems.NETWORK:
        return Finding("warn", f"containers are in {path}, a network file system ({kind}): no overlay, slow", fix)
    if why := _doubt(path):
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
    """Where images are stored, and in which form."""
    path = settings.cache_path
    kind = filesystems.kind(path)
    if why := _doubt(path):
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
    what = f"images are stored in {path}, a network file system ({kind}): as one squashfs file each, which FUSE serves"
    yield Finding("warn", what, "a local disk for ENROOT_CACHE_PATH, in enroot.conf: /var/tmp/penroot-$(id -u)")


def acls(settings: Settings) -> Iterator[Finding]:
    """Whether trees of images and containers have an ACL, which an overlay cannot copy: acl(5).

    penroot makes its trees without one, but enroot and older versions let them inherit a default ACL.
    """
    beneath = {settings.cache_path: ("layers/*/fs", "images/*/head/fs"), settings.data_path: ("*", "*/upper")}
    for place, patterns in beneath.items():
        paths = (path for pattern in patterns for path in glob.iglob(f"{glob.escape(place)}/{pattern}"))
        found = [path for path in paths if _has_acl(path)]
        if found:
            number = log.many(len(found), "tree")
            what = f"{number} in {place} inherited a default ACL, and containers of them fail to start: {found[0]}"
            yield Finding("bad", what, f"setfacl -R -b {place} (package acl), or remove and import them again")
        elif _has_acl(filesystems.existing(place)):
            yield Finding("ok", f"{place} has a default ACL; images and containers do not inherit it")


def _has_acl(directory: str) -> bool:
    try:
        return not {*trees.ACLS}.isdisjoint(os.listxattr(directory))
    except OSError:
        return False


_FEW, _MANY = 10_000, 100_000  # files of a small image, and of one with a framework or two


def inodes(paths: Iterable[str]) -> Iterator[Finding]:
    """Whether the files of images fit, as far as the file system and the quota of the caller go."""
    for path in paths:
        there = filesystems.existing(path)
        info = os.statvfs(there)
        free = [info.f_favail] if info.f_files else []  # 0: made as they are needed
        left = inode_quota(there)
        free += [] if left is None else [left]
        if not free:
            continue
        why = "your quota" if left is not None and left == min(free) else "the file system"
        if min(free) >= _MANY:
            yield Finding("ok", f"{path} has room for {min(free)} files")
            continue
        fix = "more inodes: setquota -u USER 0 0 0 0 " + there if why == "your quota" else "df -i, penroot cache prune"
        what = f"{path} has room for {min(free)} files by {why}: large images have {_MANY} and more"
        yield Finding("bad" if min(free) < _FEW else "warn", what, f"{fix}; or ENROOT_STORE_FORM=squashfs")


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
    """How many more files the caller may make on the file system of ``path``; None where nothing limits him."""
    libc = ctypes.CDLL(None, use_errno=True)
    quota = _Quota()
    with Fd(os.open(path, os.O_RDONLY | os.O_CLOEXEC)) as fd:
        failed = libc.syscall(_QUOTACTL_FD, fd, _GET_USER_QUOTA, os.getuid(), ctypes.byref(quota))
    limits = [limit for limit in (quota.ihard, quota.isoft) if limit]
    return max(0, min(limits) - quota.inodes) if not failed and limits else None
