"""Keep several versions of an installation. PREFIX/lib/penroot is a symlink to the current version.

    lib/penroot -> penroot-versions/1.0.0-Ab3dE6
    lib/penroot-versions/1.0.0-Ab3dE6/     LIBRARY, with modules, libexec, spank_pyxis.so

A process follows the link once at its start, and loads everything from LIBRARY. An installation completes the new
version, then replaces the link by rename(2). If it is killed earlier, the link is unchanged. A later installation
removes an old version when no container has it mounted and no process has one of its files open or mapped. The kernel
grants a write lease on a file (fcntl(2), F_SETLEASE) only if no process has it open or mapped. So processes need no
lock, and a slurmd that has only the plugin mapped is detected too. On shared file systems such as NFS, which have no
leases, the age of a version decides.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Iterator

from enroot_py import LIBRARY
from enroot_py.base import filesystems, mountinfo

VERSIONS = "penroot-versions"
_STAMP = "in-use"  # touched when the link begins to point to this version, and when it ceases to
_MAX_START_S = 60  # from following the link to opening a file of the version
_MAX_SHARED_USE_S = 30 * 86400  # the duration of the longest step, which may run on another node
_MAX_INSTALL_S = 86400


def link(library: str = LIBRARY) -> str:
    """Return the link that points to the version directory ``library``. Return any other directory unchanged."""
    versions = os.path.dirname(library)
    return f"{os.path.dirname(versions)}/penroot" if os.path.basename(versions) == VERSIONS else library


def use() -> None:
    """Point the link to this version, and remove unused versions. Raises OSError."""
    import tempfile  # a slow import that link() does not need

    path = link()
    before = os.path.realpath(path)
    if os.path.isdir(path) and not os.path.islink(path):  # installed by a penroot that kept no versions
        before = f"{os.path.dirname(LIBRARY)}/before-{os.getpid()}"
        os.rename(path, before)
    _touch(LIBRARY)
    with tempfile.TemporaryDirectory(prefix=".new-", dir=os.path.dirname(LIBRARY)) as place:
        os.symlink(os.path.relpath(LIBRARY, os.path.dirname(path)), f"{place}/link")
        os.rename(f"{place}/link", path)
    if os.path.isdir(before) and before != LIBRARY:
        _touch(before)
    sweep(os.path.dirname(LIBRARY))


def sweep(versions: str) -> None:
    """Remove old versions that no process uses."""
    import shutil

    current = os.path.realpath(f"{os.path.dirname(versions)}/penroot")
    shared = filesystems.kind(versions) in filesystems.NETWORK
    mounted = _mounted()
    for name in os.listdir(versions):
        directory = f"{versions}/{name}"
        if directory != current and name not in mounted and _is_unused(directory, shared):
            shutil.rmtree(directory, ignore_errors=True)  # the next sweep removes the rest


def _is_unused(directory: str, shared: bool) -> bool:
    try:
        age = time.time() - os.stat(f"{directory}/{_STAMP}").st_mtime
    except FileNotFoundError:
        with contextlib.suppress(FileNotFoundError):
            return time.time() - os.stat(directory).st_mtime > _MAX_INSTALL_S
        return False
    return age > _MAX_SHARED_USE_S if shared else age > _MAX_START_S and not any(map(_is_open, _files(directory)))


def _mounted() -> set[str]:
    """Return the versions mounted in containers that can submit jobs. Only root sees all containers."""
    names: set[str] = set()
    for process in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            mounts = mountinfo.read(f"/proc/{process}/mountinfo")
            paths = (path for mount in mounts for path in (mount.root, mount.target))
            names.update(path.partition(f"/{VERSIONS}/")[2].partition("/")[0] for path in paths)
    return names


def _files(directory: str) -> Iterator[str]:
    for place, _, names in os.walk(directory):
        yield from (f"{place}/{name}" for name in names)


def _is_open(path: str) -> bool:
    """Return whether a process has the file open or mapped. Return True if that is unknown."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return os.path.lexists(path) and not os.path.islink(path)
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)  # sent if another process opens the file during the lease
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        return False
    except OSError:
        return True
    finally:
        os.close(fd)  # ends the lease
        signal.signal(signal.SIGIO, before)


def _touch(directory: str) -> None:
    with open(f"{directory}/{_STAMP}", "w"):
        os.utime(f"{directory}/{_STAMP}")
