"""Hard links of a layer. If a file has too many links, further names link to a copy of the file.

On a file system without hard links, each name gets a copy.
"""

from __future__ import annotations

import errno
import os
import stat

from enroot_py.base.fds import Fd
from enroot_py.store.overlayfs import is_plain, is_whiteout, make_whiteout

_NO_HARD_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)  # link(2) on file systems without hard links
_MAX_OPEN_COPIES = 64


class HardLinks:
    """Create hard links. Ext4 allows 65,000 per file; further names link to a copy. Call close() at the end."""

    def __init__(self, sums: dict[int, bytes]) -> None:
        """``sums`` maps inodes to index.file_sum(). A copy gets the sum of its file."""
        self._sums = sums
        # Inode of a file that can have no more links -> descriptors of the file and its copy. The file stays open so
        # that no other file gets its inode number.
        self._copies: dict[int, tuple[int, int]] = {}

    def add(self, source: tuple[int, bytes], target: tuple[int, bytes], status: os.stat_result) -> None:
        """Make ``target`` another name of ``source``. Each is an open directory and a name in it. Raises OSError."""
        _, copy = self._copies.get(status.st_ino, (-1, -1))
        try:
            if copy < 0:
                os.link(source[1], target[1], src_dir_fd=source[0], dst_dir_fd=target[0], follow_symlinks=False)
            else:
                os.link(f"/proc/self/fd/{copy}", target[1], dst_dir_fd=target[0], follow_symlinks=True)
        except OSError as e:
            if e.errno not in (errno.EMLINK, *_NO_HARD_LINKS):
                raise
            self._copy(source, target, status, can_link=e.errno == errno.EMLINK)

    def _copy(
        self, source: tuple[int, bytes], target: tuple[int, bytes], status: os.stat_result, *, can_link: bool
    ) -> None:
        """Make ``target`` a copy of ``source``. With ``can_link``, further names link to the copy. Raises OSError."""
        directory, name = target
        if stat.S_ISREG(status.st_mode):
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
            with (
                Fd(os.open(source[1], flags, dir_fd=source[0])) as old,
                Fd(self._copy_file(old, status, target)) as new,
            ):
                if can_link:
                    self._forget(status.st_ino)
                    self._copies[status.st_ino] = old.keep(), new.keep()
            if len(self._copies) > _MAX_OPEN_COPIES:
                self._forget(next(iter(self._copies)))
        elif stat.S_ISLNK(status.st_mode):
            os.symlink(os.readlink(source[1], dir_fd=source[0]), name, dir_fd=directory)
            os.utime(name, ns=(status.st_mtime_ns, status.st_mtime_ns), dir_fd=directory, follow_symlinks=False)
        elif is_whiteout(status):
            make_whiteout(directory, name, status.st_mtime_ns)
        else:
            raise OSError(errno.EMLINK, os.strerror(errno.EMLINK))

    def _copy_file(self, old: int, status: os.stat_result, target: tuple[int, bytes]) -> int:
        """Copy an open file. Return the copy's descriptor. Raises OSError."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with Fd(os.open(target[1], flags, 0o600, dir_fd=target[0])) as new:
            while os.sendfile(new, old, None, 1 << 30):
                pass
            for attribute in filter(is_plain, os.listxattr(old)):
                os.setxattr(new, attribute, os.getxattr(old, attribute))
            os.fchmod(new, stat.S_IMODE(status.st_mode))
            os.utime(new, ns=(status.st_mtime_ns, status.st_mtime_ns))
            if status.st_ino in self._sums:
                self._sums[os.fstat(new).st_ino] = self._sums[status.st_ino]
            return new.keep()

    def _forget(self, inode: int) -> None:
        for fd in self._copies.pop(inode, ()):
            os.close(fd)

    def close(self) -> None:
        """Close the copies."""
        for inode in list(self._copies):
            self._forget(inode)
