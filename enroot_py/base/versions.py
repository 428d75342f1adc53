"""The versions of an installation, of which PREFIX/lib/penroot is a link to the one in use.

    lib/penroot -> penroot-versions/1.0.0-Ab3dE6
    lib/penroot-versions/1.0.0-Ab3dE6/     modules, libexec, spank_pyxis.so: LIBRARY

Who starts follows the link once, and has all that is loaded later from that directory. A new version is made whole
before the link leads to it, at once by rename(2); whoever is killed meanwhile has changed nothing. An older one goes
with a later installation, when no container has it mounted, and no process a file of it open or mapped: the kernel
grants a lease for writing only then, F_SETLEASE in fcntl(2). So nobody has to take a lock, and a slurmd is seen too,
which has but the plugin mapped. A file system that nodes share, as NFS, knows no such leases: there age decides.
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
_STAMP = "in-use"  # its time: when this version was last the one that the link leads to
_STARTS = 60  # seconds in which a process that has followed the link has a file open
_KEPT = 30 * 86400  # where nobody tells whether another node uses it: what a step may last
_UNFINISHED = 86400  # what an installation may last


def link(library: str = LIBRARY) -> str:
    """The path that stays when versions change, of the directory of one; another directory is its own."""
    versions = os.path.dirname(library)
    return f"{os.path.dirname(versions)}/penroot" if os.path.basename(versions) == VERSIONS else library


def use() -> None:
    """Let the link lead to the version that this is, and remove those that nobody uses. Raises OSError."""
    import tempfile  # what asks for link() alone is quicker without

    path = link()
    before = os.path.realpath(path)
    if os.path.isdir(path) and not os.path.islink(path):  # as installations were before there were versions
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
    """Remove what the link leads to no more, and nobody uses."""
    import shutil

    current = os.path.realpath(f"{os.path.dirname(versions)}/penroot")
    shared = filesystems.kind(versions) in filesystems.NETWORK
    mounted = _mounted()
    for name in os.listdir(versions):
        directory = f"{versions}/{name}"
        if directory != current and name not in mounted and _is_over(directory, shared):
            shutil.rmtree(directory, ignore_errors=True)  # what stays goes the next time


def _is_over(directory: str, shared: bool) -> bool:
    try:
        age = time.time() - os.stat(f"{directory}/{_STAMP}").st_mtime
    except FileNotFoundError:
        with contextlib.suppress(FileNotFoundError):
            return time.time() - os.stat(directory).st_mtime > _UNFINISHED
        return False
    return age > _KEPT if shared else age > _STARTS and not any(map(_is_open, _files(directory)))


def _mounted() -> set[str]:
    """The versions that a container has, for Slurm from inside; root sees all."""
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
    """Whether a process has the file open or mapped, or nobody can tell."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return os.path.lexists(path) and not os.path.islink(path)
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)  # it comes where another opens the file in this moment
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        return False
    except OSError:
        return True
    finally:
        os.close(fd)  # and the lease is given back
        signal.signal(signal.SIGIO, before)


def _touch(directory: str) -> None:
    with open(f"{directory}/{_STAMP}", "w"):
        os.utime(f"{directory}/{_STAMP}")
