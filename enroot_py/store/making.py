"""Files and directories in the making or being removed, under hidden names; and removal of what killed processes left.

``.NAME.NODE.PID-RANDOM.making`` becomes NAME by rename when it is complete;
``.NAME.NODE.PID-RANDOM.trash`` was NAME until it began to be deleted. Whoever works on one holds
its flock(2). The lock of a killed process is free at once, and the next process that makes something
there removes what was left. A file system that nodes share need not share its locks: there each
node removes its own.
"""

from __future__ import annotations

import errno
import os
import stat

from enroot_py.store.store import is_at

_OPEN = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EBADF)  # EBADF: of an NFS directory, flock(2)
_ROOM = 100  # bytes of a name
MAKING, TRASH = "making", "trash"


def hidden(path: str, kind: str = MAKING) -> str:
    """A hidden name beside ``path`` that nothing has yet, for what becomes ``path`` or was it."""
    directory, name = os.path.split(path)
    short = os.fsdecode(os.fsencode(name)[:_ROOM])
    node = os.fsdecode(os.fsencode(os.uname().nodename)[:_ROOM])
    return f"{directory}/.{short}.{node}.{os.getpid()}-{os.urandom(4).hex()}.{kind}"


def directory(path: str, mode: int) -> tuple[str, int]:
    """Make a directory that is to become ``path``. Returns its name and a locked descriptor. Raises OSError."""
    from enroot_py.base import trees

    while True:
        made = hidden(path)
        trees.make(made, mode)
        try:
            fd = os.open(made, os.O_RDONLY | os.O_DIRECTORY | _OPEN)
        except FileNotFoundError:
            continue  # swept away this moment, as it was not locked yet
        lock(fd)
        if is_at(fd, made):
            return made, fd
        os.close(fd)


class File:
    """A file that gets its name when it is complete. Use it in a ``with``: whatever happens, no half of it is left.

    It has no name at first, O_TMPFILE of open(2); where the file system has no such files, as NFS, a hidden one.
    """

    def __init__(self, path: str) -> None:
        self._directory, self._name = os.path.split(path)
        self._path = path
        self._hidden = ""
        self.fd = -1

    def __enter__(self) -> File:
        """Raises OSError."""
        try:
            self.fd = os.open(self._directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o666)
        except OSError:
            hidden_name = hidden(self._path)
            self.fd = os.open(hidden_name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            self._hidden = hidden_name
        lock(self.fd)
        return self

    def publish(self, *, replace: bool) -> None:
        """Raises FileExistsError where there is one of the name that is not to be replaced, and OSError."""
        from enroot_py.base import filesystems

        # NFS reports a full disk only now. And without this a power cut could lose the old file and the new one.
        if replace and os.path.lexists(self._path) or filesystems.kind(self._directory) in filesystems.NETWORK:
            os.fsync(self.fd)
        source = self._hidden or f"/proc/self/fd/{self.fd}"
        # With a directory descriptor, for only then os.link() is linkat(2), which can follow /proc/self/fd.
        at = os.open(self._directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if not replace:
                os.link(source, self._name, dst_dir_fd=at)
                return
            if not self._hidden:
                new = hidden(self._path)
                os.link(source, os.path.basename(new), dst_dir_fd=at)
                self._hidden = new
            os.rename(os.path.basename(self._hidden), self._name, src_dir_fd=at, dst_dir_fd=at)
            self._hidden = ""
        finally:
            os.close(at)

    def __exit__(self, *_: object) -> None:
        try:
            if self._hidden:
                os.unlink(self._hidden)
        finally:
            os.close(self.fd)


def hold(path: str) -> int:
    """Open a file or directory of ours and lock it; -1 where that cannot be. Raises FileNotFoundError."""
    try:
        fd = os.open(path, os.O_RDONLY | _OPEN)
    except FileNotFoundError:
        raise
    except OSError:
        return -1  # its modes are closed, or it is a symbolic link: it goes without
    lock(fd)
    return fd


def lock(fd: int) -> bool | None:
    """Lock an open file until its descriptor is closed. False where another has it, None where there are no locks."""
    import fcntl

    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as e:
        if e.errno not in _NO_LOCKS:
            raise
        return None
    return True


def sweep(place: str) -> None:
    """Remove from the directory ``place`` what killed processes of this user have left there."""
    from enroot_py.base import filesystems, log

    try:
        names = os.listdir(place)
    except OSError:
        return  # nothing was ever made in it, or whoever makes something will report what is wrong
    left = [name for name in names if name.startswith(".") and name.endswith(("." + MAKING, "." + TRASH))]
    shared = bool(left) and filesystems.kind(place) in filesystems.NETWORK
    for name in left:
        try:
            _remove_if_left(place, name, shared=shared)
        except OSError as e:  # the next one tries again
            log.debug(f"cannot remove {place}/{name}: {e.strerror}")


def _remove_if_left(place: str, name: str, *, shared: bool) -> None:
    from enroot_py.base import log, trees

    maker, _, rest = name.rpartition(".")[0].rpartition(".")
    pid = rest.partition("-")[0]
    ours = maker.endswith("." + os.fsdecode(os.fsencode(os.uname().nodename)[:_ROOM]))
    path = f"{place}/{name}"
    found = os.lstat(path)
    if found.st_uid != os.geteuid() or not pid.isdecimal() or shared and not ours:
        return
    is_directory = stat.S_ISDIR(found.st_mode)
    if not is_directory and not stat.S_ISREG(found.st_mode):
        return
    if is_directory and not found.st_mode & stat.S_IRUSR:
        os.chmod(path, 0o700)  # of a container that was to be deleted
    # To lock a file of NFS it must be open for writing.
    fd = os.open(path, _OPEN | (os.O_RDONLY | os.O_DIRECTORY if is_directory else os.O_RDWR))
    try:
        free = lock(fd)
        if free is None:
            free = ours and not os.path.exists(f"/proc/{pid}")
        if not free or not is_at(fd, path):
            return
        log.info(f"removing what a killed process left: {path}")
        if is_directory:
            trees.remove(path)
        else:
            os.unlink(path)
    finally:
        os.close(fd)
