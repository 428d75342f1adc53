"""One directory of compressed blobs that nodes share: one fetches a blob, the others read it.

``sha256/HEX`` is a whole blob, ``sha256/HEX.lock`` says who fetches it, ``tmp`` holds what
is being fetched. Locks are made with link(2) and judged by the file server's clock alone,
so they work on NFS and Lustre without flock(2): link(2), open(2) O_EXCL on NFS. A lock that
its maker has not renewed has expired. Two who take over an expired lock at once both
fetch, which costs time and nothing else: a blob appears by rename, whole, and whoever
reads one checks its digest.
"""

import contextlib
import errno
import os
import socket
import time

from enroot_py import log
from enroot_py.errors import ImageError
from enroot_py.manifests import Descriptor
from enroot_py.sources import Blob, Source

_EXPIRY = 60.0  # seconds without a sign of life, after which a lock is nobody's
_SIGN = 5.0  # seconds between signs of life
_POLL = 0.2
_ABANDONED = 86400.0  # seconds after which nobody writes any more to what is being fetched
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


class Shared:
    """The directory ``path``, which is made where it is missing. Raises ImageError."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            os.makedirs(path, exist_ok=True)
            mode = os.stat(path).st_mode & 0o1777  # for whom the site made it, whatever our umask
            for directory in (f"{path}/sha256", f"{path}/tmp"):
                _make(directory, mode)
        except OSError as e:
            raise ImageError(
                f"cannot use the shared blobs in {path}: {e.strerror}", hint="see ENROOT_SHARED_BLOBS"
            ) from e
        self._own = f"{path}/tmp/{socket.gethostname()}.{_boot_id()}.{os.getpid()}.{time.monotonic_ns()}"

    def blob(self, source: Source, descriptor: Descriptor) -> "Found | Kept | Blob":
        """The blob from here, or from ``source`` and then kept here when it is published.

        From ``source`` alone where what is here is another user's, and of no use.
        """
        file = f"{self.path}/sha256/{descriptor.digest.partition(':')[2]}"
        waited = False
        while True:
            try:
                found = Found(file)
                if found.size == descriptor.size:
                    return found
                log.warn(f"{file} has not the size that it should have: fetching it again")
                if not found.reject():
                    return source.blob(descriptor)
            except PermissionError:
                log.warn(f"{file} is another user's, who keeps it to himself: fetching it for this node alone")
                return source.blob(descriptor)
            except FileNotFoundError:
                ours = self._lock(file + ".lock")
                if ours is None:
                    return source.blob(descriptor)
                if ours:
                    if not os.path.exists(file):
                        return Kept(source.blob(descriptor), self._own, file)
                    os.unlink(file + ".lock")  # who had it was done between our two looks
                    continue
                if not waited:
                    log.info(f"waiting for {_holder(file + '.lock')}, who fetches {descriptor.digest[:19]}…")
                    waited = True
                time.sleep(_POLL)
            except OSError as e:
                raise ImageError(f"cannot read {file}: {e.strerror}", hint="see ENROOT_SHARED_BLOBS") from e

    def _lock(self, lock: str) -> bool | None:
        """Whether the lock is ours now; None where it cannot be: it is another user's, or there is no room."""
        try:
            with open(self._own, "w") as f:
                f.write(f"{socket.gethostname()} {_boot_id()} {os.getpid()}\n")
            try:
                os.link(self._own, lock)
                return True
            except FileExistsError:
                # Both times are the file server's: the clocks of nodes differ.
                if os.stat(self._own).st_mtime - os.stat(lock).st_mtime > _EXPIRY:
                    log.warn(f"{_holder(lock)} has given no sign of life: taking over {os.path.basename(lock)}")
                    os.rename(lock, self._own + ".expired")
                    os.unlink(self._own + ".expired")
            finally:
                os.unlink(self._own)
        except FileNotFoundError:
            return False  # somebody else was quicker
        except PermissionError:
            if os.path.exists(lock):  # in a directory with the sticky bit
                log.warn(f"{lock} is another user's: fetching its blob for this node alone")
                return None
            raise ImageError(f"cannot write {lock}: it is closed to us", hint="see ENROOT_SHARED_BLOBS") from None
        except OSError as e:
            if e.errno in _FULL:
                log.warn(f"cannot write {lock}: {e.strerror}: fetching its blob for this node alone")
                return None
            raise ImageError(f"cannot write {lock}: {e.strerror}", hint="see ENROOT_SHARED_BLOBS") from e
        return False


class Found:
    """A blob that another node has fetched. Raises OSError where it is not there."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed by __exit__
        self.size = os.fstat(self._file.fileno()).st_size

    def __enter__(self) -> "Found":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, size: int, /) -> bytes:
        return self._file.read(size)

    def reject(self) -> bool:
        """It is not what its name says: nobody shall read it again. False where it is another user's to remove."""
        self._file.close()
        try:
            os.unlink(self.path)
        except FileNotFoundError:
            return True
        except PermissionError:
            return False
        return True


class Kept:
    """A blob on its way to whoever reads it, and to the shared directory."""

    def __init__(self, blob: Blob, temporary: str, file: str) -> None:
        self._blob = blob
        self._temporary = temporary
        self._file = file
        self._sign = time.monotonic()
        self._out = open(temporary, "wb")  # noqa: SIM115 - closed by __exit__

    def __enter__(self) -> "Kept":
        self._blob.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._blob.__exit__(*error)
        self._close()
        for path in (self._temporary, self._file + ".lock"):
            try:
                os.unlink(path)
            except FileNotFoundError:
                continue  # published, or taken over

    def read(self, size: int, /) -> bytes:
        data = self._blob.read(size)
        if not self._out.closed:
            try:
                self._out.write(data)
                if time.monotonic() - self._sign > _SIGN:
                    self._sign = time.monotonic()
                    os.utime(self._file + ".lock")
            except FileNotFoundError:
                log.debug(f"{self._file}: our lock was taken over")
            except OSError as e:
                self._give_up(e)
        return data

    def publish(self) -> None:
        """Its digest was right: let the others have it."""
        if self._out.closed:
            return
        try:
            self._out.flush()
            os.fsync(self._out.fileno())
            os.rename(self._temporary, self._file)
            _sweep(os.path.dirname(self._temporary), os.stat(self._file).st_mtime)
        except OSError as e:
            self._give_up(e)

    def _give_up(self, error: OSError) -> None:
        """A full disk for what nodes share is no reason to fail: this node has what it needs."""
        log.warn(f"cannot keep {self._file} for other nodes: {error.strerror}")
        self._close()

    def _close(self) -> None:
        with contextlib.suppress(OSError):  # of what is still to be written: it goes anyway
            self._out.close()


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
        with contextlib.suppress(FileNotFoundError, PermissionError):
            if now - os.stat(f"{directory}/{name}").st_mtime > _ABANDONED:
                os.unlink(f"{directory}/{name}")


def _holder(lock: str) -> str:
    try:
        with open(lock) as f:
            host, _, pid = f.read().split()
    except (OSError, ValueError):
        return "another node"
    return f"process {pid} on {host}"


def _boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id") as f:
        return f.read(8)
