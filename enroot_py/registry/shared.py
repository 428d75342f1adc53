"""Share compressed blobs in a directory: one node downloads a blob, the other nodes read it.

``sha256/HEX`` is a complete blob, ``sha256/HEX.lock`` names the process that downloads it, ``tmp`` has partial
downloads. Locks work on NFS and Lustre without flock(2): link(2) creates them, and only the file server's clock
decides whether a lock has expired. See link(2), and open(2), O_EXCL on NFS. The owner renews a lock regularly. If two
processes take over an expired lock at the same time, both download the blob. This only costs time, because rename
publishes complete blobs, and every reader checks the digest.
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
_LOCK_EXPIRY_S = 60.0  # after the last renewal
_RENEWAL_S = 5.0  # between renewals of a lock
_POLL_S = 0.2
_ABANDONED_S = 86400.0  # a partial download of this age is abandoned
_OPEN_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC


class SharedBlobs:
    """The shared directory ``path``, created if missing. ``readers`` is "everybody", "group" or "user".

    Unusable files of another user never block a download: this node warns and downloads the blob for itself. Raises
    ImageError if the directory cannot be used.
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
        """Call ``use`` with a shared blob, or download the blob from ``source`` and share it. Return the result.

        If ``use`` raises ImageError for a shared blob, the shared file is damaged: download the blob again. If another
        user's files prevent sharing, the download is not shared.
        """
        while (blob := self._blob(source, descriptor)) is not None:
            with blob:
                try:
                    result = use(blob)
                except ImageError as e:
                    if not isinstance(blob, _SharedBlob):
                        raise
                    log.warn(f"{e}; the shared file {blob.path} is damaged: downloading it again")
                    if not blob.reject():
                        break
                    continue
                if isinstance(blob, _Tee):
                    blob.publish()
                return result
        with source.blob(descriptor) as unshared:
            return use(unshared)

    def _blob(self, source: ImageSource, descriptor: Descriptor) -> _SharedBlob | _Tee | None:
        """Open the shared blob. If there is none, open the blob of ``source``; reading it also writes the shared file.

        Return None if sharing is not possible.
        """
        alone = f"downloading {_short(descriptor)} for this node alone"
        try:
            with contextlib.ExitStack() as closing:
                directories = closing.enter_context(_Directories(self._path, self._readers))
                blob = _Turn(directories, descriptor).blob(source)
                closing.pop_all()  # the blob closes the directories
                return blob
        except _NotShareableError as e:
            if str(e):
                log.warn(f"{e}: {alone}")
        except PermissionError as e:
            log.warn(f"{e.filename} belongs to another user and is not accessible: {alone}")
        except OSError as e:
            log.warn(f"{e.filename or self._path}: {e.strerror}: {alone}")
        return None


class _NotShareableError(Exception):
    """This node cannot use or share a blob. The message is empty if the reason has been logged."""


class _Directories:
    """The open directories of blobs and of partial downloads. Links are not followed. Raises OSError."""

    def __init__(self, path: str, readers: str) -> None:
        self.path = _beneath(path, readers)
        mode = os.stat(self.path).st_mode & 0o3777  # the site chose this mode: use it for subdirectories, too
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
        return Fd(os.open(path, os.O_PATH | os.O_DIRECTORY | _OPEN_FLAGS))

    def create(self, name: str) -> int:
        """Create a file in ``tmp``. Raises OSError."""
        return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _OPEN_FLAGS, 0o666, dir_fd=self.tmp)


class _Turn:
    """Get a blob for this process: read the shared blob, wait for another process, or download the blob for all."""

    def __init__(self, directories: _Directories, descriptor: Descriptor) -> None:
        self._directories = directories
        self._descriptor = descriptor
        self._name = digests.encoded(descriptor.digest)
        self._lock = self._name + ".lock"
        me = holders.this_process()
        self._me = Holder(me.node, me.boot[:8], me.pid)
        self._own = f"{me.node}.{me.boot[:8]}.{me.pid}.{time.monotonic_ns()}"  # our file in ``tmp``

    def blob(self, source: ImageSource) -> _SharedBlob | _Tee:
        """Open the shared blob, or lock it and open the blob of ``source``. Raises OSError, _NotShareableError."""
        has_waited = False
        while True:
            with contextlib.suppress(FileNotFoundError):
                return self._read()
            if self._take_lock():
                with contextlib.ExitStack() as unlocking:
                    unlocking.callback(os.unlink, self._lock, dir_fd=self._directories.blobs)
                    if not _exists(self._directories.blobs, self._name):
                        blob = _Tee(source.blob(self._descriptor), self._directories, self._own, self._name)
                        unlocking.pop_all()  # _Tee.__exit__ unlocks
                        return blob
                continue  # the last owner of the lock published the blob after our _read()
            if not has_waited:
                log.info(f"waiting for {self._holder() or 'another node'} to download {_short(self._descriptor)}")
                has_waited = True
            time.sleep(_POLL_S)
            if (holder := self._holder()) and (reason := holder.pause_reason()):
                raise _NotShareableError(f"{holder} has locked {self._lock}, and {reason}")

    def _read(self) -> _SharedBlob:
        """Open the shared blob. Raises FileNotFoundError if it is missing or has a wrong size."""
        blob = _SharedBlob(self._directories, self._name)
        if blob.size == self._descriptor.size:
            return blob
        log.warn(f"{blob.path} has the wrong size: downloading it again")
        if not blob.reject():
            raise _NotShareableError
        raise FileNotFoundError

    def _take_lock(self) -> bool:
        """Try to lock the blob. Raises _NotShareableError if another user has the lock, or on a write error."""
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
                    raise _NotShareableError(f"{path} belongs to another user")
                # Compare two times of the file server, because the clocks of nodes differ. Because of abs(), a lock
                # with a time in the future expires, too.
                if abs(os.stat(self._own, dir_fd=tmp, follow_symlinks=False).st_mtime - lock.st_mtime) > _LOCK_EXPIRY_S:
                    holder = self._holder() or "another node"
                    log.warn(f"{holder} has not renewed its lock for {_LOCK_EXPIRY_S:.0f} s: taking over {self._lock}")
                    expired = self._own + ".expired"
                    os.rename(self._lock, expired, src_dir_fd=blobs, dst_dir_fd=tmp)
                    os.unlink(expired, dir_fd=tmp)
        except FileNotFoundError:
            return False  # another process was faster
        except OSError as e:
            raise _NotShareableError(f"cannot write {path}: {e.strerror}") from e
        return False

    @contextlib.contextmanager
    def _signature(self) -> Iterator[None]:
        """Create our file in ``tmp``. The file names this process and has the file server's time."""
        fd = self._directories.create(self._own)
        try:
            with open(fd, "wb") as f:  # fails if the disk is full
                f.write(self._me.dumps())
            yield
        finally:
            os.unlink(self._own, dir_fd=self._directories.tmp)

    def _holder(self) -> Holder | None:
        try:
            with Fd(_open_file(self._directories.blobs, self._lock)) as fd:
                return holders.loads(os.read(fd, holders.MAX_BYTES))
        except OSError:
            return None


class _SharedBlob:
    """A complete blob. Raises OSError if it is missing or not a regular file."""

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
        """Remove a blob that has a wrong digest or size. Return False if this user lacks the permission."""
        self._file.close()
        try:
            os.unlink(self._name, dir_fd=self._directories.blobs)
        except FileNotFoundError:
            return True
        except PermissionError:
            return False
        return True


class _Tee:
    """A blob that is read from its source and, as with tee(1), written to the shared directory."""

    def __init__(self, blob: Blob, directories: _Directories, temporary: str, name: str) -> None:
        self._blob = blob
        self._directories = directories
        self._temporary = temporary
        self._name = name
        self._renewed = time.monotonic()
        self._out = open(directories.create(temporary), "wb")  # noqa: SIM115 - closed by __exit__

    def __enter__(self) -> Self:
        self._blob.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        with self._directories:
            self._blob.__exit__(*error)
            self._close()
            # Each of the two files may be gone: publish() has moved the blob, another process has taken over the lock,
            # or the owner of the directory has moved both files.
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
                if time.monotonic() - self._renewed > _RENEWAL_S:
                    self._renewed = time.monotonic()
                    os.utime(self._name + ".lock", dir_fd=self._directories.blobs, follow_symlinks=False)
            except FileNotFoundError:
                log.debug(f"{self._name}: another process took over our lock")
            except OSError as e:
                self._give_up(e)
        return data

    def publish(self) -> None:
        """Share the blob after a successful check of its digest."""
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
        """Stop sharing after an error, such as a full disk, but continue the download."""
        log.warn(f"cannot share {self._directories.path}/sha256/{self._name} with other nodes: {error.strerror}")
        self._close()

    def _close(self) -> None:
        with contextlib.suppress(OSError):  # the final flush may fail; the file is removed anyway
            self._out.close()


def _short(descriptor: Descriptor) -> str:
    return f"{descriptor.digest[:19]}…"


def _beneath(path: str, readers: str) -> str:
    """Return ``path`` for everybody, or its subdirectory that only ``readers`` can read. Raises OSError."""
    if readers == "everybody":
        return path
    if readers == "user":
        private = trusted.mine(path, f"user-{os.geteuid()}")
        trusted.place(private, make=True)
        return private
    group = f"{path}/group-{os.getegid()}"
    trusted.place(path, closed_to=0)
    with contextlib.suppress(FileExistsError):
        os.mkdir(group, 0o700)
        os.chown(group, -1, os.getegid())
        os.chmod(group, 0o3770)
    status = os.lstat(group)
    if not stat.S_ISDIR(status.st_mode) or status.st_gid != os.getegid() or status.st_mode & 0o007:
        raise OSError(errno.EPERM, f"must be accessible to group {os.getegid()} only", group)
    return group


def _open_file(directory: int, name: str) -> int:
    """Open a regular file for reading, without blocking or following a link. Raises OSError."""
    fd = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | _OPEN_FLAGS, dir_fd=directory)
    return trusted.regular(fd, name)


def _exists(directory: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _make(directory: str, mode: int) -> None:
    """Make a directory with its final mode from the start, because other nodes use it at once. Raises OSError."""
    umask = os.umask(0)
    try:
        os.mkdir(directory, mode)
        trees.drop_acl(directory, mode)  # a default ACL from the parent would decide the modes of the blobs
        os.chmod(directory, mode)
    except FileExistsError:
        return
    finally:
        os.umask(umask)


def _sweep(directory: str, now: float) -> None:
    """Remove abandoned partial downloads. ``now`` is the file server's time."""
    for name in os.listdir(directory):
        with contextlib.suppress(OSError):
            if now - os.lstat(f"{directory}/{name}").st_mtime > _ABANDONED_S:
                os.unlink(f"{directory}/{name}")
