"""Check paths that another user could have created, changed or swapped, before using them.

In a directory such as /tmp, or under a name that can be guessed, a file is trusted only if the caller or root owns it
and nobody else can write to it. A path is checked from the root directory down: if nobody else can replace a directory
on the path, the path stays safe to use. On the start path: only os, errno and stat are imported.
"""

from __future__ import annotations

import errno
import os
import stat

_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_MAXSYMLINKS = 40  # path_resolution(7)
_TEMPORARY = ("/tmp", "/var/tmp", "/dev/shm")
IRREGULAR = "is not a regular file"
_OTHERS_WRITE = 0o002
_GROUP_WRITE = 0o020
_OTHERS, _GROUPS = 0o007, 0o070


def place(path: str, *, make: bool = False, strict: bool = False, closed_to: int = 0o022) -> os.stat_result:
    """Check that the caller or root owns a directory, and that nobody else can write to it. Return its state.

    Also refuses a directory above in which everybody could replace entries. ``strict`` also refuses a directory above
    that belongs to another user or is writable by a group: that user or group could replace entries. ``make`` creates
    missing directories. ``closed_to`` are the mode bits that the directory itself must not have. Raises OSError, whose
    strerror is the failed check.
    """
    state = _walk(path, make, strict, 0)[1]
    _check_owner(state, path)
    _check_mode(state, path, closed_to)
    return state


def own(path: str) -> str:
    """Return ``path``. If users share this directory (see is_shared()), return the caller's directory in it.

    Creates a directory only if another user has taken the usual name: see mine(). Raises OSError.
    """
    try:
        state = os.stat(path)
    except OSError:
        return path
    if not is_shared(state) or not os.access(path, os.W_OK):
        return path
    return mine(path, f"user-{os.geteuid()}")


def is_shared(state: os.stat_result) -> bool:
    """Return whether users share a directory. Either root owns it with mode 1777, or a group can write to it.

    A directory that a group can write to is not shared if the caller owns it, or if it has the owner's private group.
    """
    if state.st_mode & _OTHERS_WRITE:
        return state.st_uid == 0 and bool(state.st_mode & stat.S_ISVTX)
    return bool(state.st_mode & _GROUP_WRITE) and state.st_uid != os.geteuid() and not _is_own_group(state)


def mine(parent: str, name: str) -> str:
    """Return the caller's path ``name`` in the shared directory ``parent``, or ``name-RANDOM`` if another user has it.

    Creates only ``name-RANDOM``. Raises OSError.
    """
    path = f"{parent}/{name}"
    if _is_mine_or_free(path):
        return path
    candidates = sorted(entry for entry in os.listdir(parent) if entry.startswith(name + "-"))
    for entry in candidates:
        if _is_mine_or_free(f"{parent}/{entry}"):
            return f"{parent}/{entry}"
    path += "-" + os.urandom(8).hex()
    os.mkdir(path, 0o700)
    return path


def _is_mine_or_free(path: str) -> bool:
    try:
        state = os.lstat(path)
    except FileNotFoundError:
        return True
    return stat.S_ISDIR(state.st_mode) and state.st_uid == os.geteuid() and not state.st_mode & 0o022


def temporary(preferred: str) -> str:
    """Make a private directory of the caller in ``preferred``, or else in _TEMPORARY. Raises OSError."""
    for parent in (preferred, *_TEMPORARY):
        try:
            path = mine(parent, f"penroot-{os.geteuid()}")
            place(path, make=True, strict=True)
        except OSError as e:
            error = e
        else:
            return path
    raise error


def _walk(path: str, make: bool, strict: bool, links: int) -> tuple[str, os.stat_result]:
    """Resolve ``path`` and check each directory above it. Return the resolved path and its state."""
    here, at = "", os.lstat("/")
    names = [name for name in path.split("/") if name not in ("", ".")]
    for number, name in enumerate(names):
        if name == "..":
            here = here.rpartition("/")[0]
            at = os.lstat(here or "/")
            continue
        shared = _check_above(here, at, strict)
        entry_path = f"{here}/{name}"
        try:
            state = os.lstat(entry_path)
        except FileNotFoundError:
            if not make:
                raise
            try:
                os.mkdir(entry_path, 0o700 if number == len(names) - 1 and not links else 0o755)
            except FileExistsError:
                pass  # another process was quicker
            state = os.lstat(entry_path)
        if shared:
            _check_owner(state, entry_path, "" if number == len(names) - 1 else entry_path)
        if stat.S_ISLNK(state.st_mode):
            if links == _MAXSYMLINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), entry_path)
            target = os.readlink(entry_path)
            here, state = _walk(target if target[:1] == "/" else f"{here}/{target}", make, strict, links + 1)
        elif not stat.S_ISDIR(state.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), entry_path)
        else:
            here = entry_path
        at = state
    return here, at


def _check_above(path: str, state: os.stat_result, strict: bool) -> bool:
    """Return whether everybody can create entries in a directory. Raises OSError if others could replace entries."""
    everybody = bool(state.st_mode & _OTHERS_WRITE)
    if everybody:
        if not state.st_mode & stat.S_ISVTX:
            reason = f"lies in {path or '/'}, where others can replace it (mode {state.st_mode & 0o7777:o}, not sticky)"
            raise PermissionError(errno.EPERM, reason, path)
        if state.st_uid not in (os.geteuid(), 0) and state.st_uid != _root():
            raise PermissionError(errno.EPERM, f"lies in {path}, where uid {state.st_uid} can swap it", path)
    elif strict and state.st_mode & _GROUP_WRITE and not state.st_mode & stat.S_ISVTX and not _is_own_group(state):
        raise PermissionError(errno.EPERM, f"lies in {path or '/'}, where a group can replace it", path)
    if strict and state.st_uid not in (os.geteuid(), 0) and state.st_uid != _root():
        raise PermissionError(errno.EPERM, f"lies in {path or '/'}, where uid {state.st_uid} can swap it", path)
    return everybody


def _root() -> int:
    """Return the uid of root's files.

    In a user namespace that does not map root, this is the overflow uid. Files of other unmapped users have it too.
    """
    return os.stat("/proc/sys").st_uid


def file(path: str) -> int:
    """Open a regular file of the caller or root for reading. Refuse a file to which others can write.

    The owner's private group may have write permission. Does not follow a symlink in the last component, and does not
    block. Raises OSError; strerror is the failed check.
    """
    fd = regular(os.open(path, _OPEN), path)
    try:
        state = os.fstat(fd)
        _check_owner(state, path)
        _check_mode(state, path)
    except OSError:
        os.close(fd)
        raise
    return fd


def installed(path: str, root: str = "/") -> int:
    """Open a regular host file for reading, if only the owner of the directory ``root`` could have installed it.

    Follows no symlink, and refuses a path with a component that others can write to. Call it outside user namespaces
    only: inside, all unmapped users look like one owner. Raises OSError; strerror is the failed check.
    """
    owner = os.stat(root).st_uid
    at = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    here = root.rstrip("/")
    names = [name for name in path[len(here) :].split("/") if name]
    try:
        for number, name in enumerate(names):
            last = number == len(names) - 1
            here += f"/{name}"
            flags = _OPEN if last else os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            at, above = os.open(name, flags, dir_fd=at), at
            os.close(above)
            state = os.fstat(at)
            if state.st_uid != owner:
                raise PermissionError(errno.EPERM, f"{here} belongs to uid {state.st_uid}, not to uid {owner}", path)
            if state.st_mode & _OTHERS_WRITE or state.st_mode & _GROUP_WRITE and state.st_gid != owner:
                reason = f"{here} can be written by others (mode {state.st_mode & 0o7777:o})"
                raise PermissionError(errno.EPERM, reason, path)
        return regular(os.dup(at), path)
    finally:
        os.close(at)


def regular(fd: int, path: str) -> int:
    """Return ``fd`` if it is a regular file. Otherwise close it, and raise OSError that names ``path``."""
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, IRREGULAR, path)
    return fd


def _check_owner(state: os.stat_result, path: str, above: str = "") -> None:
    me = os.geteuid()
    if state.st_uid not in (me, 0):
        location = f"lies in {above}, which belongs" if above else "belongs"
        raise PermissionError(errno.EPERM, f"{location} to uid {state.st_uid}, not to uid {me} or root", path)


def _check_mode(state: os.stat_result, path: str, closed_to: int = 0o022) -> None:
    open_to = state.st_mode & closed_to
    if open_to & _OTHERS or open_to & _GROUPS and not _is_own_group(state):
        access = "written" if open_to & (_OTHERS_WRITE | _GROUP_WRITE) else "read"
        raise PermissionError(errno.EPERM, f"can be {access} by others (mode {state.st_mode & 0o7777:o})", path)


def _is_own_group(state: os.stat_result) -> bool:
    """Return whether the group is the owner's private group: with the owner's number, as usual with umask 002."""
    return state.st_gid == state.st_uid
