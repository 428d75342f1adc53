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
import socket
import stat
import time

from enroot_py.base import digests, linux, log, trusted
from enroot_py.base.errors import ImageError
from enroot_py.registry.manifests import Descriptor
from enroot_py.registry.sources import Blob, Source

_EXPIRY = 60.0  # seconds without a sign of life, after which a lock is nobody's
_SIGN = 5.0  # seconds between signs of life
_POLL = 0.2
_ABANDONED = 86400.0  # seconds after which nobody writes any more to what is being fetched
_OPEN = os.O_NOFOLLOW | os.O_CLOEXEC
_LONGEST = 4096  # bytes of a lock that are read


class Shared:
    """The directory ``path``, which is made where it is missing, for ``readers``: everybody, a group or a user.

    Whatever another user has made or left there costs a warning and a fetch of one's own, but no wait.
    Raises ImageError where there is no such directory.
    """

    def __init__(self, path: str, readers: str = "everybody") -> None:
        self.path = path
        self._readers = readers
        self._fds: list[int] = []
        self._own = f"{socket.gethostname()}.{linux.boot_id()[:8]}.{os.getpid()}.{time.monotonic_ns()}"
        try:
            os.makedirs(path, exist_ok=True)
            os.stat(path)
        except OSError as e:
            raise ImageError(
                f"cannot use the shared blobs in {path}: {e.strerror}", hint="see ENROOT_SHARED_BLOBS"
            ) from e
        self._unusable: OSError | None = None
        try:
            self._open()
        except OSError as e:
            self._unusable = e

    def blob(self, source: Source, descriptor: Descriptor) -> Found | Kept | Blob:
        """The blob from here, or from ``source`` and then kept here when it is published.

        From ``source`` alone where what is here is another user's, and of no use.
        """
        found: Found | Kept | None = None
        try:
            if self._unusable is not None:
                raise self._unusable
            found = self._blob(source, descriptor)
        except PermissionError as e:
            log.warn(f"{e.filename} is another user's, who keeps it to himself: fetching {_for_this_node(descriptor)}")
        except OSError as e:
            log.warn(f"{e.filename or self.path}: {e.strerror}: fetching {_for_this_node(descriptor)}")
        finally:
            if found is None:
                self.close()
        return found or source.blob(descriptor)

    def _open(self) -> None:
        """Open the directories of the blobs, but follow no link to one. Raises OSError."""
        self.path = _beneath(self.path, self._readers)
        mode = os.stat(self.path).st_mode & 0o3777  # for whom the site made it, whatever our umask
        for directory in ("sha256", "tmp"):
            _make(f"{self.path}/{directory}", mode)
            try:
                self._fds.append(os.open(f"{self.path}/{directory}", os.O_PATH | os.O_DIRECTORY | _OPEN))
            except OSError as e:
                raise OSError(e.errno, e.strerror, f"{self.path}/{directory}") from e

    @property
    def blobs(self) -> int:
        return self._fds[0]

    @property
    def tmp(self) -> int:
        return self._fds[1]

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.pop())

    def _blob(self, source: Source, descriptor: Descriptor) -> Found | Kept | None:
        name = digests.encoded(descriptor.digest)
        file = f"{self.path}/sha256/{name}"
        waited = False
        while True:
            try:
                found = Found(self, name)
                if found.size == descriptor.size:
                    return found
                log.warn(f"{file} has not the size that it should have: fetching it again")
                if not found.reject():
                    return None
            except FileNotFoundError:
                ours = self._lock(name + ".lock", descriptor)
                if ours is None:
                    return None
                if ours:
                    if not _exists(self.blobs, name):
                        return self._kept(source, descriptor, name)
                    os.unlink(name + ".lock", dir_fd=self.blobs)  # who had it was done between our two looks
                    continue
                if not waited:
                    log.info(f"waiting for {self._holder(name + '.lock')}, who fetches {descriptor.digest[:19]}…")
                    waited = True
                time.sleep(_POLL)

    def _kept(self, source: Source, descriptor: Descriptor, name: str) -> Kept:
        try:
            return Kept(source.blob(descriptor), self, self._own, name)
        except BaseException:
            os.unlink(name + ".lock", dir_fd=self.blobs)  # so that nobody waits for us
            raise

    def _lock(self, lock: str, descriptor: Descriptor) -> bool | None:
        """Whether the lock is ours now; None where it cannot be: it is another user's, or there is no room."""
        path = f"{self.path}/sha256/{lock}"
        try:
            with open(self.create(self._own), "w") as f:
                f.write(f"{socket.gethostname()} {linux.boot_id()[:8]} {os.getpid()}\n")
            try:
                os.link(self._own, lock, src_dir_fd=self.tmp, dst_dir_fd=self.blobs, follow_symlinks=False)
                return True
            except FileExistsError:
                held = os.stat(lock, dir_fd=self.blobs, follow_symlinks=False)
                if held.st_uid != os.geteuid():
                    log.warn(f"{path} is another user's: fetching {_for_this_node(descriptor)}")
                    return None
                # Both times are the file server's: the clocks of nodes differ. One from the future never comes.
                now = os.stat(self._own, dir_fd=self.tmp, follow_symlinks=False)
                if abs(now.st_mtime - held.st_mtime) > _EXPIRY:
                    log.warn(f"{self._holder(lock)} has given no sign of life: taking over {lock}")
                    expired = self._own + ".expired"
                    os.rename(lock, expired, src_dir_fd=self.blobs, dst_dir_fd=self.tmp)
                    os.unlink(expired, dir_fd=self.tmp)
            finally:
                os.unlink(self._own, dir_fd=self.tmp)
        except FileNotFoundError:
            return False  # somebody else was quicker
        except OSError as e:
            log.warn(f"cannot write {path}: {e.strerror}: fetching {_for_this_node(descriptor)}")
            return None
        return False

    def create(self, name: str) -> int:
        """A new file in ``tmp``. Raises OSError."""
        return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _OPEN, 0o666, dir_fd=self.tmp)

    def _holder(self, lock: str) -> str:
        try:
            with open(_open_file(self.blobs, lock)) as f:
                host, _, pid = f.read(_LONGEST).split()
        except (OSError, ValueError):
            return "another node"
        return f"process {pid} on {host}"


class Found:
    """A blob that another node has fetched. Raises OSError where it is not there, or no file."""

    def __init__(self, shared: Shared, name: str) -> None:
        self.path = f"{shared.path}/sha256/{name}"
        self._shared = shared
        self._name = name
        try:
            fd = _open_file(shared.blobs, name)
        except OSError as e:
            raise OSError(e.errno, e.strerror, self.path) from e
        self._file = open(fd, "rb", buffering=0)  # noqa: SIM115 - closed by __exit__
        self.size = os.fstat(fd).st_size

    def __enter__(self) -> Found:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._shared.close()

    def read(self, size: int, /) -> bytes:
        return self._file.read(size)

    def reject(self) -> bool:
        """It is not what its name says: nobody shall read it again. False where it is another user's to remove."""
        self._file.close()
        try:
            os.unlink(self._name, dir_fd=self._shared.blobs)
        except FileNotFoundError:
            return True
        except PermissionError:
            return False
        return True


class Kept:
    """A blob on its way to whoever reads it, and to the shared directory."""

    def __init__(self, blob: Blob, shared: Shared, temporary: str, name: str) -> None:
        self._blob = blob
        self._shared = shared
        self._temporary = temporary
        self._name = name
        self._sign = time.monotonic()
        self._out = open(shared.create(temporary), "wb")  # noqa: SIM115 - closed by __exit__

    def __enter__(self) -> Kept:
        self._blob.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._blob.__exit__(*error)
        self._close()
        for name, directory in ((self._temporary, self._shared.tmp), (self._name + ".lock", self._shared.blobs)):
            try:
                os.unlink(name, dir_fd=directory)
            except (FileNotFoundError, PermissionError):
                continue  # published, taken over, or moved away by the owner of the directory
        self._shared.close()

    def read(self, size: int, /) -> bytes:
        data = self._blob.read(size)
        if not self._out.closed:
            try:
                self._out.write(data)
                if time.monotonic() - self._sign > _SIGN:
                    self._sign = time.monotonic()
                    os.utime(self._name + ".lock", dir_fd=self._shared.blobs, follow_symlinks=False)
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
            directories = {"src_dir_fd": self._shared.tmp, "dst_dir_fd": self._shared.blobs}
            os.rename(self._temporary, self._name, **directories)
            _sweep(f"{self._shared.path}/tmp", now)
        except OSError as e:
            self._give_up(e)

    def _give_up(self, error: OSError) -> None:
        """A full disk for what nodes share is no reason to fail: this node has what it needs."""
        log.warn(f"cannot keep {self._shared.path}/sha256/{self._name} for other nodes: {error.strerror}")
        self._close()

    def _close(self) -> None:
        with contextlib.suppress(OSError):  # of what is still to be written: it goes anyway
            self._out.close()


def _for_this_node(descriptor: Descriptor) -> str:
    return f"{descriptor.digest[:19]}… for this node alone"


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
    found = os.lstat(group)
    if not stat.S_ISDIR(found.st_mode) or found.st_gid != os.getegid() or found.st_mode & 0o007:
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
        os.chmod(directory, mode)  # where the parent has a default ACL
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
