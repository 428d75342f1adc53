"""Check owner, file system and free space of the directories of images and containers."""

from __future__ import annotations

import ctypes
import errno
import glob
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from enroot_py.base import filesystems, log, trees, trusted
from enroot_py.base.errors import ImageError
from enroot_py.base.fds import Fd
from enroot_py.cli.findings import Finding
from enroot_py.config.settings import Settings
from enroot_py.runtime import pods
from enroot_py.store import format

_IN_MEMORY = frozenset(("tmpfs", "ramfs", "rootfs"))


def findings(settings: Settings, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Check the directories of the caller."""
    yield data_path(settings.data_path)
    yield from cache_path(settings)
    yield temp_path(settings.temp_path)
    yield from runtime_path(settings.runtime_path, environ)
    yield from acls(settings)
    yield from inodes(dict.fromkeys((settings.data_path, settings.cache_path)))


_STICKY = "chmod 1777 DIRECTORY (for an emptyDir, in an initContainer), or set a private directory in enroot.conf"


def _distrust(path: str) -> str:
    """Return why other users could replace ``path``, or "" if they cannot."""
    try:
        trusted.place(f"{path}/any")
    except OSError as e:
        return e.strerror if e.errno == errno.EPERM and e.strerror else ""
    return ""


def _closed(path: str, purpose: str, setting: str) -> Finding | None:
    """Return a finding if the caller can neither write to ``path`` nor create it, else None."""
    existing = filesystems.existing(path)
    if os.access(existing, os.W_OK | os.X_OK):
        return None
    reason = "you cannot write there" if existing == path else f"you cannot create this directory in {existing}"
    return Finding(
        "bad", f"{purpose} {path}, but {reason}", f"chown it to the user, or set {setting} to another directory"
    )


def data_path(path: str) -> Finding:
    """Check the caller's directory of containers. pyxis-py check uses it as an example for all users."""
    fix = "use a local disk: ENROOT_DATA_PATH /var/tmp/penroot-$(id -u) in enroot.conf"
    kind = filesystems.kind(path)
    if kind in filesystems.NETWORK:
        return Finding("warn", f"containers are in {path}, a network file system ({kind}): no overlay, slow", fix)
    if why := _distrust(path):
        return Finding("bad", f"containers are in {path}, which {why}", _STICKY)
    if closed := _closed(path, "containers are in", "ENROOT_DATA_PATH"):
        return closed
    if kind == "overlay":
        what = f"containers are in {path}, which {pods.ON_OVERLAY}: they cannot keep changes"
        return Finding("bad", what, pods.volume("ENROOT_DATA_PATH"))
    there = filesystems.existing(path)
    if os.statvfs(there).f_flag & os.ST_NOEXEC:
        return Finding("bad", f"containers are in {path}, mounted noexec: their programs cannot be executed", fix)
    if kind in _IN_MEMORY:
        return Finding("warn", f"containers are in {path}, {_in_memory(path, kind)}, and are lost at a reboot", fix)
    nosuid = ", nosuid" if os.statvfs(there).f_flag & os.ST_NOSUID else ""
    return Finding("ok", f"containers are in {path} ({kind}{nosuid})")


def cache_path(settings: Settings) -> Iterator[Finding]:
    """Check the directory and the format of the store."""
    path = settings.cache_path
    kind = filesystems.kind(path)
    if why := _distrust(path):
        yield Finding("bad", f"images are stored in {path}, which {why}", _STICKY)
        return
    if closed := _closed(path, "images are stored in", "ENROOT_CACHE_PATH"):
        yield closed
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
    local = "use a local disk: ENROOT_CACHE_PATH /var/tmp/penroot-$(id -u) in enroot.conf"
    if kind in _IN_MEMORY:
        yield Finding("warn", f"images are stored in {path}, {_in_memory(path, kind)}, and are lost at a reboot", local)
    elif kind in filesystems.NETWORK:
        what = f"{path}, a network file system ({kind}): each image is one squashfs file, mounted with FUSE"
        yield Finding("warn", f"images are stored in {what}", local)
    else:
        yield Finding("ok", f"images are stored in {path} ({kind})")


def temp_path(path: str) -> Finding:
    """Check the directory in which import and export unpack images: ENROOT_TEMP_PATH, TMPDIR or /tmp."""
    if closed := _closed(path, "import and export unpack images in", "ENROOT_TEMP_PATH"):
        return replace(closed, verdict="warn")  # starting a stored image does not need this directory
    kind = filesystems.kind(path)
    if kind in _IN_MEMORY:
        what = f"import and export unpack images in {path}, {_in_memory(path, kind)}"
        return Finding("warn", what, "use a disk: ENROOT_TEMP_PATH /var/tmp in enroot.conf")
    return Finding("ok", f"import and export unpack images in {path} ({kind})")


def _in_memory(path: str, kind: str) -> str:
    info = os.statvfs(filesystems.existing(path))
    return f"in memory ({kind}, {info.f_bavail * info.f_frsize >> 30} GiB free): files count as memory of the job"


def runtime_path(path: str, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Check that the caller owns XDG_RUNTIME_DIR (XDG Base Directory Specification). su(1) does not change it."""
    runtime_dir = environ.get("XDG_RUNTIME_DIR")
    if not runtime_dir:
        return
    try:
        owner = os.stat(runtime_dir).st_uid
    except OSError as e:
        what = f"XDG_RUNTIME_DIR={runtime_dir}: {e.strerror}; starts use {path} instead"
        yield Finding("warn", what, "log in again, or: loginctl enable-linger USER; unset XDG_RUNTIME_DIR")
        return
    if owner == os.geteuid():
        yield Finding("ok", f"XDG_RUNTIME_DIR={runtime_dir} is yours")
        return
    instead = "one in /tmp" if f"{path}/".startswith(f"{runtime_dir.rstrip('/')}/") else path
    what = f"XDG_RUNTIME_DIR={runtime_dir} belongs to user {owner}, not to you: starts use another directory, {instead}"
    yield Finding("warn", what, "unset XDG_RUNTIME_DIR, or become the user with: su --login USER")


def acls(settings: Settings) -> Iterator[Finding]:
    """Check for ACLs in the store and in containers: acl(5). Overlayfs cannot copy an ACL that names another user.

    penroot creates its directories without ACLs. The directories that enroot and older versions of penroot created
    inherited a default ACL.
    """
    beneath = {settings.cache_path: ("layers/*/fs", "images/*/head/fs"), settings.data_path: ("*", "*/upper")}
    for place, patterns in beneath.items():
        fix = f"setfacl -R -b {place} (package acl), or remove and recreate the images and containers in it"
        trees_ = [path for pattern in patterns for path in glob.iglob(f"{glob.escape(place)}/{pattern}")]
        inherited = [path for path in trees_ if _has_acl(path)]
        others = [path for path in glob.iglob(f"{glob.escape(place)}/*/") if path[:-1] not in trees_ and _has_acl(path)]
        if inherited:
            number = log.many(len(inherited), "directory tree")
            what = f"{number} in {place} inherited a default ACL; their containers fail to start: {inherited[0]}"
            yield Finding("bad", what, fix)
        if others:
            is_open = any(os.stat(path).st_mode & 0o020 for path in others)  # the mask of the ACL
            what = f"{others[0]} has an ACL: users named in it can {'change' if is_open else 'read'} your images"
            yield Finding("bad" if is_open else "warn", what, fix)
        if not inherited and not others and _has_acl(filesystems.existing(place)):
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
    """Return how many more files the caller's quota allows on the file system of ``path``, or None without a limit."""
    libc = ctypes.CDLL(None, use_errno=True)
    quota = _Quota()
    with Fd(os.open(path, os.O_RDONLY | os.O_CLOEXEC)) as fd:
        failed = libc.syscall(_QUOTACTL_FD, fd, _GET_USER_QUOTA, os.getuid(), ctypes.byref(quota))
    limits = [limit for limit in (quota.ihard, quota.isoft) if limit]
    return max(0, min(limits) - quota.inodes) if not failed and limits else None
