"""Squashfs images are written, by mksquashfs(1)."""

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
    (stat.S_ISLNK, "a link that leads to too many links"),
)
_SCRATCH = "/sys"  # to mount upon, in our own mount namespace: every host has it, mksquashfs needs nothing in it


def write(lowerdirs: Sequence[str], output: str, settings: Settings, *, image: str = "", used: str = "") -> int:
    """Write what an overlay of ``lowerdirs``, top first, shows to the squashfs file ``output``, or STDOUT.

    ``image`` is a squashfs file beneath all of them. ``used`` is that of the directories in
    which starts have made mount points, which are left out. Returns the size of the file.

    Nothing is copied on disk. The file appears whole or not at all, and replaces another
    one only with settings.force_override. The same trees give the same bytes where
    SOURCE_DATE_EPOCH is set. Raises ImageError.
    """
    return _write(_Content(lowerdirs, image, used, settings), output, settings)


def write_image(image: Image, output: str, settings: Settings) -> int:
    """Write a stored image, as write() does, to a file that records its digest: imported.py. Raises ImageError."""
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
        raise ImageError(f"file already exists: {output}", hint="--force overwrites it") from None
    except OSError as e:
        raise cannot_write(output, e) from e


def _print(content: _Content, settings: Settings) -> int:
    """The same to stdout, by way of a file without a name: mksquashfs goes back to where it was."""
    import shutil
    import sys
    import tempfile

    try:
        file = tempfile.TemporaryFile(dir=settings.temp_path)  # noqa: SIM115
        content.write(file.fileno())
    except OSError as e:
        hint = filesystems.way_out(e, settings.temp_path, "ENROOT_TEMP_PATH")
        raise ImageError(f"cannot write an image in {settings.temp_path}: {e.strerror}", hint=hint) from e
    with file:
        file.seek(0)
        shutil.copyfileobj(file, sys.stdout.buffer)
        sys.stdout.flush()
        return file.tell()


# ---------------------------------------------------------------------------
# Whether an image can be written


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
_COMPRESSIONS = ("lz4", "zstd", "gzip", "xz", "lzo", "lzma")
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
                else "use only options that shape an image, such as -comp and -b",
            )
        count = _WORDS[words[at]]
        if len(words) <= at + count:
            raise ConfigError(f"ENROOT_SQUASH_OPTIONS: {words[at]} needs a value", hint="see mksquashfs(1)")
        if words[at] == "-comp" and words[at + 1] not in _COMPRESSIONS:
            message = f"ENROOT_SQUASH_OPTIONS: there is no compression {words[at + 1]}"
            raise ConfigError(message, hint=f"use one of {', '.join(_COMPRESSIONS)}")
        at += 1 + count
    return words


def check_writing(output: str, settings: Settings) -> None:
    """Whether an image can be written here, and to ``output``. Raises ImageError, ConfigError."""
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
    output = destination(output)
    directory = os.path.dirname(output)
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


def destination(output: str) -> str:
    """The path of the file to which ``output`` leads: a link stays, and the file that it names is written.

    Raises ImageError for what is no regular file, and for a link that another user could have put there.
    """
    path = os.path.abspath(output)
    try:
        path = _placed(output)
        for _ in range(_MAX_LINKS):
            status = os.lstat(path)
            if not stat.S_ISLNK(status.st_mode):
                break
            directory = os.path.dirname(path)
            above = os.stat(directory)
            # As the kernel does in such directories: proc_sys_fs(5), protected_symlinks.
            is_open = above.st_mode & stat.S_ISVTX and above.st_mode & stat.S_IWOTH
            if is_open and status.st_uid not in (os.geteuid(), above.st_uid):
                raise ImageError(
                    f"{path} is a link of uid {status.st_uid}", hint="name another file, or remove the link"
                )
            path = _placed(os.path.join(directory, os.readlink(path)))
    except OSError:
        return path  # a file that is to be made; or check_output() says what is wrong
    for test, what in _IRREGULAR:
        if test(status.st_mode):
            hint = "name the file: --output FILE" if test is stat.S_ISDIR else "write to stdout instead: --output -"
            raise ImageError(f"{path} is {what}", hint=hint)
    return path


def _placed(path: str) -> str:
    """Return ``path`` with its parent directory resolved by the kernel: "link/.." is not this directory.

    Raises OSError, also for a link on the way that the kernel does not follow: proc_sys_fs(5), protected_symlinks.
    """
    directory, name = os.path.split(path.rstrip("/") or "/")
    if name in ("", ".", ".."):
        directory, name = path, ""
    with Fd(os.open(directory or ".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as fd:
        return os.path.join(os.readlink(f"/proc/self/fd/{fd}"), name).rstrip("/") or "/"


def cannot_write(output: str, error: OSError) -> ImageError:
    """The error of an image file that is to be written."""
    hint = filesystems.way_out(error, os.path.dirname(output))
    return ImageError(f"cannot write {output}: {error.strerror}", hint=hint)


# ---------------------------------------------------------------------------
# What is written


class _Content:
    """What an image is written of, and how: see write()."""

    digest = ""  # to be recorded

    def __init__(self, lowerdirs: Sequence[str], image: str, used: str, settings: Settings) -> None:
        self._lowerdirs = tuple(lowerdirs)
        self._image = image
        self._used = used
        self._settings = settings

    def write(self, output: int) -> None:
        """Run mksquashfs in a process of its own, whose mounts go with it. Raises ImageError, OSError."""
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
            f.writelines(_pattern(path) + b"\n" for path in _left_out(self._used, root))
        command += ["-wildcards", "-ef", _SCRATCH + "/excluded", "-e", "dev/*", ".enroot"]
        environ = {key: os.environ[key] for key in ("PATH", "SOURCE_DATE_EPOCH") if key in os.environ}
        # A squashfs has no ACLs; mksquashfs says so of each file.
        run_tool(command, environ=environ, stdin=output, warnings=True, expected="Unrecognised xattr prefix system.")

    def _mount(self) -> str:
        """Enter namespaces of our own, and mount the overlay there. Returns where. Raises ImageError."""
        from enroot_py.base import linux, workers
        from enroot_py.runtime import mounting, namespaces, rootfs, squashfuse

        # Root inside owns every file, so that none is unreadable to mksquashfs.
        namespaces.enter_user(0, 0)
        namespaces.unshare(linux.CLONE_NEWNS)
        server = squashfuse.Server(self._image) if self._image else None
        namespaces.unshare(linux.CLONE_NEWNS)  # the server stays in the other one
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
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return False
    return stat.S_ISREG(status.st_mode) and not status.st_size


def _pattern(path: bytes) -> bytes:
    """A path as mksquashfs takes it with -wildcards: every byte that could mean something has a backslash before it."""
    return b"".join(bytes((c,)) if chr(c).isalnum() or c == 47 or c > 127 else b"\\" + bytes((c,)) for c in path)


def _pseudo_name(path: str) -> bytes:
    """A file name in mksquashfs's pseudo definitions: quoted, a quote or backslash with a backslash before it."""
    return b'"' + os.fsencode(path).replace(b"\\", b"\\\\").replace(b'"', b'\\"') + b'"'
