"""Squashfs images by FUSE: we mount, and hand the descriptor to squashfuse. Source: fuse(4), squashfuse(1)."""

from __future__ import annotations

import errno
import os

from enroot_py.base import errors, linux, paths, signals
from enroot_py.base.errors import ImageError, NamespaceError
from enroot_py.base.fds import Fd
from enroot_py.runtime import mounts, rootfs

_WINDOW = 128 << 10  # bytes, the read-ahead window of a FUSE mount
_AHEAD = 8 << 20  # bytes of a program that are read ahead
# glibc gives each block that the server decompresses back to the kernel, and takes it anew
# for the next one, unless told otherwise, mallopt(3): a fifth of the server's time.
_ENVIRON = {
    "PATH": "/usr/bin:/bin",
    "MALLOC_MMAP_THRESHOLD_": "8388608",
    "MALLOC_TRIM_THRESHOLD_": "134217728",
    "MALLOC_TOP_PAD_": "1048576",
}

INSTEAD = "penroot create IMAGE; ENROOT_UNPACK=yes"

_served = ""  # the image that this process has mounted


class Server:
    """The process that serves a squashfs image to /dev/fuse, and what it serves as a detached mount.

    To be made in a mount namespace that the container then leaves for one of its
    own: the server stays there, so that it pins nothing, and ends when the kernel
    ends the connection, with the last process of the container. It starts while
    the caller goes on.
    """

    def __init__(self, image: str, opened: int = -1, *, checks_modes: bool = True) -> None:
        """Raises ImageError where no FUSE server is installed, NamespaceError where /dev/fuse is closed to us.

        Of a file that is no image ``opened`` is the descriptor. Where nobody ``checks_modes``, who mounts it reads all.
        """
        global _served
        self.image = image
        if opened < 0:
            _served = image
            errors.of_image = why
        program = installed("squashfuse_ll", "squashfuse")
        if not program:
            unpack = f"the image: penroot create {image}" if opened < 0 else f"it: unsquashfs {image}"
            raise ImageError(
                f"cannot mount {image}: squashfuse is not installed on {os.uname().nodename}",
                hint=f"install the package squashfuse, or unpack {unpack}",
            )
        device = open_device(INSTEAD)
        attributes = linux.MOUNT_ATTR_NOSUID | linux.MOUNT_ATTR_NODEV | linux.MOUNT_ATTR_RDONLY
        with device as fuse:
            options = mount_options(fuse, checks_modes=checks_modes)
            self._mount = mounts.mount_filesystem("fuse.squashfuse", "squashfuse", options, attributes)
            try:
                self._starter = _spawn([program, image if opened < 0 else "/dev/fd/4", "/dev/fd/3"], fuse, opened)
            except OSError as e:
                from enroot_py.base import filesystems

                raise ImageError(
                    f"cannot execute {program}: {e.strerror}", hint=filesystems.OF_PROCESS.get(e.errno or 0, "")
                ) from e

    def attach(self, target: str) -> None:
        """Mount what is served, now that the server runs. Raises ImageError where it does not."""
        self.wait()
        rootfs.attach(self._mount, target)

    def wait(self) -> None:
        """Wait until the server runs. Raises ImageError where it does not."""
        starter, self._starter = self._starter, 0
        if not starter:
            return
        try:
            _, status = os.waitpid(starter, 0)
        except ChildProcessError:  # a new PID namespace came between: it is our parent's
            status = 0
        if os.WIFSIGNALED(status):
            raise _killed(self.image)
        if status:
            raise ImageError(
                f"cannot mount {self.image}: squashfuse failed",
                hint=f"it is damaged, or of a compression that squashfuse does not know: unsquashfs -s {self.image}",
            )

    def read_ahead(self, root: int, program: str, search: str) -> None:
        """Have it decompress a program that will run, while this process goes on.

        Otherwise that comes page by page when it is executed. Of a dynamic program also
        its loader, and the C library beside that. ``search`` is the PATH.
        """
        for directory in ("",) if "/" in program else search.split(":"):
            try:
                start, _ = _read_ahead(root, f"{directory}/{program}")
                name = start.find(b"/lib")  # PT_INTERP of elf(5): linkers put it into the first page
                loader = os.fsdecode(start[name : start.find(b"\0", name)])
                if start.startswith(b"\x7fELF") and "/ld-" in loader:
                    _, place = _read_ahead(root, loader)
                    _read_ahead(root, place.rpartition("/")[0] + "/libc.so.6")
                return
            except OSError:  # it is not there, or no file: who executes it will say so
                continue


def why(error: BaseException) -> ImageError | None:
    """What is wrong with the image that this process has mounted, if that is why it failed with ``error``."""
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, OSError):
        seen = seen.__cause__ or seen.__context__
    if not _served or seen is None:
        return None
    if seen.errno in (errno.ENOTCONN, errno.ECONNABORTED):
        return _killed(_served)
    if seen.errno == errno.EIO or seen.errno == errno.ENOENT and _loses_names():
        return _damaged(_served)
    return None


def _loses_names() -> bool:
    """Whether a directory of the container lists what then cannot be found: squashfuse says so of a damaged inode."""
    if not os.listdir("/"):
        return True  # glibc takes ENOENT for the end of a directory, and here is at least /proc
    for directory in ("/", "/bin", "/usr", "/usr/bin", "/etc"):
        try:
            for name in os.listdir(directory):
                os.lstat(f"{directory}/{name}")
        except OSError as e:
            if e.errno == errno.EIO or e.filename != directory:
                return True
    return False


def _killed(image: str) -> ImageError:
    return ImageError(
        f"the image {image} cannot be read any more: squashfuse, which served it, was killed",
        hint="out of memory? see --mem and dmesg",
    )


def _damaged(image: str) -> ImageError:
    return ImageError(f"the image {image} is damaged: squashfuse cannot read it", hint="import or copy it again")


def _spawn(command: list[str], fuse: int, file: int) -> int:
    """Start a FUSE server that becomes a daemon; the process to wait for. ``fuse`` is its 3, and a ``file`` its 4.

    Not by fork(2), which costs a Python process a millisecond.
    """
    # First the one whose number the other will get.
    kept = sorted([(fuse, 3)] + [(file, 4)] * (file >= 0), key=lambda pair: pair[0] != 3)
    actions: list[tuple[object, ...]] = [(os.POSIX_SPAWN_DUP2, *pair) for pair in kept]
    actions += [(os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDWR, 0)]
    actions += [(os.POSIX_SPAWN_DUP2, 0, 1), (os.POSIX_SPAWN_DUP2, 0, 2)]
    # Whoever waits for the end of a pipe that we were given shall not wait for the server.
    actions += [(os.POSIX_SPAWN_CLOSE, fd) for fd in map(int, os.listdir("/proc/self/fd")) if fd > 2 + len(kept)]
    # What ends or stops the container leaves alone what serves it.
    return os.posix_spawn(command[0], command, _ENVIRON, file_actions=actions, setsigmask=signals.UNHEARD)


def installed(*names: str) -> str:
    """The first of these FUSE servers that there is, not by the PATH of a user; "" for none."""
    for name in names:
        for directory in ("/usr/bin", "/usr/local/bin", "/bin"):
            if os.access(f"{directory}/{name}", os.X_OK):
                return f"{directory}/{name}"
    return ""


def open_device(instead: str) -> Fd:
    """/dev/fuse, in the user namespace of the mount, fuse(4); ``instead`` needs none. Raises NamespaceError."""
    try:
        return Fd(os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC))
    except OSError as e:
        from enroot_py.runtime import pods

        raise NamespaceError(f"cannot open /dev/fuse: {e.strerror}", hint=pods.without_fuse(instead)) from e


def mount_options(fuse: int, *, checks_modes: bool = True) -> list[str]:
    """How the file system of an open /dev/fuse is mounted for all of a container."""
    ids = f"user_id={os.geteuid()}", f"group_id={os.getegid()}"
    return [f"fd={fuse}", "rootmode=40000", *ids, "allow_other", *["default_permissions"] * checks_modes]


def _read_ahead(root: int, path: str) -> tuple[bytes, str]:
    """Ask for a file; its first page, and where it really is beneath the root. Raises OSError."""
    with paths.open_in(root, path, os.O_RDONLY | os.O_NONBLOCK) as fd:
        # The kernel takes no more than one window of a call.
        for offset in range(0, min(os.fstat(fd).st_size, _AHEAD), _WINDOW):
            os.posix_fadvise(fd, offset, _WINDOW, os.POSIX_FADV_WILLNEED)
        place = os.readlink(f"/proc/self/fd/{fd}").removeprefix(os.readlink(f"/proc/self/fd/{root}"))
        return os.pread(fd, 4096, 0), place
