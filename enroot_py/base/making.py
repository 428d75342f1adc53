"""Create and remove files and directories under hidden names, and remove leftovers of killed processes.

``.NAME.NODE.PID-RANDOM.making`` is renamed to NAME when it is complete. To delete NAME, a process first renames it to
``.NAME.NODE.PID-RANDOM.trash``. A process holds the flock(2) of its hidden entry. The kernel frees the lock of a killed
process, and the next process that creates a file in the directory removes the entry. On a network file system, where
locks may not reach other nodes, a node removes other nodes' entries only after a day.
"""

from __future__ import annotations

import errno
import os
import stat
import time

from enroot_py.base import filesystems, linux, locks, log, trees
from enroot_py.base.fds import Fd

MAKING, TRASH = "making", "trash"
_OPEN = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_MAX_NAME_BYTES = 100
_ABANDONED_AFTER_S = 86400.0


def hidden(path: str, kind: str) -> str:
    """Return a new hidden name beside ``path``."""
    directory, name = os.path.split(path)
    return f"{directory}/.{shortened(name)}.{_node()}.{os.getpid()}-{os.urandom(4).hex()}.{kind}"


def shortened(name: str) -> str:
    """Shorten a name to leave room for a suffix."""
    return os.fsdecode(os.fsencode(name)[:_MAX_NAME_BYTES])


def _node() -> str:
    return shortened(os.uname().nodename)


class Directory:
    """A new directory with a hidden name until publish(). The end of the ``with`` removes an unpublished directory."""

    def __init__(self, target: str, mode: int) -> None:
        self._target = target
        self._mode = mode
        self.path = ""

    def __enter__(self) -> Directory:
        """Raises OSError."""
        while not self.path:
            path = hidden(self._target, MAKING)
            trees.make(path, self._mode)
            try:
                with Fd(os.open(path, os.O_RDONLY | os.O_DIRECTORY | _OPEN)) as fd:
                    if _is_ours(fd, path):
                        self.path, self.fd = path, fd.keep()
            except FileNotFoundError:
                continue
        return self

    def publish(self) -> None:
        """Raises OSError."""
        os.rename(self.path, self._target)
        self.path = ""

    def replace(self) -> str:
        """Publish in place of an existing directory, and return the hidden path of the old directory. Raises OSError.

        The exchange is atomic, except on file systems without RENAME_EXCHANGE, such as NFS: renameat2(2).
        """
        trash = hidden(self._target, TRASH)
        try:
            linux.renameat2(linux.AT_FDCWD, self.path, linux.AT_FDCWD, self._target, linux.RENAME_EXCHANGE)
        except OSError as e:
            if e.errno != errno.EINVAL:
                raise
            os.rename(self._target, trash)
            try:
                self.publish()
            except OSError:
                os.rename(trash, self._target)
                raise
        else:
            os.rename(self.path, trash)
            self.path = ""
        return trash

    def __exit__(self, *_: object) -> None:
        with self.fd:
            if self.path:
                trees.remove(self.path)


class File:
    """A new file that gets its name at publish(). The end of the ``with`` removes an unpublished file.

    Before publish(), the file has no name (open(2), O_TMPFILE). On file systems without O_TMPFILE, such as NFS, it has
    a hidden name.
    """

    def __init__(self, path: str) -> None:
        self._path = path if "/" in path else f"./{path}"
        self._directory = os.path.dirname(self._path) or "/"
        self._hidden = ""
        self.fd = -1

    def __enter__(self) -> File:
        """Raises OSError."""
        try:
            self.fd = os.open(self._directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o666)
        except OSError:
            self._create_hidden()
        else:
            locks.attempt(self.fd)
        return self

    def _create_hidden(self) -> None:
        while not self._hidden:
            path = hidden(self._path, MAKING)
            with Fd(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)) as fd:
                if _is_ours(fd, path):
                    self._hidden, self.fd = path, fd.keep()

    def write(self, data: bytes) -> None:
        """Write all of ``data``: write(2) may write only a part, for example if the disk fills up. Raises OSError."""
        while data:
            data = data[os.write(self.fd, data) :]

    def publish(self, *, replace: bool) -> None:
        """Give the file its name. Raises OSError; FileExistsError if the name exists and ``replace`` is False."""
        # Without fsync(2), a power cut could lose the old and the new file. NFS reports a full disk only at fsync(2).
        if replace and os.path.lexists(self._path) or filesystems.kind(self._directory) in filesystems.NETWORK:
            os.fsync(self.fd)
        self.appear(replace=replace)

    def appear(self, *, replace: bool) -> None:
        """Give the file its name without fsync(2): after a power cut it may be empty. Errors: see publish()."""
        source = self._hidden or f"/proc/self/fd/{self.fd}"
        if not replace:
            _link(source, self._path)
            return
        if not self._hidden:
            new = hidden(self._path, MAKING)
            _link(source, new)
            self._hidden = new
        os.rename(self._hidden, self._path)
        self._hidden = ""

    def __exit__(self, *_: object) -> None:
        with Fd(self.fd):
            if self._hidden:
                os.unlink(self._hidden)


def write(path: str, data: bytes, mode: int | None = None, *, replace: bool = True) -> None:
    """Write a file atomically but without fsync(2), for data that can be created again: see File.appear().

    Without ``mode`` the umask decides. Raises FileExistsError like File.publish(), or OSError.
    """
    with File(path) as file:
        if mode is not None:
            os.fchmod(file.fd, mode)
        file.write(data)
        file.appear(replace=replace)


def symlink(target: str, path: str) -> None:
    """Make a symbolic link, or replace an existing one. Raises OSError."""
    new = hidden(path, MAKING)
    os.symlink(target, new)
    try:
        os.rename(new, path)
    except OSError:
        os.unlink(new)
        raise


def link(fd: int, path: str) -> None:
    """Give a name to an O_TMPFILE file. Raises OSError."""
    _link(f"/proc/self/fd/{fd}", path)


def _link(source: str, path: str) -> None:
    """Link ``source``, which may be /proc/self/fd/N. Only with dst_dir_fd, os.link() sets AT_SYMLINK_FOLLOW for it."""
    directory, name = os.path.split(path)
    with Fd(os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as at:
        os.link(source, name, dst_dir_fd=at)


def hold(path: str) -> Fd | None:
    """Open a file or directory before its removal, and try to lock it. Return None if it cannot be opened.

    Raises FileNotFoundError.
    """
    try:
        fd = _open_to_remove(path, os.O_RDONLY)
    except FileNotFoundError:
        raise
    except OSError:
        return None  # a symbolic link, or another user's file: remove it without a lock
    locks.attempt(fd)
    return fd


def _open_to_remove(path: str, flags: int) -> Fd:
    """Open a file or directory before its removal. Make an unreadable directory readable first. Raises OSError."""
    try:
        return Fd(os.open(path, flags | _OPEN))
    except PermissionError:
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            raise
    os.chmod(path, 0o700)
    return Fd(os.open(path, flags | _OPEN))


def _is_ours(fd: int, path: str) -> bool:
    """Lock a new entry. Return False if the sweep() of another process is removing it. Raises OSError."""
    return locks.attempt(fd) is not False and locks.is_at(fd, path)


def discard(path: str, node: str, pid: int) -> None:
    """Remove hidden files that the ended process ``pid`` of ``node`` made for ``path``."""
    directory, name = os.path.split(path)
    begin = f".{shortened(name)}.{shortened(node)}.{pid}-"
    for name in os.listdir(directory):
        hidden_path = f"{directory}/{name}"
        if name.startswith(begin) and name.endswith("." + MAKING) and os.path.isfile(hidden_path):
            try:
                os.unlink(hidden_path)
            except OSError as e:
                log.debug(f"cannot remove {hidden_path}: {e.strerror}")


def sweep(place: str) -> None:
    """Remove hidden entries of killed processes of this user from the directory ``place``."""
    try:
        names = os.listdir(place)
    except OSError:
        return  # the directory is missing; any other error is reported when a process creates a file in it
    left = [name for name in names if name.startswith(".") and name.endswith(("." + MAKING, "." + TRASH))]
    shared = bool(left) and filesystems.kind(place) in filesystems.NETWORK
    for name in left:
        try:
            _remove_if_left(place, name, shared=shared)
        except OSError as e:  # the next sweep tries again
            log.debug(f"cannot remove {place}/{name}: {e.strerror}")


def _remove_if_left(place: str, name: str, *, shared: bool) -> None:
    maker, _, rest = name.rpartition(".")[0].rpartition(".")
    pid = rest.partition("-")[0]
    is_of_node = maker.endswith("." + _node())
    path = f"{place}/{name}"
    status = os.lstat(path)
    if status.st_uid != os.geteuid() or not pid.isdecimal():
        return
    if shared and not is_of_node and time.time() - status.st_mtime < _ABANDONED_AFTER_S:
        return
    is_directory = stat.S_ISDIR(status.st_mode)
    if not is_directory and not stat.S_ISREG(status.st_mode):
        return
    # NFS locks only files that are open for writing.
    with _open_to_remove(path, os.O_RDONLY | os.O_DIRECTORY if is_directory else os.O_RDWR) as fd:
        free = locks.attempt(fd)
        if free is None:
            free = is_of_node and not os.path.exists(f"/proc/{pid}")
        if not free or not locks.is_at(fd, path):
            return
        log.info(f"removing leftovers of a killed process: {path}")
        if is_directory:
            trees.remove(path)
        else:
            os.unlink(path)
