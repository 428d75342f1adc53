"""One directory of compressed blobs that nodes share: one fetches a blob, the others read it.

``sha256/HEX`` is a whole blob, ``sha256/HEX.lock`` says who fetches it, ``tmp`` holds what
is being fetched. Locks are made with link(2) and judged by the file server's clock alone,
so they work on NFS and Lustre without flock(2): link(2), open(2) O_EXCL on NFS. A lock that
its maker has not renewed has expired. Two who take over an expired lock at once both
fetch, which costs time and nothing else: a blob appears by rename, whole, and whoever
reads one checks its digest.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

from enroot_py.base import digests, holders, log, trees, trusted
from enroot_py.base.errors import ImageError
from enroot_py.base.fds import Fd
from enroot_py.base.holders import Holder

if TYPE_CHECKING:
    from typing_extensions import Self

    from enroot_py.registry.manifests import Descriptor
    from enroot_py.registry.sources import Blob, ImageSource

_T = TypeVar("_T")
_EXPIRY = 60.0  # seconds without a sign of life, after which a lock is nobody's
_SIGN = 5.0  # seconds between signs of life
_POLL = 0.2
_ABANDONED = 86400.0  # seconds after which nobody writes any more to what is being fetched
_OPEN = os.O_NOFOLLOW | os.O_CLOEXEC
_ANOTHER = "another node"


class SharedBlobs:
    """The directory ``path``, which is made where it is missing, for ``readers``: everybody, a group or a user.

    Whatever another user has made or left there costs a warning and a fetch of one's own, but no wait.
    Raises ImageError where there is no such directory.
    """

    def __init__(self, path: str, readers: str = "everybody") -> None:
        self._path = path
        self._readers = readers
        try:
            os.makedirs(path, exist_ok=True)
            os.stat(path)
        except OSError as e:
            raise ImageError(
                f"cannot use the shared blobs in {path}: {e.strerror}", hint="see ENROOT_SHARED_BLOBS"
            ) from e

    def read(self, source: ImageSource, descriptor: Descriptor, use: Callable[[Blob], _T]) -> _T:
        """What ``use`` makes of a blob from here, or from ``source``, which is kept here then.

        ``use`` checks the digest, and raises ImageError where it is wrong: a blob from here is fetched again.
        From ``source`` alone where what is here is another user's, and of no use.
        """
        while (blob := self._blob(source, descriptor)) is not None:
            with blob:
                try:
                    result = use(blob)
                except ImageError as e:
                    if not isinstance(blob, _SharedBlob):
                        raise
                    log.warn(f"{e}; the shared {blob.path} is damaged: fetching it again")
                    if not blob.reject():
                        break
                    continue
                if isinstance(blob, _Tee):
                    blob.publish()
                return result
        with source.blob(descriptor) as alone:
            return use(alone)

    def _blob(self, source: ImageSource, descriptor: Descriptor) -> _SharedBlob | _Tee | None:
        """The blob from here, or from ``source`` and then kept here; None where that cannot be."""
        alone = f"fetching {_short(descriptor)} for this node alone"
        try:
            with contextlib.ExitStack() as closing:
                directories = closing.enter_context(_Directories(self._path, self._readers))
                blob = _Turn(directories, descriptor).blob(source)
                closing.pop_all()  # the blob closes them
                return blob
        except _Useless as e:
            if str(e):
                log.warn(f"{e}: {alone}")
        except PermissionError as e:
            log.warn(f"{e.filename} is another user's, who keeps it to himself: {alone}")
        except OSError as e:
            log.warn(f"{e.filename or self._path}: {e.strerror}: {alone}")
        return None


class _Useless(Exception):
    """What is shared serves nobody here. The message says why, if it has not been said."""


class _Directories:
    """The directories of blobs and of what is being fetched, open; no link is followed to one. Raises OSError."""

    def __init__(self, path: str, readers: str) -> None:
        self.path = _beneath(path, readers)
        mode = os.stat(self.path).st_mode & 0o3777  # for whom the site made it, whatever our umask
        with contextlib.ExitStack() as closing:
            self.blobs = closing.enter_context(self._open("sha256", mode))
            self.tmp = closing.enter_context(self._open("tmp", mode))
            self._closing = closing.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def _open(self, name: str, mode: int) -> Fd:
        path = f"{self.path}/{name}"
        _make(path, mode)
        return Fd(os.open(path, os.O_PATH | os.O_DIRECTORY | _OPEN))

    def create(self, name: str) -> int:
        """A new file in ``tmp``. Raises OSError."""
        return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _OPEN, 0o666, dir_fd=self.tmp)


class _Turn:
    """One process among those that want a blob: it reads what is there, waits for it, or fetches it for all."""

    def __init__(self, directories: _Directories, descriptor: Descriptor) -> None:
        self._directories = directories
        self._descriptor = descriptor
        self._name = digests.encoded(descriptor.digest)
        self._lock = self._name + ".lock"
        me = holders.this_process()
        self._me = Holder(me.node, me.boot[:8], me.pid)
        self._own = f"{me.node}.{me.boot[:8]}.{me.pid}.{time.monotonic_ns()}"  # our file in ``tmp``

    def blob(self, source: ImageSource) -> _SharedBlob | _Tee:
        """The blob from here, or from ``source``. Raises OSError, _Useless."""
        waited = False
        while True:
            with contextlib.suppress(FileNotFoundError):
                return self._read()
            if self._take_lock():
                with contextlib.ExitStack() as unlocking:
                    unlocking.callback(os.unlink, self._lock, dir_fd=self._directories.blobs)
                    if not _exists(self._directories.blobs, self._name):
                        blob = _Tee(source.blob(self._descriptor), self._directories, self._own, self._name)
                        unlocking.pop_all()  # it does so when it is closed
                        return blob
                continue  # who had the lock was done between our two looks
            if not waited:
                log.info(f"waiting for {self._holder() or _ANOTHER}, who fetches {_short(self._descriptor)}")
                waited = True
            time.sleep(_POLL)
            if (holder := self._holder()) and (why := holder.asleep()):
                raise _Useless(f"{holder} has locked {self._lock}, and {why}")

    def _read(self) -> _SharedBlob:
        """Raises FileNotFoundError where nobody has fetched the blob yet, or not all of it."""
        blob = _SharedBlob(self._directories, self._name)
        if blob.size == self._descriptor.size:
            return blob
        log.warn(f"{blob.path} has not the size that it should have: fetching it again")
        if not blob.reject():
            raise _Useless
        raise FileNotFoundError

    def _take_lock(self) -> bool:
        """Whether the lock is ours now. Raises _Useless where it is another user's, or cannot be written."""
        path = f"{self._directories.path}/sha256/{self._lock}"
        blobs, tmp = self._directories.blobs, self._directories.tmp
        try:
            with self._signature():
                try:
                    os.link(self._own, self._lock, src_dir_fd=tmp, dst_dir_fd=blobs, follow_symlinks=False)
                    return True
                except FileExistsError:
                    lock = os.stat(self._lock, dir_fd=blobs, follow_symlinks=False)
                if lock.st_uid != os.geteuid():
                    raise _Useless(f"{path} is another user's")
                # Both times are the file server's: the clocks of nodes differ. One from the future never comes.
                if abs(os.stat(self._own, dir_fd=tmp, follow_symlinks=False).st_mtime - lock.st_mtime) > _EXPIRY:
                    log.warn(f"{self._holder() or _ANOTHER} has given no sign of life: taking over {self._lock}")
                    expired = self._own + ".expired"
                    os.rename(self._lock, expired, src_dir_fd=blobs, dst_dir_fd=tmp)
                    os.unlink(expired, dir_fd=tmp)
        except FileNotFoundError:
            return False  # somebody else was quicker
        except OSError as e:
            raise _Useless(f"cannot write {path}: {e.strerror}") from e
        return False

    @contextlib.contextmanager
    def _signature(self) -> Iterator[None]:
        """Our file says who we are, and is as old as the file server thinks."""
        fd = self._directories.create(self._own)
        try:
            with open(fd, "wb") as f:  # it cannot be written where the disk is full
                f.write(self._me.dumps())
            yield
        finally:
            os.unlink(self._own, dir_fd=self._directories.tmp)

    def _holder(self) -> Holder | None:
        """Return the holder of the lock; None if it cannot be read."""
        try:
            with Fd(_open_file(self._directories.blobs, self._lock)) as fd:
                return holders.loads(os.read(fd, holders.MAX_BYTES))
        except OSError:
            return None


class _SharedBlob:
    """A blob that another node has fetched. Raises OSError where it is not there, or no file."""

    def __init__(self, directories: _Directories, name: str) -> None:
        self.path = f"{directories.path}/sha256/{name}"
        self._directories = directories
        self._name = name
        try:
            fd = _open_file(directories.blobs, name)
        except OSError as e:
            raise OSError(e.errno, e.strerror, self.path) from e
        self._file = open(fd, "rb", buffering=0)  # noqa: SIM115 - closed by __exit__
        self.size = os.fstat(fd).st_size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._directories:
            self._file.close()

    def read(self, size: int, /) -> bytes:
        return self._file.read(size)

    def reject(self) -> bool:
        """Remove it, for it is not what its name says. False where it is another user's to remove."""
        self._file.close()
        try:
            os.unlink(self._name, dir_fd=self._directories.blobs)
        except FileNotFoundError:
            return True
        except PermissionError:
            return False
        return True


class _Tee:
    """A blob on its way to whoever reads it and, as by tee(1), to the shared directory."""

    def __init__(self, blob: Blob, directories: _Directories, temporary: str, name: str) -> None:
        self._blob = blob
        self._directories = directories
        self._temporary = temporary
        self._name = name
        self._sign = time.monotonic()
        self._out = open(directories.create(temporary), "wb")  # noqa: SIM115 - closed by __exit__

    def __enter__(self) -> Self:
        self._blob.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        with self._directories:
            self._blob.__exit__(*error)
            self._close()
            # They may have been published, taken over, or moved away by the owner of the directory.
            for name, directory in (
                (self._temporary, self._directories.tmp),
                (self._name + ".lock", self._directories.blobs),
            ):
                with contextlib.suppress(FileNotFoundError, PermissionError):
                    os.unlink(name, dir_fd=directory)

    def read(self, size: int, /) -> bytes:
        data = self._blob.read(size)
        if not self._out.closed:
            try:
                self._out.write(data)
                if time.monotonic() - self._sign > _SIGN:
                    self._sign = time.monotonic()
                    os.utime(self._name + ".lock", dir_fd=self._directories.blobs, follow_symlinks=False)
            except FileNotFoundError:
                log.debug(f"{self._name}: our lock was taken over")
            except OSError as e:
                self._give_up(e)
        return data

    def publish(self) -> None:
        """Its digest was right: let the others have it."""
        if self._out.closed:
            return
        try:
            self._out.flush()
            now = os.fstat(self._out.fileno()).st_mtime
            os.fsync(self._out.fileno())
            tmp, blobs = self._directories.tmp, self._directories.blobs
            os.rename(self._temporary, self._name, src_dir_fd=tmp, dst_dir_fd=blobs)
            _sweep(f"{self._directories.path}/tmp", now)
        except OSError as e:
            self._give_up(e)

    def _give_up(self, error: OSError) -> None:
        """A full disk for what nodes share is no reason to fail: this node has what it needs."""
        log.warn(f"cannot keep {self._directories.path}/sha256/{self._name} for other nodes: {error.strerror}")
        self._close()

    def _close(self) -> None:
        with contextlib.suppress(OSError):  # of what is still to be written: it goes anyway
            self._out.close()


def _short(descriptor: Descriptor) -> str:
    return f"{descriptor.digest[:19]}…"


def _beneath(path: str, readers: str) -> str:
    """The directory in ``path``, or ``path``, whose blobs only ``readers`` can read. Raises OSError."""
    if readers == "everybody":
        return path
    if readers == "user":
        own = trusted.mine(path, f"user-{os.geteuid()}")
        trusted.place(own, make=True)
        return own
    group = f"{path}/group-{os.getegid()}"
    trusted.place(path, closed_to=0)
    with contextlib.suppress(FileExistsError):
        os.mkdir(group, 0o700)
        os.chown(group, -1, os.getegid())
        os.chmod(group, 0o3770)
    status = os.lstat(group)
    if not stat.S_ISDIR(status.st_mode) or status.st_gid != os.getegid() or status.st_mode & 0o007:
        raise OSError(errno.EPERM, f"is not closed to all but group {os.getegid()}", group)
    return group


def _open_file(directory: int, name: str) -> int:
    """Open a regular file for reading. Waits for nothing and follows no link. Raises OSError."""
    fd = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | _OPEN, dir_fd=directory)
    return trusted.regular(fd, name)


def _exists(directory: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _make(directory: str, mode: int) -> None:
    """Make a directory that has its mode at once: others wait for it to appear. Raises OSError."""
    umask = os.umask(0)
    try:
        os.mkdir(directory, mode)
        trees.drop_acl(directory, mode)  # else blobs have the modes that an ACL of the parent gives them
        os.chmod(directory, mode)
    except FileExistsError:
        return
    finally:
        os.umask(umask)


def _sweep(directory: str, now: float) -> None:
    """Remove what the dead have left of their blobs; ``now`` is the file server's."""
    for name in os.listdir(directory):
        with contextlib.suppress(OSError):
            if now - os.lstat(f"{directory}/{name}").st_mtime > _ABANDONED:
                os.unlink(f"{directory}/{name}")
