"""Read and unpack squashfs images with unsquashfs(1)."""

from __future__ import annotations

import errno
import os
import re
import resource
import stat
from collections.abc import Callable
from typing import Any

from enroot_py.base import carried, filesystems, memory, run, workers
from enroot_py.base.errors import ImageError
from enroot_py.config.settings import Settings
from enroot_py.runtime import namespaces
from enroot_py.store.squashfs import check

_MAX_TEXT_BYTES = 16 << 20  # limit for reading a file of an image into memory
_QUEUE_MB = "32"  # for data and for fragments each; the default of unsquashfs, 256, is not faster
# Messages of unsquashfs that report a damaged image.
_DAMAGE = ("failed to read", "corrupt", "uncompress", "Can't find a valid", "bad ", "too large", "invalid")


def read(path: str, name: str) -> str:
    """Return the text file ``name`` of an image, or "" if it is missing. Raises ImageError."""
    check(path)
    command = [run.find("unsquashfs", package="squashfs-tools"), "-cat", path, name]
    try:
        with open(os.memfd_create(name), "rb") as f:
            run_tool(command, path, stdout=f.fileno(), before=_limit)
            f.seek(0)
            return f.read().decode(errors="replace")
    except ImageError as e:
        # unsquashfs before 4.5 has no -cat.
        if "no matches" in str(e) or "invalid option" in str(e):
            return ""
        if "SIGXFSZ" in str(e):
            raise ImageError(f"the file {name} of {path} is larger than {_MAX_TEXT_BYTES >> 20} MiB") from e
        raise


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (_MAX_TEXT_BYTES, _MAX_TEXT_BYTES))


def unpack(path: str, directory: str, settings: Settings | None = None, *, offset: int = 0) -> None:
    """Unpack an image into ``directory``, which is missing or empty. Raises ImageError; OSError for a full disk.

    The image begins at ``offset`` of its file. In a bundle (features/bundle), a program precedes it.

    Every directory gets u+rwx, no file keeps a set-uid or set-gid bit, and device nodes are omitted. If the caller is
    root, root owns all files, because a user namespace maps other IDs to nobody. The owners of the image stay
    if ``settings`` let root keep its privileges in containers.
    """
    check(path, offset)
    _, threads = memory.share(memory.left(), workers.processors(settings.max_processors if settings else 0))
    program, environ = carried.command("unsquashfs"), {"PATH": "/usr/bin:/bin"}  # without the caller's LD_PRELOAD
    command = program or [run.find("unsquashfs", package="squashfs-tools")]
    command += ["-no-progress", "-quiet", "-user-xattrs", *(["-offset", str(offset)] if offset else ())]
    command += ["-da", _QUEUE_MB, "-fr", _QUEUE_MB, "-processors", str(threads), "-force", "-dest", directory, path]
    run_tool(command, path, tolerate=_are_devices, warnings=True, environ=environ if program else None)
    _settle(directory, take=os.geteuid() == 0 and not (settings and namespaces.privileged(settings)))


def _are_devices(status: int, lines: list[str]) -> bool:
    """Return whether unsquashfs failed only to create device nodes, which needs root. Containers do not need them."""
    return status == 2 and bool(lines) and all(" device " in line and "superuser" in line for line in lines)


def _settle(directory: str, *, take: bool) -> None:
    """Make directories accessible to their owner, and remove device nodes and set-uid and set-gid bits.

    With ``take``, make root the owner of all files, because unsquashfs run by root keeps the owners of the image.
    """
    pending = [directory]
    while pending:
        parent = pending.pop()
        if take:
            os.chown(parent, 0, 0)
        os.chmod(parent, os.stat(parent).st_mode & 0o1777 | 0o700)
        with os.scandir(parent) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
                    continue
                if take:
                    os.chown(entry.path, 0, 0, follow_symlinks=False)
                if os.geteuid() == 0 and not entry.is_symlink():
                    mode = entry.stat(follow_symlinks=False).st_mode
                    if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
                        os.unlink(entry.path)
                    elif mode & 0o6000:
                        os.chmod(entry.path, mode & 0o1777)


def run_tool(
    command: list[str], image: str = "", tolerate: Callable[[int, list[str]], bool] | None = None, **options: Any
) -> str:
    """Run a program of squashfs-tools that reads ``image``. Return its stdout.

    ``options``: see run.Program. Raises ImageError; OSError if the program's messages report a full disk.
    """
    messages: list[str] = []

    def judge(status: int, lines: list[str]) -> bool:
        messages.extend(lines)
        return tolerate is not None and tolerate(status, lines)

    try:
        return run.Program(command, error=ImageError, tolerate=judge, **options).run()
    except ImageError as e:
        for number in (errno.ENOSPC, errno.EDQUOT):
            if any(os.strerror(number) in line for line in messages):
                raise OSError(number, os.strerror(number)) from e
        if any("create thread" in line for line in messages):
            problem, hint = filesystems.no_process()
            raise ImageError(f"{command[0]} cannot start a thread: {problem}", hint=hint) from e
        if match := re.search(r"uses (\w+) compression, this is unsupported", "\n".join(messages)):
            problem = f"{command[0]} does not support the compression {match[1]} of the image {image}"
            raise ImageError(problem, hint="write the image again: mksquashfs -comp lz4") from e
        if image and any(word in str(e) for word in _DAMAGE):
            problem = str(e).partition(" failed: ")[2]
            raise ImageError(f"the image {image} is damaged: {problem}", hint="import or copy it again") from e
        raise
