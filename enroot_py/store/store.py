"""The store: layers and images by digest, each either complete or absent. layout.py defines the paths.

A process builds a layer or an image in a temporary directory, holds flock(2) on this directory, and renames it into
place. So no lock file remains, and the kernel frees the lock of a killed process. Two shared locks prevent pruning:
an import locks the store's root, and a starting container locks its image until the mount is in /proc (Image.hold).

base/waits.py reports each long wait for a lock, and ends the wait if the holder makes no progress. crash.py detects new
files that a crash of the node truncated. Every container start imports this module, so it does not import json and re,
which are slow to import.
"""

from __future__ import annotations

import errno
import os
import time

from enroot_py.base import digests, locks, log, trees, trusted
from enroot_py.base.errors import ImageError
from enroot_py.base.fds import Fd
from enroot_py.base.locks import is_at
from enroot_py.registry.platforms import architecture
from enroot_py.store import crash, layout

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    _T = TypeVar("_T")

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_USE_RESOLUTION_S = 3600
_PROGRESS_INTERVAL_S = 5.0
_STALLED_S = 60.0
_SHORT_NAME_CHARS = 20  # shortened length of KIND/NAME in a message


class Image:
    """A stored image: its root file system is an overlay of ``lowerdirs``, top first, or the squashfs ``file``."""

    __slots__ = ("digest", "path", "lowerdirs", "file", "_lock")

    def __init__(self, digest: str, path: str, lowerdirs: tuple[str, ...], file: str = "") -> None:
        self.digest = digest
        self.path = path
        self.lowerdirs = lowerdirs
        self.file = file
        self._lock: Fd | None = None

    def hold(self) -> bool:
        """Protect the image from pruning. Return False if it was just pruned.

        The lock lasts until release(), exec or exit. By then the image's mount, or the record of its container,
        shows that the image is in use.
        """
        try:
            directory = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        with Fd(directory) as fd:
            _await(fd, f"removing or publishing {layout.name_of(self.path)[:_SHORT_NAME_CHARS]}", shared=True)
            _lease(self.path)
            if not is_at(fd, self.path):
                return False
            self.release()
            self._lock = fd.keep()
        _note_use(fd)
        return True

    def release(self) -> None:
        """Release the lock of hold()."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def flock(fd: int, *, shared: bool = False) -> bool:
    """Lock an open file. Return False if another process holds the lock. Raises ImageError if flock(2) fails."""
    return _with_lock_error(fd, lambda: locks.flock(fd, shared=shared))


def _await(fd: int, doing: str, *, shared: bool) -> None:
    """Wait for a lock. Raises ImageError if the holder makes no progress. ``doing`` is the work of the holder."""
    if flock(fd, shared=shared):
        return
    from enroot_py.base import waits

    if reason := _with_lock_error(fd, lambda: waits.lock(fd, doing, shared=shared)):
        raise ImageError(f"cannot lock {os.readlink(f'/proc/self/fd/{fd}')}: {reason}", hint=waits.HINT)


def _with_lock_error(fd: int, lock: Callable[[], _T]) -> _T:
    """Return the result of ``lock``. Raises ImageError if the file system of ``fd`` does not support locks."""
    try:
        return lock()
    except OSError as e:
        if e.errno not in locks.NO_LOCKS:
            raise
        path = os.readlink(f"/proc/self/fd/{fd}")
        raise ImageError(
            f"cannot lock {path}: {e.strerror}",
            hint="mount its file system with flock(2) (Lustre: -o flock), or set ENROOT_CACHE_PATH to another place",
        ) from e


def _lease(image: str) -> None:
    """Renew this node's lease on an image, because other nodes cannot see this node's locks and mounts."""
    try:
        lease = os.open(layout.lease(image, os.uname().nodename), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as e:
        if e.errno in (errno.ENOENT, errno.EACCES, errno.EROFS):
            return  # the store is local, or not writable by this user
        raise
    with Fd(lease) as fd:
        os.utime(fd)


def _note_use(fd: int) -> None:
    """Record the last use of an image, to the hour, as the time of its directory."""
    status = os.fstat(fd)
    if status.st_uid == os.geteuid() and time.time() - status.st_mtime > _USE_RESOLUTION_S:
        try:
            os.utime(fd)
        except OSError as e:
            if e.errno != errno.EROFS:
                raise


class Name:
    """The last known digest of a reference. Its file in refs has four lines, one for each attribute.

    ``digest`` is the digest of the manifest. ``resolved_digest`` is the digest that the registry returned for the name,
    perhaps of an index. ``base`` is the registry's URL: https://HOST or http://HOST. ``text`` is
    REFERENCE+ARCHITECTURE.
    """

    __slots__ = ("digest", "resolved_digest", "base", "text")

    def __init__(self, digest: str, resolved_digest: str = "", base: str = "", text: str = "") -> None:
        self.digest = digest
        self.resolved_digest = resolved_digest
        self.base = base
        self.text = text


class Store:
    """The store at ``root``, an absolute path. With ``create``, a missing store is made.

    Raises ImageError if the store belongs to a user other than root or the caller, or if others can write to it.
    """

    def __init__(self, root: str, *, create: bool = False) -> None:
        self.root = root
        self._owner = me = os.geteuid()
        try:
            status = trusted.place(root, make=create)
        except FileNotFoundError:
            return
        except OSError as e:
            raise _refused(root, e, create=create) from e
        self._owner = status.st_uid
        for directory in (root, f"{root}/{layout.REFS}"):
            if os.access(directory, os.R_OK | os.X_OK) or not os.path.isdir(directory):
                continue
            raise cannot_write(f"read the store {root}", root, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))
        if status.st_uid == me and status.st_mode & 0o077 and (me != 0 or create):
            os.chmod(root, 0o700)
        if create or not layout.is_readable(root):
            from enroot_py.store import format

            format.check(root, mark=create)
        if create:
            if not os.path.isdir(f"{root}/{layout.LAYERS}"):
                from enroot_py.base import filesystems

                if filesystems.kind(root) in filesystems.NETWORK:
                    _make_directory(f"{root}/{layout.LEASES}")
            for name in (layout.LAYERS, layout.IMAGES, layout.REFS, layout.USERS, layout.TMP):
                _make_directory(f"{root}/{name}")

    # -- reading

    def layer_path(self, diff_id: str) -> str | None:
        """Return the directory of a layer, or None if it is not stored."""
        path = layout.layer(self.root, diff_id)
        return path if crash.is_whole(path) else None

    def image(self, digest: str) -> Image | None:
        """Return the image with this manifest digest, or None if the image or one of its layers is not stored.

        Raises ImageError for trees of another owner, because overlayfs cannot copy up files of an unmapped owner.
        """
        path = layout.image(self.root, digest)
        if not crash.is_usable(path):
            return None
        try:
            lowerdirs = layout.lowerdirs(path)
        except FileNotFoundError:
            return Image(digest, path, (), f"{path}/{layout.SQUASHFS}")
        if not lowerdirs:
            return None
        if self._owner != os.geteuid():
            raise ImageError(
                f"the store {self.root} belongs to uid {self._owner}, and only its owner can use its trees",
                hint="set ENROOT_CACHE_PATH to your own directory, or let the owner of the store set "
                "ENROOT_STORE_FORM=squashfs",
            )
        for lowerdir in lowerdirs:
            # If the layer's directory is missing, a mount may succeed and show an empty layer.
            if not os.path.isdir(lowerdir):
                return None
        return Image(digest, path, lowerdirs)

    def known(self, reference: object, arch: str | None = None) -> Name | None:
        """Return the last known digest of a reference, or None, without asking a registry."""
        return _read_name(layout.ref(self.root, _text(reference, arch)))

    def names(self) -> list[Name]:
        """Return the last known digest of every reference."""
        return [known for path in layout.refs(self.root) if (known := _read_name(path)) is not None]

    # -- writing

    def name(self, reference: object, arch: str | None, known: Name) -> None:
        """Remember the digest of a reference."""
        from enroot_py.base import making

        text = _text(reference, arch)
        path = layout.ref(self.root, text)
        try:
            making.write(path, os.fsencode(f"{known.digest}\n{known.resolved_digest}\n{known.base}\n{text}\n"))
        except OSError as e:
            raise cannot_write(f"write {path}", self.root, e) from e

    def forget(self, known: Name) -> None:
        """Remove the file of a name."""
        try:
            os.unlink(layout.ref(self.root, known.text))
        except FileNotFoundError:
            return

    def note_container(self, record: str) -> None:
        """Make a link in the store to the record of a container that will use an image of the store.

        A store that this user cannot write to gets no link. Its owner should prune old images only (--older).
        """
        link = layout.user(self.root, record)
        try:
            os.makedirs(os.path.dirname(link), 0o700, exist_ok=True)
            if os.path.lexists(link):
                os.utime(link, follow_symlinks=False)
            else:
                os.symlink(record, link)
        except OSError as e:
            if e.errno in (errno.EACCES, errno.EROFS, errno.EEXIST):
                return
            raise cannot_write(f"write {os.path.dirname(link)}", self.root, e) from e

    def lock(self, *, exclusive: bool = False, wait: bool = True) -> Fd:
        """Lock the store, for a ``with``: shared for imports, exclusive for pruning.

        Raises BlockingIOError if the lock is held and ``wait`` is False, ImageError if its holder makes no progress.
        """
        with Fd(os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as fd:
            if wait:
                doing = f"importing into the store {self.root}" if exclusive else f"pruning the store {self.root}"
                _await(fd, doing, shared=not exclusive)
            elif not flock(fd, shared=not exclusive):
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN), self.root)
            return fd.keep()

    def build(self, kind: str, digest: str) -> Build:
        """Return the Build of a layer or an image. ``kind`` is layout.LAYERS or layout.IMAGES."""
        return Build(self.root, kind, digest)

    def add_file(self, path: str, digest: str, make: Callable[[Build], None]) -> None:
        """Add an image for the squashfs file ``path``. ``make`` fills and publishes a Build.

        Raises ImageError, OSError.
        """
        self.sweep()
        with self.lock():
            with self.build(layout.IMAGES, digest) as build:
                make(build)
            if os.geteuid() == 0:  # other users of the store cannot mark the image as checked: crash.py
                self.settle(digest)
            self.name(path, None, Name(digest))

    def settle(self, digest: str) -> None:
        """Write the store to the disk and mark an image as checked: crash.settle(). Raises ImageError."""
        try:
            crash.settle(layout.image(self.root, digest))
        except OSError as e:
            raise cannot_write(f"write to the store {self.root}", self.root, e) from e

    def sweep(self) -> None:
        """Remove the temporary directories of killed processes."""
        tmp = f"{self.root}/{layout.TMP}"
        if not os.access(tmp, os.R_OK | os.W_OK):
            return  # a shared store of another user
        for name in os.listdir(tmp):
            path = f"{tmp}/{name}"
            try:
                directory = os.open(path, _DIRECTORY)
            except (FileNotFoundError, NotADirectoryError):
                continue
            with Fd(directory) as fd:
                if flock(fd) and is_at(fd, path):  # the process that made it has ended
                    trees.remove(path)


class Build:
    """One new layer or image, in a ``with``.

    Entering waits for another process that makes the same layer or image. If the other process is stopped or makes no
    progress, this process makes a second copy: the first published copy wins. After entering, ``done`` is True if the
    directory already exists. Otherwise fill ``path`` and publish(). Leaving without publish() removes ``path``.
    """

    def __init__(self, root: str, kind: str, digest: str) -> None:
        self._root = root
        self.target = f"{root}/{kind}/{digests.encoded(digest)}"
        self.path = layout.making(self.target)
        self.done = False
        self._fd: Fd | None = None
        self._progress_at = 0.0

    def __enter__(self) -> Build:
        while True:
            if crash.is_whole(self.target):
                self.done = True
                return self
            try:
                trees.make(self.path, 0o700)
            except FileExistsError:
                pass
            except OSError as e:
                raise cannot_write(f"write to the store {self._root}", self._root, e) from e
            try:
                directory = os.open(self.path, _DIRECTORY)
            except FileNotFoundError:
                continue
            with Fd(directory) as fd:
                if not flock(fd):
                    self._await_maker(fd)
                elif is_at(fd, self.path) and self._is_ours():
                    self._fd = fd.keep()
                    return self

    def _await_maker(self, fd: int) -> None:
        """Wait for the process that makes this directory. If it makes no progress, switch to a private ``path``."""
        from enroot_py.base import waits

        name = layout.name_of(self.target)[:_SHORT_NAME_CHARS]
        # Wait for a shared lock only: after publish(), containers of the image hold shared locks on this directory.
        doing = f"making {name}"
        if reason := _with_lock_error(fd, lambda: waits.lock(fd, doing, shared=True, stalled_after=_STALLED_S)):
            log.warn(f"{reason}: making a copy")
            self.path = layout.making_alone(self.target)

    def _is_ours(self) -> bool:
        """Return whether this process, the holder of the lock, must fill ``path``."""
        _empty(self.path)
        if os.path.isdir(self.target):
            if not crash.is_whole(self.target):  # if whole, another process has just published it
                try:
                    crash.keep_or_drop(self.target, f"{self.path}/damaged")
                except FileNotFoundError:
                    pass  # another process has removed it meanwhile
            if crash.is_whole(self.target):
                trees.remove(self.path)
                return False
            _empty(self.path)
        return True

    def clear(self) -> None:
        """Delete the files that were written so far."""
        _empty(self.path)

    def go_on(self) -> None:
        """Show progress to waiting processes by updating the time of ``path``."""
        now = time.monotonic()
        if self._fd is not None and now - self._progress_at > _PROGRESS_INTERVAL_S:
            self._progress_at = now
            try:
                os.utime(self._fd)
            except OSError:
                return  # the next call tries again

    def publish(self) -> None:
        """Rename the directory into place."""
        try:
            crash.mark(self.path)
            os.rename(self.path, self.target)
        except OSError as e:
            if e.errno not in (errno.ENOTEMPTY, errno.EEXIST) or not crash.is_whole(self.target):
                raise cannot_write(f"publish {self.target}", self._root, e) from e
            trees.remove(self.path)  # another process published it first
        if self._fd is not None:
            # Share the lock: users of the image must not wait for this process if it is stopped.
            flock(self._fd, shared=True)
        self.done = True

    def __exit__(self, *_: object) -> None:
        if self._fd is None:
            return
        with self._fd:
            if not self.done:
                trees.remove(self.path)


def _empty(path: str) -> None:
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                trees.remove(entry.path)
            else:
                os.unlink(entry.path)


def _text(reference: object, arch: str | None) -> str:
    """Return the name under which a reference is stored for an architecture."""
    return f"{reference}+{architecture(arch)}"


def _read_name(path: str) -> Name | None:
    """Read a file of refs. Return None if it is missing, or empty after a crash."""
    try:
        with open(path, "rb") as f:
            lines = os.fsdecode(f.read()).split("\n")
    except FileNotFoundError:
        return None
    return Name(*lines[:4]) if digests.is_digest(lines[0]) else None


def _refused(root: str, error: OSError, *, create: bool) -> ImageError:
    """Return the error for a store whose root is missing or not trusted."""
    if error.errno != errno.EPERM or not error.strerror:
        return cannot_write(f"{'create' if create else 'read'} the store {root}", root, error)
    hint = "set ENROOT_CACHE_PATH to a directory of your own"
    if error.strerror.startswith("can be written"):
        hint = f"if no other user has changed it: chmod 700 {root}; else {hint}"
        return ImageError(f"the store {root} {error.strerror}", hint=hint)
    return ImageError(f"the store {root} {error.strerror}: its images are not trusted", hint=hint)


def _make_directory(path: str) -> None:
    if os.path.isdir(path):
        return
    try:
        trees.make(path, 0o700)
    except FileExistsError:
        return  # another process was quicker
    except OSError as e:
        raise cannot_write(f"create the store {path}", path, e) from e


def cannot_write(action: str, path: str, error: OSError) -> ImageError:
    """Return the error "cannot ``action``". Its hint says what to do about ``path``, a store or a path in a store."""
    from enroot_py.base import filesystems

    return ImageError(f"cannot {action}: {error.strerror}", hint=filesystems.hint_for(error, path, "ENROOT_CACHE_PATH"))
