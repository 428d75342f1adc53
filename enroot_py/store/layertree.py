"""Unpack a layer's tar stream into a tree that overlayfs can use as a lower directory.

One pass hashes the blob, decompresses it (by magic bytes), hashes the tar and writes the files. It needs neither root
nor a user namespace. Source: OCI image specification, "Image Layer Filesystem Changeset".

The tree never holds anything that acts on the host: no set-uid, set-gid or sticky bit, no device except whiteouts, no
extended attribute except ``user.*``. The index records what the tree cannot hold.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

from enroot_py.base import filesystems, log, trees
from enroot_py.base.compression import Stream
from enroot_py.base.errors import ImageError
from enroot_py.base.fds import Fd
from enroot_py.store import index
from enroot_py.store.hardlinks import HardLinks
from enroot_py.store.layout import MAX_DIRECTORY_DEPTH, TREE
from enroot_py.store.overlayfs import MAX_SYMLINKS, is_plain, is_whiteout, make_whiteout, set_opaque
from enroot_py.store.tar import Entry, Tar, shown

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_FILE_BYTES = (1 << 63) - 1  # off_t
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_OPEN_DIRECTORIES = 64
# Mode bits that the owner needs to read a file, by the kind of entry.
_REQUIRED_MODE = {b"5": 0o700, b"0": 0o400, b"6": 0o600}
_WHITEOUT = b".wh."
_OPAQUE = b".wh..wh..opq"


@dataclass(frozen=True, slots=True)
class Layer:
    """The result of unpacking a layer. Digests are ``sha256:HEX``, sizes are in bytes."""

    diff_id: str
    blob_digest: str
    size: int
    tar_size: int
    entries: int
    opaque: bool


def unpack(stream: Stream, directory: str, *, progress: Callable[[int], None] | None = None) -> Layer:
    """Unpack a layer into ``directory``/fs, and write index and sums (index.py) beside it.

    ``progress`` gets the number of compressed bytes read so far. The caller compares the digests, and removes
    ``directory`` if the digests are wrong or unpack() fails. Raises ImageError for a damaged or hostile layer, and if
    the layer cannot be stored.
    """
    path = b""
    umask = os.umask(0)  # new files get their final mode at once
    try:
        os.mkdir(f"{directory}/{TREE}", 0o755)
        with Tree(f"{directory}/{TREE}") as tree, Tar(stream, progress) as tar:
            for entry in tar.entries():
                path = entry.path
                tree.add(entry, tar)
            path = b""
            tree.finish()
            tar.drain()
    except OSError as e:
        _cannot_store(e, path, directory)
    finally:
        os.umask(umask)
    result = Layer(tar.diff_id(), tar.blob_digest(), tar.blob_size, tar.size, tree.count, tree.opaque)
    try:
        index.write(directory, tree.index(result), tree.sums)
    except OSError as e:
        _cannot_store(e, b"", directory)
    return result


def _cannot_store(error: OSError, path: bytes, directory: str) -> NoReturn:
    subject = f" {shown(path)}" if path else ""
    parent = os.path.dirname(directory)  # the directory itself has a temporary name
    hint = filesystems.hint_for(error, parent, "ENROOT_CACHE_PATH")
    if error.errno in (errno.EPERM, errno.EOPNOTSUPP):
        from enroot_py.runtime import pods

        hint = f"{parent}: this file system cannot hold whiteouts or user.* attributes; set ENROOT_CACHE_PATH"
        if pods.is_on_overlay(parent):
            hint = f"{parent} {pods.ON_OVERLAY}, and cannot hold whiteouts: {pods.volume('ENROOT_CACHE_PATH')}"
    elif path and error.errno in (errno.ENOENT, errno.ENOTDIR):
        hint = "the image is damaged"
    raise ImageError(f"cannot store{subject or ' the layer'} in {parent}: {error.strerror}", hint=hint) from error


class Tree:
    """A layer's tree, for a ``with``. Paths are resolved by descriptor, one component at a time, beneath ``root``.

    Symlinks in a parent path are followed as after chroot(2), so they never lead out of the layer. Paths have no
    "." or "..", and no slash at either end: see _normal().
    """

    def __init__(self, root: str) -> None:
        self._root = os.open(root, _DIRECTORY)
        self._open: dict[bytes, int] = {}  # descriptors of directories, by path
        self._times: dict[bytes, int] = {}
        self._implicit: dict[bytes, None] = {}
        self._records: dict[bytes, list[str]] = {}
        self.sums: dict[int, bytes] = {}  # index.file_sum() of files, by inode
        self._links = HardLinks(self.sums)
        self.opaque = False
        self.count = 0

    def __enter__(self) -> Tree:
        os.fchmod(self._root, 0o755)
        return self

    def __exit__(self, *_: object) -> None:
        self._forget()
        self._links.close()
        os.close(self._root)

    def _forget(self, but: int = -1) -> None:
        """Close all open directories except the descriptor ``but``: their paths may lead to other directories now."""
        for path, fd in list(self._open.items()):
            if fd != but:
                os.close(fd)
                del self._open[path]

    def add(self, entry: Entry, data: Tar) -> None:
        """Add one entry to the tree. Raises ImageError for an invalid entry, and OSError."""
        path = _normal(entry.path)
        if path.startswith(b"dev/"):
            return  # the runtime provides /dev
        self.count += 1
        if not path:
            if entry.kind == b"5":
                self._times[path] = entry.mtime
            return
        above, _, name = path.rpartition(b"/")
        parent = self._open.get(above, -1)
        if parent < 0:
            parent = self._directory(above, entry.mtime)
        if name.startswith(_WHITEOUT):
            self._whiteout(parent, path, name, entry.mtime)
            return
        if entry.kind == b"0":
            self._make_file(parent, name, entry, data)
        elif entry.kind == b"5":
            self._make_directory(parent, path, name, entry)
        elif entry.kind == b"1":
            self._make_link(parent, path, name, entry)
            return
        elif entry.kind == b"2":
            self._make_symlink(parent, name, entry)
        elif entry.kind == b"6":
            self._remove(parent, name)
            os.mkfifo(name, 0o600, dir_fd=parent)
            os.chmod(name, entry.mode & 0o777 | 0o600, dir_fd=parent)
            os.utime(name, ns=(entry.mtime, entry.mtime), dir_fd=parent, follow_symlinks=False)
        elif entry.kind in (b"3", b"4"):
            self._remove(parent, name)
            make_whiteout(parent, name, entry.mtime)  # make no device, but hide a file of a lower layer
        else:
            raise ImageError(f"{shown(entry.path)}: unknown tar entry type {entry.kind!r}")
        self._record(path, entry)

    def finish(self) -> None:
        """Set the times of directories again, because later entries changed them."""
        for path, mtime in sorted(self._times.items(), reverse=True):
            try:
                os.utime(self._directory(path, None), ns=(mtime, mtime))
            except (FileNotFoundError, NotADirectoryError, ImageError):
                continue  # a later entry replaced the directory

    def index(self, layer: Layer) -> Iterator[bytes]:
        """Yield the lines of the index."""
        yield index.layer_line(layer.diff_id, layer.tar_size, layer.entries)
        if layer.opaque:
            yield b"opaque\n"
        for path in self._implicit:
            yield index.record_line("implicit", path)
        for path, records in self._records.items():
            for record in records:
                yield index.record_line(record, path)

    # -- directories

    def _directory(self, path: bytes, mtime: int | None) -> int:
        """Return an open directory, which the caller must not close. With ``mtime``, make missing directories."""
        if not path:
            return self._root
        fd = self._open.get(path)
        if fd is None:
            fd = self._enter(path, mtime)
            self._keep(path, fd)
        return fd

    def _enter(self, path: bytes, mtime: int | None) -> int:
        above, _, name = path.rpartition(b"/")
        try:
            return os.open(name, _DIRECTORY, dir_fd=self._directory(above, mtime))
        except (FileNotFoundError, NotADirectoryError):
            return self._walk(path.split(b"/"), mtime)  # a component is missing or a symlink

    def _keep(self, path: bytes, fd: int) -> None:
        """Keep a directory open. This may close the oldest open directory: use only ``fd`` after this call."""
        if len(self._open) >= _MAX_OPEN_DIRECTORIES:
            os.close(self._open.pop(next(iter(self._open))))
        self._open[path] = fd

    def _walk(self, parts: Sequence[bytes], mtime: int | None) -> Fd:
        """Open a directory. With ``mtime``, make missing directories. Raises ImageError and OSError."""
        pending = [*reversed(parts)]
        links = 0
        with _Walk(self._root) as walk:
            while pending:
                name = pending.pop()
                if name == b"..":
                    walk.up()
                elif name not in (b"", b"."):
                    target = self._step(walk, name, mtime)
                    if target is not None:
                        links += 1
                        if links > MAX_SYMLINKS:
                            raise ImageError(f"too many symlinks in {shown(b'/'.join(parts))}")
                        if target.startswith(b"/"):
                            walk.to_root()
                        pending.extend(reversed(target.split(b"/")))
                    if len(walk.names) >= MAX_DIRECTORY_DEPTH or len(pending) > 8 * MAX_DIRECTORY_DEPTH:
                        raise ImageError(f"a path in the layer has more than {MAX_DIRECTORY_DEPTH} directories")
            return walk.end()

    def _step(self, walk: _Walk, name: bytes, mtime: int | None) -> bytes | None:
        """Enter a directory and return None. For a symlink, return its target. ``mtime``: see _directory()."""
        try:
            fd = Fd(os.open(name, _DIRECTORY, dir_fd=walk.directory))
        except FileNotFoundError:
            if mtime is None:
                raise
            fd = self._imply(walk, name, mtime)
        except NotADirectoryError:
            status = os.stat(name, dir_fd=walk.directory, follow_symlinks=False)
            if stat.S_ISLNK(status.st_mode):
                return os.readlink(name, dir_fd=walk.directory)
            if not is_whiteout(status) or mtime is None:
                raise
            os.unlink(name, dir_fd=walk.directory)
            fd = self._imply(walk, name, mtime)
            set_opaque(fd)
        walk.down(name, fd)
        return None

    def _imply(self, walk: _Walk, name: bytes, mtime: int) -> Fd:
        """Make a directory that is not in the tar. Raises OSError."""
        os.mkdir(name, 0o755, dir_fd=walk.directory)
        path = b"/".join((*walk.names, name))
        self._times.setdefault(path, mtime)
        self._implicit[path] = None
        with Fd(os.open(name, _DIRECTORY, dir_fd=walk.directory)) as fd:
            os.fchmod(fd, 0o755)  # a default ACL or a set-gid parent may have changed the mode
            return fd.keep()

    # -- entries

    def _make_directory(self, parent: int, path: bytes, name: bytes, entry: Entry) -> None:
        was_whiteout = False
        try:
            os.mkdir(name, 0o700, dir_fd=parent)
        except FileExistsError:
            status = _lstat(parent, name)
            if status is None or not stat.S_ISDIR(status.st_mode):
                was_whiteout = status is not None and is_whiteout(status)
                self._remove(parent, name)
                os.mkdir(name, 0o700, dir_fd=parent)
        with Fd(os.open(name, _DIRECTORY, dir_fd=parent)) as fd:
            if was_whiteout:  # the layer removed and recreated the directory: hide its content in lower layers
                set_opaque(fd)
            os.fchmod(fd, entry.mode & 0o777 | 0o700)
            if entry.pax:
                self._set_xattrs(fd, entry)
            self._times[path] = entry.mtime
            self._implicit.pop(path, None)
            if path not in self._open:
                self._keep(path, fd.keep())  # most of the time, the next entry is in this directory

    def _make_file(self, parent: int, name: bytes, entry: Entry, data: Tar) -> None:
        if not 0 <= entry.size <= _MAX_FILE_BYTES:
            raise ImageError(f"{shown(entry.path)}: bad file size: {entry.size} bytes")
        mode = entry.mode & 0o777 | 0o400
        try:
            new = os.open(name, _NEW_FILE, mode, dir_fd=parent)
        except FileExistsError:
            self._remove(parent, name)
            new = os.open(name, _NEW_FILE, mode, dir_fd=parent)
        with Fd(new) as fd:
            crc = None
            if entry.segments is None:
                crc = data.copy(entry.size, fd, 0)
            else:
                for offset, length in entry.segments:
                    if not 0 <= offset <= offset + length <= entry.size:
                        raise ImageError(f"{shown(entry.path)}: a sparse segment is beyond the end of the file")
                    data.copy(length, fd, offset)
                os.ftruncate(fd, entry.size)
            if entry.pax:
                if not mode & 0o200:
                    os.fchmod(fd, mode | 0o200)  # xattr(7): setting attributes requires write permission
                self._set_xattrs(fd, entry)
            os.utime(fd, ns=(entry.mtime, entry.mtime))
            made = os.fstat(fd)
            if made.st_mode & 0o7777 != mode:  # because of a default ACL or the fchmod above
                os.fchmod(fd, mode)
                made = os.fstat(fd)
            if crc is None:
                self.sums.pop(made.st_ino, None)  # a replaced file may have had this inode
            else:
                self.sums[made.st_ino] = index.file_sum(made, crc)

    def _make_symlink(self, parent: int, name: bytes, entry: Entry) -> None:
        try:
            os.symlink(entry.link, name, dir_fd=parent)
        except FileExistsError:
            self._remove(parent, name)
            os.symlink(entry.link, name, dir_fd=parent)
        os.utime(name, ns=(entry.mtime, entry.mtime), dir_fd=parent, follow_symlinks=False)

    def _make_link(self, parent: int, path: bytes, name: bytes, entry: Entry) -> None:
        target = _normal(entry.link)
        if not target or target.startswith(b"dev/") or target == path:
            return
        above, _, target_name = target.rpartition(b"/")
        try:
            with self._walk(above.split(b"/"), None) as directory:
                status = os.stat(target_name, dir_fd=directory, follow_symlinks=False)
                existing = _lstat(parent, name)
                if existing is not None and (existing.st_dev, existing.st_ino) == (status.st_dev, status.st_ino):
                    return
                is_device = any(record.startswith("device") for record in self._records.get(target, ()))
                if stat.S_ISDIR(status.st_mode) or is_whiteout(status) and not is_device:
                    raise FileNotFoundError(errno.ENOENT, "no such file")
                self._remove(parent, name)
                self._links.add((directory, target_name), (parent, name), status)
                self._copy_records(target, path)  # ``path`` keeps its records if an upper layer hides the target
        except (FileNotFoundError, NotADirectoryError):
            raise ImageError(
                f"{shown(entry.path)}: hard link to {shown(entry.link)}, which is not in the layer",
                hint="rebuild the image: docker and podman refuse it too",
            ) from None

    def _whiteout(self, parent: int, path: bytes, name: bytes, mtime: int) -> None:
        if name == _OPAQUE:
            if path == _OPAQUE:
                self.opaque = True  # overlayfs ignores the attribute of the root, so the stack ends at this layer
            else:
                set_opaque(parent)
            return
        name = name[len(_WHITEOUT) :]
        if name.startswith(_WHITEOUT):
            return  # metadata of aufs
        if name in (b"", b".", b".."):
            raise ImageError(f"{shown(path)}: the whiteout has no name")
        status = _lstat(parent, name)
        if status is None:
            make_whiteout(parent, name, mtime)
        elif stat.S_ISDIR(status.st_mode):
            # Whiteouts hide lower layers only. The entries of this layer stay.
            with Fd(os.open(name, _DIRECTORY, dir_fd=parent)) as fd:
                set_opaque(fd)

    def _remove(self, parent: int, name: bytes) -> None:
        status = _lstat(parent, name)
        if status is None:
            return
        if not stat.S_ISDIR(status.st_mode):
            os.unlink(name, dir_fd=parent)
            if stat.S_ISLNK(status.st_mode):
                self._forget(parent)  # open directories may have been reached through this symlink
            return
        self._forget(parent)  # open directories may be beneath the removed directory
        trees.remove_in(parent, name)

    def _set_xattrs(self, fd: int, entry: Entry) -> None:
        for name, value in entry.xattrs():
            if not is_plain(os.fsdecode(name)):
                continue
            try:
                os.setxattr(fd, name, value)
            except OSError as e:
                log.warn(f"{shown(entry.path)}: cannot set the attribute {os.fsdecode(name)}: {e.strerror}")

    def _record(self, path: bytes, entry: Entry) -> None:
        records = []
        if entry.kind in b"34":
            kind = "c" if entry.kind == b"3" else "b"
            records.append(f"device {kind} {entry.device[0]} {entry.device[1]} {entry.mode:o}")
        else:
            required = _REQUIRED_MODE.get(entry.kind, 0o777)
            has_mode = entry.mode == (entry.mode & 0o777 | required) or entry.kind == b"2"
            if not has_mode or entry.uid or entry.gid:
                records.append(f"file {entry.mode:o} {entry.uid} {entry.gid}")
        if entry.pax:
            for name, value in entry.xattrs():
                if not name.startswith((b"user.", b"trusted.overlay.")):
                    records.append(f"xattr {index.escape(name).decode('utf-8', 'replace')} {value.hex() or '-'}")
        if records:
            self._records[path] = records
        else:
            self._records.pop(path, None)

    def _copy_records(self, source: bytes, path: bytes) -> None:
        if source in self._records:
            self._records[path] = self._records[source]
        else:
            self._records.pop(path, None)


class _Walk:
    """The position of a walk from the root of a tree, for a ``with``. ``..`` never leads out of the root."""

    def __init__(self, root: int) -> None:
        self._stack = [os.dup(root)]
        self.names: list[bytes] = []  # path of the current directory, without symlinks

    def __enter__(self) -> _Walk:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._stack:
            os.close(fd)

    @property
    def directory(self) -> int:
        return self._stack[-1]

    def down(self, name: bytes, directory: int) -> None:
        self._stack.append(directory)
        self.names.append(name)

    def up(self) -> None:
        if self.names:
            os.close(self._stack.pop())
            self.names.pop()

    def to_root(self) -> None:
        while self.names:
            self.up()

    def end(self) -> Fd:
        """Return the current directory, open; the caller closes it."""
        return Fd(self._stack.pop())


def _normal(path: bytes) -> bytes:
    """Normalize a tar name lexically, relative to the layer's root. Raises ImageError for a name that leads out."""
    path = path.strip(b"/")
    if b"//" not in path and b"/." not in path and path[:1] != b".":  # the usual case
        depth = path.count(b"/") + 1
    else:
        parts: list[bytes] = []
        for part in path.split(b"/"):
            if part == b"..":
                if not parts:
                    raise ImageError(f"{shown(path)}: leads out of the layer", hint="the image is damaged or hostile")
                parts.pop()
            elif part not in (b"", b"."):
                parts.append(part)
        depth = len(parts)
        path = b"/".join(parts)
    if depth > MAX_DIRECTORY_DEPTH:
        raise ImageError(f"a path in the layer has more than {MAX_DIRECTORY_DEPTH} directories")
    return path


def _lstat(parent: int, name: bytes) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return None
