"""``penroot-aufs2ovlfs`` and ``penroot-mksquashovlfs``: enroot's programs for unpacked layers.

aufs2ovlfs converts the OCI whiteouts of an unpacked layer to overlayfs whiteouts in place. ``.wh.NAME`` hides NAME of
the lower layers and becomes a character device 0:0. ``.wh..wh..opq`` hides the whole directory of the lower layers and
becomes an attribute ``overlay.opaque``. mksquashovlfs writes the merged view of an overlay to a squashfs image.
Sources: OCI image specification, "Whiteouts"; the kernel's filesystems/overlayfs, "whiteouts and opaque directories".
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
from collections.abc import Iterator, Sequence
from typing import NoReturn

from enroot_py.base import linux
from enroot_py.base.errors import CommandError, ImageError, PenrootError, UsageError
from enroot_py.runtime import namespaces

_WHITEOUT, _OPAQUE = ".wh.", ".wh..wh..opq"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def main() -> None:
    """Run the program that sys.argv[0] names."""
    program = os.path.basename(sys.argv[0])
    try:
        if program.endswith("mksquashovlfs"):
            mksquashovlfs(program, sys.argv[1:])
        else:
            aufs2ovlfs(program, sys.argv[1:])
    except PenrootError as e:
        sys.stderr.write(f"{program}: {e}{'; ' if e.hint else ''}{e.hint}\n")
        sys.exit(e.exit_code)


@contextlib.contextmanager
def _doing(action: str) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise ImageError(f"cannot {action}: {e.strerror}") from e


def aufs2ovlfs(program: str, arguments: Sequence[str]) -> None:
    """``aufs2ovlfs DIR``: convert the whiteouts in a directory tree. Raises ImageError, UsageError."""
    if not arguments or arguments[0] in ("--help", "-h"):
        print(f"Usage: {program} DIR\n\nConvert the AUFS whiteouts of an unpacked layer to overlayfs whiteouts.")
        return
    if len(arguments) > 1 or arguments[0].startswith("-"):
        raise UsageError(f"give one directory and no options: {program} --help")
    (top,) = arguments
    with _doing(f"open {top}"):
        fd = os.open(top, _DIRECTORY)
    try:
        device = os.fstat(fd).st_dev
        left = [top]
        while left:
            path = left.pop()
            with _opened(fd, path[len(top) + 1 :] or ".", path) as directory, _doing(f"read {path}"):
                left += _convert(directory, path, device)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _opened(top: int, beneath: str, path: str) -> Iterator[int]:
    with _doing(f"open {path}"):
        fd = linux.openat2(top, beneath, _DIRECTORY, 0, linux.RESOLVE_BENEATH | linux.RESOLVE_NO_SYMLINKS)
    try:
        yield fd
    finally:
        os.close(fd)


def _convert(directory: int, path: str, device: int) -> Iterator[str]:
    """Replace the whiteouts of a directory, and yield its subdirectories on the same file system."""
    for name in os.listdir(directory):
        info = os.stat(name, dir_fd=directory, follow_symlinks=False)
        if name.startswith(_WHITEOUT):
            _replace(directory, path, name, info.st_mode)
        elif stat.S_ISDIR(info.st_mode) and info.st_dev == device:
            if not os.access(name, os.R_OK | os.X_OK, dir_fd=directory, effective_ids=True):
                os.chmod(name, stat.S_IMODE(info.st_mode) | 0o700, dir_fd=directory)
            yield f"{path}/{name}"


def _replace(directory: int, path: str, name: str, mode: int) -> None:
    hidden = name.removeprefix(_WHITEOUT)
    if hidden.startswith(_WHITEOUT) and name != _OPAQUE:
        raise ImageError(f"{path}/{name} is not a whiteout of the OCI image format")
    if hidden in ("", ".", ".."):
        raise ImageError(f"{path}/{name} hides no valid file name")
    with _doing(f"remove {path}/{name}"):
        (os.rmdir if stat.S_ISDIR(mode) else os.unlink)(name, dir_fd=directory)
    if name == _OPAQUE:
        with _doing(f"mark {path} as opaque"):
            _mark_opaque(directory)
        return
    # If the layer itself has a file of that name, keep the file.
    with _doing(f"create the whiteout {path}/{hidden}"), contextlib.suppress(FileExistsError):
        os.mknod(hidden, stat.S_IFCHR | 0o600, os.makedev(0, 0), dir_fd=directory)


def _mark_opaque(directory: int) -> None:
    """Mark a directory as opaque. Overlayfs reads trusted.* or, with the option userxattr, user.*."""
    try:
        os.setxattr(directory, "trusted.overlay.opaque", b"y")
        if "ENROOT_SET_USER_XATTRS" not in os.environ:
            return
    except OSError:
        pass
    os.setxattr(directory, "user.overlay.opaque", b"y")


def mksquashovlfs(program: str, arguments: Sequence[str]) -> None:
    """``mksquashovlfs DIR[:DIR...] IMAGE [OPTION...]``: write the merged view to an image. The first DIR is on top.

    If an ordinary user calls it, this process becomes root of a user namespace, to read every file. The overlay is
    mounted in a private mount namespace, on the directory MOUNTPOINT (default: /mnt). Raises PenrootError.
    """
    if len(arguments) < 2:
        print(f"Usage: {program} DIR[:DIR...] IMAGE [mksquashfs options]")
        return
    layers, *words = arguments
    mountpoint = os.environ.get("MOUNTPOINT", "/mnt")
    if not mountpoint.startswith("/"):
        raise UsageError(f"MOUNTPOINT must be an absolute path, not {mountpoint}")
    root = os.geteuid() == 0
    if not root:
        namespaces.enter_user(0, 0)
    namespaces.unshare(linux.CLONE_NEWNS)
    with _doing("make mounts private"):
        linux.mount(None, "/", None, linux.MS_REC | linux.MS_PRIVATE)
    if ":" in layers:
        with _doing(f"mount an overlay of {layers}"):
            options = f"lowerdir={layers}{'' if root else ',userxattr'}"
            linux.mount("overlay", mountpoint, "overlay", linux.MS_RDONLY, options)
    else:  # an overlay needs at least two directories
        with _doing(f"mount {layers}"):
            linux.mount(layers, mountpoint, None, linux.MS_BIND)
    _execute(["mksquashfs", mountpoint, *words])


def _execute(command: list[str]) -> NoReturn:
    try:
        os.execvp(command[0], command)
    except OSError as e:
        error = CommandError(f"cannot run {command[0]}: {e.strerror}")
        error.exit_code = 127 if e.errno == errno.ENOENT else 126
        raise error from e
