"""Write squashfs images with mksquashfs(1)."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence

from enroot_py.base import filesystems, making, memory
from enroot_py.base.errors import ConfigError, ImageError
from enroot_py.base.fds import Fd
from enroot_py.config.words import nearest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from enroot_py.config.settings import Settings
    from enroot_py.store.store import Image

STDOUT = "-"
_MAX_LINKS = 40  # path_resolution(7)
_IRREGULAR = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISLNK, "a chain of too many links"),
)
_SCRATCH = "/sys"  # a mount point that exists on every host, and that mksquashfs does not need


def write(lowerdirs: Sequence[str], output: str, settings: Settings, *, image: str = "", used: str = "") -> int:
    """Write the merged view of ``lowerdirs``, top first, to the squashfs file ``output`` or STDOUT. Return its size.

    ``image`` is a squashfs file beneath all lower directories. ``used`` is the lower directory in which starts created
    mount points; the image omits these.

    Nothing is copied on disk. The file appears complete or not at all, and replaces an existing file only with
    settings.force_override. With SOURCE_DATE_EPOCH, equal trees give equal bytes. Raises ImageError.
    """
    return _write(_Content(lowerdirs, image, used, settings), output, settings)


def write_image(image: Image, output: str, settings: Settings) -> int:
    """Write a stored image like write(), and record its digest in the file: imported.py. Raises ImageError."""
    content = _Content(image.lowerdirs, image.file, "", settings)
    content.digest = image.digest
    return _write(content, output, settings)


def _write(content: _Content, output: str, settings: Settings) -> int:
    check_writing(output, settings)
    if output == STDOUT:
        making.sweep(settings.temp_path)
        return _print(content, settings)
    output = destination(output)
    making.sweep(os.path.dirname(output))
    try:
        with making.File(output) as file:
            content.write(file.fd)
            file.publish(replace=settings.force_override)
            return os.fstat(file.fd).st_size
    except FileExistsError:
        raise ImageError(f"file already exists: {output}", hint="use --force to overwrite it") from None
    except OSError as e:
        raise cannot_write(output, e) from e


def _print(content: _Content, settings: Settings) -> int:
    """Write an image to stdout through an unnamed temporary file, because mksquashfs seeks in its output."""
    import shutil
    import sys
    import tempfile

    try:
        file = tempfile.TemporaryFile(dir=settings.temp_path)  # noqa: SIM115
        content.write(file.fileno())
    except OSError as e:
        hint = filesystems.hint_for(e, settings.temp_path, "ENROOT_TEMP_PATH")
        raise ImageError(f"cannot write an image in {settings.temp_path}: {e.strerror}", hint=hint) from e
    with file:
        file.seek(0)
        shutil.copyfileobj(file, sys.stdout.buffer)
        sys.stdout.flush()
        return file.tell()


# ---------------------------------------------------------------------------
# Checks before writing


# Options of mksquashfs(1) up to 4.7 that only shape the image. The key is the number of values that an option takes.
# Other options run programs (-p, -pf, exec() in an -action), read or write other files, or are set by _Content.
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
_COMPRESSIONS = ("lz4", "zstd", "gzip", "xz", "lzo", "lzma")
_VALUE_COUNTS = {option: count for count, options in _OPTIONS.items() for option in options.split()}


def check_options(settings: Settings) -> list[str]:
    """Return the words of ENROOT_SQUASH_OPTIONS. Raises ConfigError for options that do more than shape the image."""
    words = settings.squash_options.split()
    at = 0
    while at < len(words):
        if words[at] not in _VALUE_COUNTS:
            suggestion = nearest(words[at], _VALUE_COUNTS)
            raise ConfigError(
                f"ENROOT_SQUASH_OPTIONS: {words[at]} is not allowed",
                hint=f"did you mean {suggestion}?"
                if suggestion
                else "use only options that shape an image, such as -comp and -b",
            )
        count = _VALUE_COUNTS[words[at]]
        if len(words) <= at + count:
            raise ConfigError(f"ENROOT_SQUASH_OPTIONS: {words[at]} needs a value", hint="see mksquashfs(1)")
        if words[at] == "-comp" and words[at + 1] not in _COMPRESSIONS:
            message = f"ENROOT_SQUASH_OPTIONS: unknown compression {words[at + 1]}"
            raise ConfigError(message, hint=f"use one of {', '.join(_COMPRESSIONS)}")
        at += 1 + count
    return words


def check_writing(output: str, settings: Settings) -> None:
    """Check options, memory and ``output`` before an image is written. Raises ImageError, ConfigError."""
    check_output(output, settings)
    check_options(settings)
    if refusal := memory.refusal():
        raise ImageError(refusal[0], hint=refusal[1])


def check_output(output: str, settings: Settings) -> None:
    """Check that a file may be written to ``output``. Raises ImageError."""
    if output == STDOUT:
        if os.isatty(1):
            raise ImageError("stdout is a terminal", hint="redirect stdout, or name the file: --output FILE")
        return
    output = destination(output)
    directory = os.path.dirname(output)
    if not os.path.isdir(directory):
        raise ImageError(f"no such directory: {directory}", hint=f"create it: mkdir -p {directory}")
    try:
        os.lstat(output)
    except FileNotFoundError:
        pass
    except OSError as e:  # for example, the name is too long
        raise cannot_write(output, e) from e
    else:
        if not settings.force_override:
            raise ImageError(f"file already exists: {output}", hint="use --force to overwrite it")
    if not os.access(directory, os.W_OK | os.X_OK):
        number = errno.EROFS if os.statvfs(directory).f_flag & os.ST_RDONLY else errno.EACCES
        raise cannot_write(output, OSError(number, os.strerror(number)))


def destination(output: str) -> str:
    """Return the path to write. If ``output`` is a link, this is the link's target, so that the link stays.

    Raises ImageError if the target exists and is no regular file, or if another user could have created a link.
    """
    path = os.path.abspath(output)
    try:
        path = _resolve_parent(output)
        for _ in range(_MAX_LINKS):
            status = os.lstat(path)
            if not stat.S_ISLNK(status.st_mode):
                break
            directory = os.path.dirname(path)
            above = os.stat(directory)
            # The rule of the kernel for sticky world-writable directories: proc_sys_fs(5), protected_symlinks.
            is_world_writable = above.st_mode & stat.S_ISVTX and above.st_mode & stat.S_IWOTH
            if is_world_writable and status.st_uid not in (os.geteuid(), above.st_uid):
                raise ImageError(
                    f"{path} is a link of uid {status.st_uid}", hint="name another file, or remove the link"
                )
            path = _resolve_parent(os.path.join(directory, os.readlink(path)))
    except OSError:
        return path  # the file does not exist yet, or check_output() reports the error
    for test, kind in _IRREGULAR:
        if test(status.st_mode):
            hint = "name the file: --output FILE" if test is stat.S_ISDIR else "write to stdout instead: --output -"
            raise ImageError(f"{path} is {kind}", hint=hint)
    return path


def _resolve_parent(path: str) -> str:
    """Return ``path`` with its parent directory resolved by the kernel, because "link/.." need not be ".".

    Raises OSError, also for a link in the path that the kernel refuses to follow: proc_sys_fs(5), protected_symlinks.
    """
    directory, name = os.path.split(path.rstrip("/") or "/")
    if name in ("", ".", ".."):
        directory, name = path, ""
    with Fd(os.open(directory or ".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as fd:
        return os.path.join(os.readlink(f"/proc/self/fd/{fd}"), name).rstrip("/") or "/"


def cannot_write(output: str, error: OSError) -> ImageError:
    """Return the error for an image file that cannot be written."""
    hint = filesystems.hint_for(error, os.path.dirname(output))
    return ImageError(f"cannot write {output}: {error.strerror}", hint=hint)


# ---------------------------------------------------------------------------
# Content


class _Content:
    """The content of an image file: see write()."""

    digest = ""  # recorded in the file

    def __init__(self, lowerdirs: Sequence[str], image: str, used: str, settings: Settings) -> None:
        self._lowerdirs = tuple(lowerdirs)
        self._image = image
        self._used = used
        self._settings = settings

    def write(self, output: int) -> None:
        """Run mksquashfs in a child process with private mounts. Raises ImageError, OSError."""
        from enroot_py.base import workers

        workers.run([lambda: self._squash(output)], 1)
        if self.digest:
            from enroot_py.store import imported

            imported.append(output, self.digest)

    def _squash(self, output: int) -> None:
        from enroot_py.base import run, workers
        from enroot_py.store import index
        from enroot_py.store.unsquashfs import run_tool

        mksquashfs = run.find("mksquashfs", package="squashfs-tools")
        buffers, threads = memory.share(memory.left(), workers.processors(self._settings.max_processors))
        modes = [(path, mode) for path, mode in sorted(index.special_modes(self._lowerdirs)) if "\n" not in path]
        root = self._mount()
        command = [mksquashfs, root, "/proc/self/fd/0", "-noappend", "-no-recovery", "-no-progress", "-quiet"]
        command += ["-exit-on-error", "-all-root", "-processors", str(threads)]
        command += check_options(self._settings)
        if "-mem" not in command:
            command += ["-mem", f"{buffers >> 20}M"]
        if modes:
            with open(_SCRATCH + "/modes", "wb") as f:
                f.writelines(b"%s m %o 0 0\n" % (_pseudo_name(path), mode) for path, mode in modes)
            command += ["-pf", _SCRATCH + "/modes"]
        with open(_SCRATCH + "/excluded", "wb") as f:
            f.writelines(_pattern(path) + b"\n" for path in _start_remains(self._used, root))
        command += ["-wildcards", "-ef", _SCRATCH + "/excluded", "-e", "dev/*", ".enroot"]
        environ = {key: os.environ[key] for key in ("PATH", "SOURCE_DATE_EPOCH") if key in os.environ}
        # Squashfs has no ACLs, and mksquashfs warns about each file that has one.
        run_tool(command, environ=environ, stdin=output, warnings=True, expected="Unrecognised xattr prefix system.")

    def _mount(self) -> str:
        """Enter new namespaces and mount the overlay. Return its mount point. Raises ImageError."""
        from enroot_py.base import linux, workers
        from enroot_py.runtime import mounting, namespaces, rootfs, squashfuse

        # As root of the user namespace, mksquashfs can read every file.
        namespaces.enter_user(0, 0)
        namespaces.unshare(linux.CLONE_NEWNS)
        server = squashfuse.Server(self._image) if self._image else None
        namespaces.unshare(linux.CLONE_NEWNS)  # the server stays in the previous mount namespace
        workers.die_with_parent()
        root, lower = _SCRATCH + "/root", _SCRATCH + "/lower"
        lowerdirs, options = self._lowerdirs, ["userxattr"]
        try:
            linux.mount(None, "/", None, linux.MS_REC | linux.MS_PRIVATE)
            linux.mount("tmpfs", _SCRATCH, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "mode=700")
            os.mkdir(root)
            if server:
                os.mkdir(lower)
                server.attach(lower)
                lowerdirs += (lower,)
                options.append("xino=off")
            mounting.attach_at(rootfs.overlay(lowerdirs, "", "", options), root)
        except OSError as e:
            raise ImageError(f"cannot mount an overlay of {len(self._lowerdirs)} layers: {e.strerror}") from e
        return root


def _start_remains(used: str, root: str) -> Iterator[bytes]:
    """Yield leftovers of starts in the directory ``used``: mount points, and enroot's lock.

    A mount point has mode 0 in ``used``, and is empty in the merged view ``root``. A user's file or directory with
    mode 0 stays if it has content.
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
            continue  # a running container removed it
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
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return False
    return stat.S_ISREG(status.st_mode) and not status.st_size


def _pattern(path: bytes) -> bytes:
    """Return a path for mksquashfs -wildcards, with a backslash before every byte that may be special."""
    return b"".join(bytes((c,)) if chr(c).isalnum() or c == 47 or c > 127 else b"\\" + bytes((c,)) for c in path)


def _pseudo_name(path: str) -> bytes:
    """Return a quoted file name for a pseudo definition of mksquashfs."""
    return b'"' + os.fsencode(path).replace(b"\\", b"\\\\").replace(b'"', b'\\"') + b'"'
