"""Squashfs images: recognise, write, unpack.

Sources: the kernel's squashfs documentation, "SQUASHFS FILESYSTEM DESIGN", and
fs/squashfs/squashfs_fs.h for the superblock; mksquashfs(1), unsquashfs(1). On the start
path only check() is used: no import here but os and errno.
"""

from __future__ import annotations

import errno
import os
from _collections_abc import Iterator, Sequence

from enroot_py.base.errors import ConfigError, ImageError
from enroot_py.config.words import nearest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from enroot_py.config.settings import Settings

STDOUT = "-"
_MAGIC = b"hsqs"
_SUPERBLOCK = 96  # bytes
_TEXT = 16 << 20  # bytes of a file of an image that is read into memory
_QUEUE = "32"  # MB of data, and of fragments, that unsquashfs holds; its 256 each make nothing quicker
# What unsquashfs says of an image that is not what it was.
_DAMAGE = ("failed to read", "corrupt", "uncompress", "Can't find a valid", "bad ", "too large", "invalid")
_SCRATCH = "/sys"  # to mount upon, in our own mount namespace: every host has it, mksquashfs needs nothing in it


def check(path: str) -> None:
    """Look at the superblock. Raises ImageError for a file that is no squashfs image, or not all of one."""
    try:
        with open(path, "rb", buffering=0, opener=_open_at_once) as f:
            block = f.read(_SUPERBLOCK) or b""
            size = os.fstat(f.fileno()).st_size
    except OSError as e:
        missing = isinstance(e, (FileNotFoundError, NotADirectoryError))
        hint = f"it must exist on the node {os.uname().nodename}" if missing else "give a squashfs file of your own"
        raise ImageError(f"cannot read the image {path}: {e.strerror}", hint=hint) from e
    if block[:4] != _MAGIC:
        raise ImageError(f"not a squashfs image: {path}", hint="penroot import makes one from a registry's image")
    if len(block) < _SUPERBLOCK:
        raise ImageError(f"the image {path} is truncated: {size} bytes", hint="import or copy it again")
    major = int.from_bytes(block[28:30], "little")
    if major != 4:
        raise ImageError(
            f"the image {path} is squashfs {major}, not 4", hint="write it again with a current mksquashfs"
        )
    used = int.from_bytes(block[40:48], "little")
    if used > size:
        raise ImageError(f"the image {path} is truncated: {size} of {used} bytes", hint="import or copy it again")


def _open_at_once(path: str, flags: int) -> int:
    """An opener for open() that does not wait for a writer of a FIFO: without one it is empty."""
    return os.open(path, flags | os.O_NONBLOCK)


def checksum(path: str) -> str:
    """The SHA-256 of an image file. Raises OSError."""
    from hashlib import sha256

    checksum = sha256()
    with open(path, "rb", buffering=0) as f:
        while data := f.read(1 << 20):
            checksum.update(data)
    return checksum.hexdigest()


def write(lowerdirs: Sequence[str], output: str, settings: Settings, *, image: str = "", used: str = "") -> int:
    """Write what an overlay of ``lowerdirs``, top first, shows to the squashfs file ``output``, or STDOUT.

    ``image`` is a squashfs file beneath all of them. ``used`` is that of the directories in
    which starts have made mount points, which are left out. Returns the size of the file.

    Nothing is copied on disk. The file appears whole or not at all, and replaces another
    one only with settings.force_override. The same trees give the same bytes where
    SOURCE_DATE_EPOCH is set. Raises ImageError.
    """
    check_writing(output, settings)
    from enroot_py.base import making

    if output == STDOUT:
        making.sweep(settings.temp_path)
        return _print(lowerdirs, image, used, settings)
    output = os.path.abspath(output)
    making.sweep(os.path.dirname(output))
    try:
        with making.File(output) as file:
            _in_child(lowerdirs, image, used, file.fd, settings)
            file.publish(replace=settings.force_override)
            return os.fstat(file.fd).st_size
    except FileExistsError:
        raise ImageError(f"file already exists: {output}", hint="--force overwrites it") from None
    except OSError as e:
        raise cannot_write(output, e) from e


def _print(lowerdirs: Sequence[str], image: str, used: str, settings: Settings) -> int:
    """The same to stdout, by way of a file without a name: mksquashfs goes back to where it was."""
    import shutil
    import sys
    import tempfile

    from enroot_py.base import filesystems

    try:
        file = tempfile.TemporaryFile(dir=settings.temp_path)  # noqa: SIM115
        _in_child(lowerdirs, image, used, file.fileno(), settings)
    except OSError as e:
        hint = filesystems.way_out(e, settings.temp_path, "ENROOT_TEMP_PATH")
        raise ImageError(f"cannot write an image in {settings.temp_path}: {e.strerror}", hint=hint) from e
    with file:
        file.seek(0)
        shutil.copyfileobj(file, sys.stdout.buffer)
        sys.stdout.flush()
        return file.tell()


# What mksquashfs(1) knows, up to 4.7, that shapes the image and nothing else, by how many words follow. What is not
# here runs programs (-p, -pf, and exec() in an -action), reads or writes other files, or is what write() says itself.
_OPTIONS = {
    0: (
        "-reproducible -not-reproducible -no-exports -exports -no-sparse -no-xattrs -xattrs -noI -noId -noD -noF "
        "-noX -no-compression -no-tailends -tailends -no-fragments -always-use-fragments -no-duplicates "
        "-no-hardlinks -all-root -root-owned -keep-as-directory -one-file-system -one-file-system-x "
        "-noInodeCompression -noIdTableCompression -noDataCompression -noFragmentCompression -noXattrCompression "
        "-Xhc -noappend -no-recovery -quiet -no-progress -progress -exit-on-error -nopad -wildcards"
    ),
    1: (
        "-comp -b -mkfs-time -fstime -all-time -root-time -root-mode -root-uid -root-gid -force-uid -force-gid "
        "-force-file-mode -force-dir-mode -uid-gid-offset -mem -mem-percent -processors -throttle -limit "
        "-xattrs-exclude -xattrs-include -small-readers -block-readers -read-queue -write-queue -fragment-queue "
        "-Xcompression-level -Xwindow-size -Xstrategy -Xalgorithm -Xbcj -Xdict-size"
    ),
}
_WORDS = {option: count for count, options in _OPTIONS.items() for option in options.split()}


def check_options(settings: Settings) -> list[str]:
    """ENROOT_SQUASH_OPTIONS as words. Raises ConfigError for what does more than shape the image."""
    words = settings.squash_options.split()
    at = 0
    while at < len(words):
        if words[at] not in _WORDS:
            meant = nearest(words[at], _WORDS)
            raise ConfigError(
                f"ENROOT_SQUASH_OPTIONS: {words[at]} is not allowed",
                hint=f"did you mean {meant}?"
                if meant
                else "it takes what shapes an image, as -comp and -b, and nothing that runs programs or names files",
            )
        at += 1 + _WORDS[words[at]]
    return words


def check_writing(output: str, settings: Settings) -> None:
    """Whether an image can be written here, and to ``output``. Raises ImageError, ConfigError."""
    from enroot_py.base import memory

    check_output(output, settings)
    check_options(settings)
    if why := memory.refusal():
        raise ImageError(why[0], hint=why[1])


def check_output(output: str, settings: Settings) -> None:
    """Whether a file may be written to ``output``. Raises ImageError."""
    if output == STDOUT:
        if os.isatty(1):
            raise ImageError("an image is nothing to read", hint="redirect stdout, or name the file: --output FILE")
        return
    output = os.path.abspath(output)
    directory = os.path.dirname(output)
    if os.path.isdir(output):
        raise ImageError(f"{output} is a directory", hint="name the file: --output FILE")
    if not os.path.isdir(directory):
        raise ImageError(f"no such directory: {directory}", hint=f"for the image {output}")
    try:
        os.lstat(output)
    except FileNotFoundError:
        pass
    except OSError as e:  # its name is too long
        raise cannot_write(output, e) from e
    else:
        if not settings.force_override:
            raise ImageError(f"file already exists: {output}", hint="--force overwrites it")
    if not os.access(directory, os.W_OK | os.X_OK):
        why = errno.EROFS if os.statvfs(directory).f_flag & os.ST_RDONLY else errno.EACCES
        raise cannot_write(output, OSError(why, os.strerror(why)))


def cannot_write(output: str, error: OSError) -> ImageError:
    """The error of an image file that is to be written."""
    from enroot_py.base import filesystems

    hint = filesystems.way_out(error, os.path.dirname(output))
    return ImageError(f"cannot write {output}: {error.strerror}", hint=hint)


def _in_child(lowerdirs: Sequence[str], image: str, used: str, fd: int, settings: Settings) -> None:
    """Run mksquashfs in a process of its own, whose mounts go with it."""
    from enroot_py.base import workers

    workers.run([lambda: _squash(lowerdirs, image, used, fd, settings)], 1)


def _squash(lowerdirs: Sequence[str], image: str, used: str, fd: int, settings: Settings) -> None:
    from enroot_py.base import linux, memory, run, workers
    from enroot_py.runtime import namespaces, rootfs, squashfuse
    from enroot_py.store import index

    mksquashfs = run.find("mksquashfs", package="squashfs-tools")
    buffers, threads = memory.share(memory.left(), processors(settings))
    modes = sorted(index.special_modes(lowerdirs))
    # Root inside owns every file, so that none is unreadable to mksquashfs.
    namespaces.enter_user(0, 0)
    namespaces.unshare(linux.CLONE_NEWNS)
    server = squashfuse.Server(image) if image else None
    namespaces.unshare(linux.CLONE_NEWNS)  # the server stays in the other one
    workers.die_with_parent()
    options = ["userxattr"]
    try:
        linux.mount(None, "/", None, linux.MS_REC | linux.MS_PRIVATE)
        linux.mount("tmpfs", _SCRATCH, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "mode=700")
        root = _SCRATCH + "/root"
        os.mkdir(root)
        directories = tuple(lowerdirs)
        if server:
            os.mkdir(_SCRATCH + "/lower")
            server.attach(_SCRATCH + "/lower")
            directories += (_SCRATCH + "/lower",)
            options.append("xino=off")
        overlay = rootfs.overlay(directories, "", "", options)
        rootfs.attach(overlay, root)
    except OSError as e:
        raise ImageError(f"cannot mount an overlay of {len(lowerdirs)} layers: {e.strerror}") from e
    command = [mksquashfs, root, "/proc/self/fd/0", "-noappend", "-no-recovery", "-no-progress", "-quiet"]
    command += ["-exit-on-error", "-all-root", "-processors", str(threads)]
    command += check_options(settings)
    if "-mem" not in command:
        command += ["-mem", f"{buffers >> 20}M"]
    if modes:
        with open(_SCRATCH + "/modes", "wb") as f:
            f.writelines(b"%s m %o 0 0\n" % (_pseudo_name(path), mode) for path, mode in modes if "\n" not in path)
        command += ["-pf", _SCRATCH + "/modes"]
    with open(_SCRATCH + "/excluded", "wb") as f:
        f.writelines(_pattern(path) + b"\n" for path in _left_out(used, root))
    command += ["-wildcards", "-ef", _SCRATCH + "/excluded", "-e", "dev/*", ".enroot"]
    environ = {key: os.environ[key] for key in ("PATH", "SOURCE_DATE_EPOCH") if key in os.environ}
    _run_tool(command, environ=environ, stdin=fd, warnings=True)


def _left_out(used: str, root: str) -> Iterator[bytes]:
    """What starts have left in the directory ``used`` of the view ``root``: mount points, and enroot's lock.

    A mount point is closed to all, and nothing is in it: what a user has closed is kept where there is something.
    """
    if not used:
        return
    if _is_empty_file(root + "/.lock"):
        yield b".lock"
    base = os.fsencode(used)
    pending = [b""]
    while pending:
        inside = pending.pop()
        try:
            entries = list(os.scandir(base + b"/" + inside))
        except FileNotFoundError:
            continue  # a container that runs
        for entry in entries:
            path = inside + entry.name
            is_directory = entry.is_dir(follow_symlinks=False)
            if is_directory:
                pending.append(path + b"/")
            if not is_directory and not entry.is_file(follow_symlinks=False) or b"\n" in path:
                continue
            if not entry.stat(follow_symlinks=False).st_mode & 0o7777:
                shown = os.fsencode(root) + b"/" + path
                if not os.listdir(shown) if is_directory else _is_empty_file(shown):
                    yield path


def _is_empty_file(path: str | bytes) -> bool:
    import stat

    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return False
    return stat.S_ISREG(status.st_mode) and not status.st_size


def _pattern(path: bytes) -> bytes:
    """A path as mksquashfs takes it with -wildcards: every byte that could mean something has a backslash before it."""
    return b"".join(bytes((c,)) if chr(c).isalnum() or c == 47 or c > 127 else b"\\" + bytes((c,)) for c in path)


def processors(settings: Settings) -> int:
    """CPUs to use: the setting, or those of the affinity mask."""
    return settings.max_processors or len(os.sched_getaffinity(0))


def _pseudo_name(path: str) -> bytes:
    """A file name in mksquashfs's pseudo definitions: quoted, a quote or backslash with a backslash before it."""
    return b'"' + os.fsencode(path).replace(b"\\", b"\\\\").replace(b'"', b'\\"') + b'"'


def _run_tool(command: list[str], image: str = "", **how: Any) -> str:
    """Run a program of squashfs-tools, on an image that is read; returns its stdout.

    Raises ImageError; OSError for a full disk, which it only says in words.
    """
    from enroot_py.base import run

    try:
        return run.Program(command, error=ImageError, **how).run()
    except ImageError as e:
        for number in (errno.ENOSPC, errno.EDQUOT):
            if os.strerror(number) in str(e):
                raise OSError(number, os.strerror(number)) from e
        if image and any(word in str(e) for word in _DAMAGE):
            why = str(e).partition(" failed: ")[2]
            raise ImageError(f"the image {image} is damaged: {why}", hint="import or copy it again") from e
        raise


def read(path: str, name: str) -> str:
    """A text file in an image, "" where it has none of that name. Raises ImageError."""
    import resource

    from enroot_py.base import run

    check(path)
    fd = os.memfd_create(name)
    try:
        _run_tool(
            [run.find("unsquashfs", package="squashfs-tools"), "-cat", path, name],
            path,
            stdout=fd,
            before=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (_TEXT, _TEXT)),
        )
        with open(os.dup(fd), "rb") as f:
            f.seek(0)
            return f.read().decode(errors="replace")
    except ImageError as e:
        # unsquashfs before 4.5 has no -cat.
        if "no matches" in str(e) or "invalid option" in str(e):
            return ""
        if "SIGXFSZ" in str(e):
            raise ImageError(f"the file {name} of {path} is larger than {_TEXT >> 20} MiB") from e
        raise
    finally:
        os.close(fd)


def unpack(path: str, directory: str, settings: Settings | None = None) -> None:
    """Unpack an image into ``directory``, empty if it exists. Raises ImageError; OSError where it is full.

    Every directory gets u+rwx, no file keeps a set-uid or set-gid bit, and device nodes are left out.
    """
    from enroot_py.base import memory, run

    check(path)
    _, threads = memory.share(memory.left(), processors(settings) if settings else len(os.sched_getaffinity(0)))
    command = [run.find("unsquashfs", package="squashfs-tools"), "-no-progress", "-quiet", "-user-xattrs"]
    command += ["-da", _QUEUE, "-fr", _QUEUE, "-processors", str(threads), "-force", "-dest", directory, path]
    _run_tool(command, path, tolerate=_are_devices, warnings=True)
    _settle(directory)


def _are_devices(status: int, lines: list[str]) -> bool:
    """Whether all that unsquashfs could not make are device nodes, which only root can, and no container needs."""
    return status == 2 and bool(lines) and all(" device " in line and "superuser" in line for line in lines)


def _settle(directory: str) -> None:
    """What an image's modes may not do to its owner, or to others on the host."""
    import stat

    pending = [directory]
    while pending:
        here = pending.pop()
        os.chmod(here, os.stat(here).st_mode & 0o1777 | 0o700)
        with os.scandir(here) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
                elif os.geteuid() == 0 and not entry.is_symlink():
                    mode = entry.stat(follow_symlinks=False).st_mode
                    if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
                        os.unlink(entry.path)
                    elif mode & 0o6000:
                        os.chmod(entry.path, mode & 0o1777)
