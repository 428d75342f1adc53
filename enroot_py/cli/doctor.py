"""``penroot doctor``: check whether containers can run on this machine, and suggest fixes.

The checks change nothing: a test container runs in a child process. ``pyxis-py check`` does the same for Slurm steps.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
from collections.abc import Callable, Iterator

from enroot_py.base import linux, mountinfo, workers
from enroot_py.base.errors import PenrootError
from enroot_py.base.fds import Fd
from enroot_py.base.features import plugged
from enroot_py.cli import fuse, limits, places
from enroot_py.cli.findings import Finding as Finding
from enroot_py.config.settings import Settings
from enroot_py.runtime import fstab, isolated, mounting, rootfs


def findings(load: Callable[[], Settings]) -> Iterator[Finding]:
    """Run all checks. ``load`` reads the settings."""
    yield from machine()
    yield from programs()
    try:
        settings = load()
    except PenrootError as e:
        yield Finding("bad", str(e), e.hint)
        return
    yield from places.findings(settings, os.environ)
    yield from of_features(settings)


def machine() -> Iterator[Finding]:
    """Check the kernel and /dev/fuse, which containers need with and without Slurm."""
    yield kernel()
    yield from limits.findings()
    yield from root_directory()
    yield from container()
    yield from selinux()
    yield hidepid()
    yield from fuse.findings()


def of_features(settings: Settings) -> Iterator[Finding]:
    """Run the checks of features."""
    for feature in plugged("doctor"):
        yield from feature.findings(settings)


def kernel() -> Finding:
    """Check for the newest system call that penroot needs. Distributions backport calls, so ignore the version."""
    release = os.uname().release
    try:
        linux.mount_setattr(-1, "", 0, 0, 0, 0)
    except OSError as e:
        if e.errno == errno.ENOSYS:
            return Finding(
                "bad",
                f"the kernel is Linux {release}, but containers need {linux.FLOOR} or later",
                "upgrade the kernel",
            )
    return Finding("ok", f"the kernel is Linux {release}")


def root_directory() -> Iterator[Finding]:
    """Report a node that runs from its initial RAM file system, such as a diskless node."""
    if rootfs.is_on_initramfs():
        how = "a start mounts the container's root over it, because pivot_root(2) cannot replace it"
        yield Finding("ok", f"/ is the initial RAM file system: {how}")


def container() -> Iterator[Finding]:
    """Try a start as an ordinary user, up to the switch of the root. Versions and settings alone prove little."""
    if error := _failure(_mount_root):
        advice = (
            "modprobe overlay; fix the problems above with the kernel and user namespaces; "
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
    """Run a task in a child process, and return its error, or None. The task's mounts end with the child."""
    try:
        workers.run([task], 1)
    except (OSError, PenrootError) as e:
        return e
    return None


_NOBODY_UID = 65534


def _enter(private: int) -> None:
    """Become an ordinary user. Enter a container's namespaces, and the namespaces ``private``. Raises PenrootError."""
    # In a user namespace that maps no other user, root cannot become nobody, and does not need to.
    with contextlib.suppress(OSError):
        os.setgroups([])
        os.setresgid(_NOBODY_UID, _NOBODY_UID, _NOBODY_UID)
        os.setresuid(_NOBODY_UID, _NOBODY_UID, _NOBODY_UID)
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
            fstab.execute(mount, root)


def selinux(root: str = "/sys/fs/selinux") -> Iterator[Finding]:
    """Check whether SELinux is enforcing: in a Slurm step, it may deny system calls that container() could make."""
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
        f"/proc is mounted with hidepid={hidden}: steps run, but penroot cannot see which images other users use",
        "mount -o remount,hidepid=0 /proc, or give each user a store: ENROOT_CACHE_PATH in enroot.conf",
    )


def programs() -> Iterator[Finding]:
    """Check for programs of other packages. Some verbs need them; a start of a stored image does not."""
    for program, purpose in (("mksquashfs", "import and export cannot write"), ("unsquashfs", "create cannot unpack")):
        if path := shutil.which(program):
            yield Finding("ok", f"{program} is {path}")
        else:
            what = f"{program} is not installed: {purpose} squashfs images"
            yield Finding("warn", what, "install squashfs-tools")
