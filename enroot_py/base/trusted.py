"""Checks of places that another user could have made, changed or swapped, before they are used.

What lies in a directory that others can write to, as /tmp, or under a name that others
can guess, is believed only if it belongs to us or to root and nobody else can write to it.
A place is checked from the root directory down: where nobody else can put anything in
place of a directory on the way, its path goes on meaning the same, and is safe to use.
On the start path: no import but os, errno and stat.
"""

from __future__ import annotations

import errno
import os
import stat

_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_MAXSYMLINKS = 40  # path_resolution(7)
_TEMPORARY = ("/tmp", "/var/tmp", "/dev/shm")
IRREGULAR = "is not a regular file"
_EVERYBODY = 0o002
_GROUP = 0o020
_OTHERS, _GROUPS = 0o007, 0o070


def place(path: str, *, make: bool = False, strict: bool = False, closed_to: int = 0o022) -> os.stat_result:
    """The state of a directory of the caller or root. Nobody else can write to it, nor can everybody replace it.

    A group, or another owner of a directory above, could still move what lies there: ``strict`` refuses that too.
    What is missing is made, if ``make``. ``closed_to`` are the bits of a mode that the directory itself must not
    have. Raises OSError, whose strerror says what is not as it must be.
    """
    state = _walk(path, make, strict, 0)[1]
    _check_owner(state, path)
    _check_mode(state, path, closed_to)
    return state


def own(path: str) -> str:
    """``path``, or the caller's own directory beneath it where users share it: mode 1777, or a group's.

    What another user has made under the name of that is passed by; only then something is made. Raises OSError.
    """
    try:
        state = os.stat(path)
    except OSError:
        return path
    if not is_shared(state) or not os.access(path, os.W_OK):
        return path
    return mine(path, f"user-{os.geteuid()}")


def is_shared(state: os.stat_result) -> bool:
    """Whether users share a directory: root's, sticky and open to all, or another owner's, and open to a group."""
    if state.st_mode & _EVERYBODY:
        return state.st_uid == 0 and bool(state.st_mode & stat.S_ISVTX)
    return bool(state.st_mode & _GROUP) and state.st_uid != os.geteuid() and not _is_own_group(state)


def mine(parent: str, name: str) -> str:
    """A path in ``parent``, which users share: ``name``, or where another user has that, one that begins with it.

    Raises OSError.
    """
    path = f"{parent}/{name}"
    if _is_mine_or_free(path):
        return path
    ours = sorted(entry for entry in os.listdir(parent) if entry.startswith(name + "-"))
    for entry in ours:
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
    """A directory of the caller's own in ``preferred``, or else in /tmp and its like. Raises OSError."""
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
    """Where ``path`` leads, and the state of that. Each directory above it is checked."""
    here, at = "", os.lstat("/")
    names = [name for name in path.split("/") if name not in ("", ".")]
    for number, name in enumerate(names):
        if name == "..":
            here = here.rpartition("/")[0]
            at = os.lstat(here or "/")
            continue
        shared = _look(here, at, strict)
        there = f"{here}/{name}"
        try:
            state = os.lstat(there)
        except FileNotFoundError:
            if not make:
                raise
            try:
                os.mkdir(there, 0o700 if number == len(names) - 1 and not links else 0o755)
            except FileExistsError:
                pass  # another process was quicker
            state = os.lstat(there)
        if shared:
            _check_owner(state, there, "" if number == len(names) - 1 else there)
        if stat.S_ISLNK(state.st_mode):
            if links == _MAXSYMLINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), there)
            target = os.readlink(there)
            here, state = _walk(target if target[:1] == "/" else f"{here}/{target}", make, strict, links + 1)
        elif not stat.S_ISDIR(state.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), there)
        else:
            here = there
        at = state
    return here, at


def _look(path: str, state: os.stat_result, strict: bool) -> bool:
    """Whether everybody can make something in a directory on the way. Raises OSError if others could also swap it."""
    everybody = bool(state.st_mode & _EVERYBODY)
    if everybody:
        if not state.st_mode & stat.S_ISVTX:
            why = f"lies in {path or '/'}, where others can replace it (mode {state.st_mode & 0o7777:o}, not sticky)"
            raise PermissionError(errno.EPERM, why, path)
        if state.st_uid not in (os.geteuid(), 0) and state.st_uid != _root():
            raise PermissionError(errno.EPERM, f"lies in {path}, where uid {state.st_uid} can swap it", path)
    elif strict and state.st_mode & _GROUP and not state.st_mode & stat.S_ISVTX and not _is_own_group(state):
        raise PermissionError(errno.EPERM, f"lies in {path or '/'}, where a group can replace it", path)
    if strict and state.st_uid not in (os.geteuid(), 0) and state.st_uid != _root():
        raise PermissionError(errno.EPERM, f"lies in {path or '/'}, where uid {state.st_uid} can swap it", path)
    return everybody


def _root() -> int:
    """The uid that root's files have: in a user namespace without root the overflow uid, as the files of others."""
    return os.stat("/proc/sys").st_uid


def file(path: str) -> int:
    """Open a regular file for reading that only its owner can write to; the owner is the caller or root.

    No symbolic link is followed in the last component, and nothing is waited for. Raises OSError, whose
    strerror says what is not as it must be.
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
    """Open a regular file of a host for reading that only who owns its ``root`` directory could have put there.

    No link is followed on the way, and no directory on it can be written to by others. Outside of user namespaces
    alone: in them the files of all others have one owner. Raises OSError, whose strerror says what is not so.
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
            if state.st_mode & _EVERYBODY or state.st_mode & _GROUP and state.st_gid != owner:
                why = f"{here} can be written by others (mode {state.st_mode & 0o7777:o})"
                raise PermissionError(errno.EPERM, why, path)
        return regular(os.dup(at), path)
    finally:
        os.close(at)


def regular(fd: int, path: str) -> int:
    """``fd``, if it is open on a regular file. Closes it and raises OSError if not: ``path`` names it in the error."""
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, IRREGULAR, path)
    return fd


def _check_owner(state: os.stat_result, path: str, above: str = "") -> None:
    me = os.geteuid()
    if state.st_uid not in (me, 0):
        what = f"lies in {above}, which belongs" if above else "belongs"
        raise PermissionError(errno.EPERM, f"{what} to uid {state.st_uid}, not to uid {me} or root", path)


def _check_mode(state: os.stat_result, path: str, closed_to: int = 0o022) -> None:
    open_to = state.st_mode & closed_to
    if open_to & _OTHERS or open_to & _GROUPS and not _is_own_group(state):
        what = "written" if open_to & (_EVERYBODY | _GROUP) else "read"
        raise PermissionError(errno.EPERM, f"can be {what} by others (mode {state.st_mode & 0o7777:o})", path)


def _is_own_group(state: os.stat_result) -> bool:
    """Whether the group is the owner's private one, which has the same number: umask 002 goes with such groups."""
    return state.st_gid == state.st_uid
