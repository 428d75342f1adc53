"""Mount the content of squashfs files: ``SOURCE TARGET sqsh`` in an fstab, ``SOURCE:TARGET:sqsh`` in an option.

Each file has its own FUSE server. Like the server of an image, the server runs outside the container's namespaces, so
no process of the container can inspect it. Each mount of the file in the container is a clone of one mount that the
container cannot see. Only a start with such a mount imports this module.
"""

from __future__ import annotations

import os
import stat

from enroot_py.base import superblock, trusted
from enroot_py.base.errors import MountError, PenrootError
from enroot_py.base.fds import Fd
from enroot_py.runtime import mounting, squashfuse
from enroot_py.runtime.squashfuse import Server

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from enroot_py.runtime.mounting import Mount


def serve(mounts: Iterable[Mount], scratch: str, *, superuser: bool) -> None:
    """Start a server for each file. If a server cannot start, _File.mount() raises the error."""
    for mount in mounts:
        if mount.source not in mounting.served:
            mount_point = f"{scratch}/data{len(mounting.served)}"
            mounting.served[mount.source] = _File(mount.source, mount_point, superuser=superuser).mount


class _File:
    """A squashfs file, its server, and its mount point. The file is mounted at the first use."""

    def __init__(self, path: str, mount_point: str, *, superuser: bool) -> None:
        self._path = path
        self._mount_point = mount_point
        self._server: Server | None = None
        self._error: PenrootError | None = None
        try:
            with open_file(path) as fd:
                # Owners and modes in the file count only for a superuser, whose container has several users. Any other
                # user who can read the file can read every entry.
                self._server = Server(path, fd, superuser=superuser)
        except PenrootError as e:
            self._error = e

    def mount(self) -> str:
        """Mount the file, unless it is mounted, and return the directory. Raises PenrootError, OSError."""
        if self._error is not None:
            raise self._error
        server, self._server = self._server, None
        if server is not None:
            os.mkdir(self._mount_point)
            try:
                self._attach(server)
            except PenrootError as e:
                self._error = e
                raise
        return self._mount_point

    def _attach(self, server: Server) -> None:
        try:
            server.attach(self._mount_point)
            os.stat(self._mount_point)  # squashfuse_ll reads the root directory only now
        except (OSError, PenrootError) as e:
            is_damaged = server.ended or isinstance(e, OSError)
            if not is_damaged or os.sysconf("SC_OPEN_MAX") < squashfuse.SERVER_FDS:
                raise
            hint = "recreate it or copy it again"
            raise MountError(f"{self._path} is damaged: squashfuse cannot read its root directory", hint=hint) from e


def open_file(path: str) -> Fd:
    """Open a squashfs file for reading, without blocking on other kinds of file. Raises MountError."""
    try:
        with Fd(os.open(path, os.O_PATH | os.O_CLOEXEC)) as handle:
            kind = os.fstat(handle).st_mode
            if stat.S_ISDIR(kind):
                hint = f"omit {mounting.SQUASHFS} to mount a directory, or convert it with mksquashfs"
                raise MountError(f"{path} is a directory, not a squashfs file", hint=hint)
            if not stat.S_ISREG(kind):
                raise MountError(f"{path} {trusted.IRREGULAR}", hint=f"use {mounting.SQUASHFS} for squashfs files only")
            with Fd(os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_CLOEXEC)) as file:
                problem, hint = superblock.fault(file)
                if problem:
                    raise MountError(f"{path} {problem}", hint=hint)
                return file.keep()
    except OSError as e:
        missing = isinstance(e, (FileNotFoundError, NotADirectoryError))
        hint = f"the file must exist on the node {os.uname().nodename}" if missing else "use a file that you can read"
        raise MountError(f"cannot mount {path}: {e.strerror}", hint=hint) from e
