"""Mount squashfs images by FUSE, and start squashfuse as their server. Sources: fuse(4), squashfuse(1)."""

from __future__ import annotations

import errno
import os
from _signal import SIG_BLOCK, SIG_SETMASK, SIGCHLD, SIGKILL, pthread_sigmask, sigtimedwait

from enroot_py.base import carried, errors, linux, log, paths, proc, signals, superblock
from enroot_py.base.errors import ImageError, NamespaceError
from enroot_py.base.fds import Fd
from enroot_py.runtime import hostfiles, mounting

TYPE_CHECKING = False
if TYPE_CHECKING:
    from enroot_py.runtime.sharing import Entry

_TICK_S = 0.1
_STOPPED_AFTER_S = 3  # give up a starting server that a signal has stopped for a longer time
_START_TIMEOUT_S = 60  # the image may be on a slow file system
_READ_AHEAD_WINDOW_BYTES = 128 << 10  # of a FUSE mount
SERVER_FDS = 8  # open files that a server needs
_PROGRAM_READ_AHEAD_BYTES = 8 << 20
# By default, glibc returns the memory of each decompressed block to the kernel, and requests memory again for the next
# block. This takes a fifth of the server's time. mallopt(3).
_ENVIRON = {
    "PATH": "/usr/bin:/bin",
    "MALLOC_MMAP_THRESHOLD_": "8388608",
    "MALLOC_TRIM_THRESHOLD_": "134217728",
    "MALLOC_TOP_PAD_": "1048576",
}

# With these options, the kernel asks squashfuse only once for a name, not every second. squashfuse_ll needs no options.
_KEEP_NAMES = ("-o", "entry_timeout=31536000,attr_timeout=31536000")  # seconds

INSTEAD = "penroot create IMAGE, or ENROOT_UNPACK=yes"

starting: list[Server] = []  # the servers that this process has started
_served = ""  # the image that this process has mounted


class Server:
    """The FUSE server of a squashfs image, and its detached mount.

    Create the server in a mount namespace that this process leaves later: the server stays there, and so keeps no mount
    of the container in use. The server starts while the caller continues. It ends with the FUSE connection. The kernel
    closes the connection with the last mount: when all processes of all containers that use the server have ended.
    Containers of one image may share a server (sharing.py).
    """

    def __init__(
        self, image: str, opened: int = -1, *, superuser: bool = False, offset: int = 0, entry: Entry | None = None
    ) -> None:
        """Start a server, or join the running server of ``entry`` (see sharing.py).

        Raises ImageError if no FUSE server is installed, NamespaceError if /dev/fuse cannot be opened.

        The image begins at ``offset`` of its file. A new server is recorded in ``entry``. ``opened`` is the descriptor
        of a squashfs file that is mounted as data (data.py), or -1. For a ``superuser``, files keep their owners, and
        the kernel checks modes in data too. For other users, all files belong to the user, as in an unpacked image.
        """
        self._note(image, is_root=opened < 0)
        self._lifeline = hostfiles.lifelines.get(image, -1)
        if entry is not None and entry.pidfd >= 0 and self._join(entry):
            return
        program = _program(image, opened, keeps_owners=superuser, offset=offset)
        device = open_device(INSTEAD)
        lock = entry.lock if entry is not None else -1
        name = ["-o", f"fsname={entry.key}"] if entry is not None and lock >= 0 else []
        with device as fuse:
            self._mount = mount(fuse, checks_modes=superuser or opened < 0)
            try:
                command = [*program, *name, image if opened < 0 else f"/dev/fd/{opened}", f"/dev/fd/{fuse}"]
                self._starter = _spawn(command, {fuse, opened, self._lifeline, lock})
            except OSError as e:
                from enroot_py.base import filesystems

                raise ImageError(
                    f"cannot execute {program[0]}: {e.strerror}", hint=filesystems.OF_PROCESS.get(e.errno or 0, "")
                ) from e
        starting.append(self)
        if entry is not None and lock >= 0:
            entry.note(self._starter)

    @classmethod
    def mounted(cls, image: str, mount: int) -> Server:
        """Return a Server for ``mount``, the detached mount of a server that runs already."""
        self = cls.__new__(cls)
        self._note(image, is_root=True)
        self._mount, self._starter, self._lifeline = Fd(mount), 0, -1
        return self

    def _note(self, image: str, *, is_root: bool) -> None:
        global _served
        self.image = image
        self.ended = False  # True if the server could not read the file
        self.failure: ImageError | None = None
        if is_root:
            _served = image
            errors.of_image = why

    def _join(self, entry: Entry) -> bool:
        """Mount the file system of the running server in ``entry``. Return False if that failed."""
        self._starter = 0
        try:
            with entry.open_device() as fuse:
                self._mount = mount(fuse)
            joined = True
        except OSError:
            joined = False
        entry.forget()
        hostfiles.note_shared(self.image, joined=joined)
        self._lifeline = -1
        return joined

    def attach(self, target: str) -> None:
        """Wait until the server runs, and attach the mount to ``target``. Raises ImageError if the server fails."""
        self.wait()
        mounting.attach_at(self._mount, target)

    def wait(self) -> None:
        """Wait until the server runs. Raises ImageError if the server fails."""
        self.await_start()
        if self.failure:
            raise self.failure

    def await_start(self) -> None:
        """Wait until the server runs. Store a failure for wait()."""
        starter, self._starter = self._starter, 0
        if not starter:
            return
        try:
            status = wait_for(starter)
        except TimeoutError as e:
            hint = "penroot ended the server; start again"
            self.failure = ImageError(f"cannot mount {self.image}: squashfuse {e}", hint=hint)
            return
        if os.WIFSIGNALED(status):
            self.failure = _killed(self.image)
        elif status:
            self.ended = True
            hint = f"the file is damaged, or squashfuse lacks its compression: check with unsquashfs -s {self.image}"
            if os.sysconf("SC_OPEN_MAX") < SERVER_FDS:
                from enroot_py.base import filesystems

                hint = filesystems.OF_PROCESS[errno.EMFILE]
            self.failure = ImageError(f"cannot mount {self.image}: squashfuse failed", hint=hint)
        else:
            hostfiles.note_start(self._lifeline)

    def read_ahead(self, root: int, program: str, search: str) -> None:
        """Make the server decompress a program while this process continues.

        Without this, execve(2) would wait for each page. For a dynamic program, also decompress the loader and the C
        library beside the loader. ``search`` is the PATH.
        """
        for directory in ("",) if "/" in program else search.split(":"):
            try:
                start, _ = _read_ahead(root, f"{directory}/{program}")
                name = start.find(b"/lib")  # PT_INTERP, elf(5): linkers put it into the first page
                loader = os.fsdecode(start[name : start.find(b"\0", name)])
                if start.startswith(b"\x7fELF") and "/ld-" in loader:
                    _, place = _read_ahead(root, loader)
                    _read_ahead(root, place.rpartition("/")[0] + "/libc.so.6")
                return
            except OSError:  # not found, or not a file: execve(2) will report it
                continue


def why(error: BaseException) -> ImageError | None:
    """Return an error of the mounted image or its server if that explains ``error``, else None."""
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, OSError):
        seen = seen.__cause__ or seen.__context__
    if not _served or seen is None:
        return None
    fault = seen.errno if seen.errno != errno.ENOENT else _fault()
    if fault in (errno.ENOTCONN, errno.ECONNABORTED):
        return _killed(_served)
    return _damaged(_served) if fault == errno.EIO else None


def report_killed(image: str = "") -> None:
    """Warn of each FUSE server that was killed while its container ran.

    The servers are children of this process if it has PR_SET_CHILD_SUBREAPER.
    """
    if any(server.failure for server in starting):
        return  # the container did not start, and the error explains it
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None:
            return
        name = proc.Stat(ended.si_pid).comm
        _, status = os.waitpid(ended.si_pid, 0)
        if os.WIFSIGNALED(status) and name in ("squashfuse", "squashfuse_ll", "fuse-overlayfs"):
            how = f" by signal {os.WTERMSIG(status)}"
            log.warn(hostfiles.killed(name, image or _served or hostfiles.ROOT, how))


def _fault() -> int | None:
    """Look for unreadable names in the root file system. Return the errno, or None if there are none.

    EIO: the image is damaged. ENOTCONN: the server is gone. squashfuse returns ENOENT for a damaged inode, so a
    directory may list names that cannot be found.
    """
    for directory in ("/", "/bin", "/usr", "/usr/bin", "/etc"):
        try:
            names = os.listdir(directory)
            if directory == "/" and not names:
                return errno.EIO  # glibc takes ENOENT for the end of a directory; / has at least /proc
            for name in names:
                os.lstat(f"{directory}/{name}")
        except OSError as e:
            if e.errno != errno.ENOENT:
                return e.errno
            if e.filename != directory:
                return errno.EIO
    return None


def _killed(image: str) -> ImageError:
    return ImageError(
        f"the image {image} is no longer readable: its squashfuse was killed",
        hint="out of memory? see --mem and dmesg",
    )


def _damaged(image: str) -> ImageError:
    return ImageError(f"the image {image} is damaged: squashfuse cannot read it", hint="import or copy it again")


def wait_for(starter: int) -> int:
    """Wait for a process that starts a FUSE server. Return its wait status, or SIGKILL if the server was killed.

    libfuse forks the server and waits until the server reports on a pipe. If the server is killed before that, libfuse
    waits for ever, because it holds both ends of the pipe. Raises TimeoutError with the reason, after killing both
    processes.
    """
    before = pthread_sigmask(SIG_BLOCK, (SIGCHLD,))
    ticks = stopped = 0
    try:
        while True:
            ended, status = os.waitpid(starter, os.WNOHANG)
            if ended:
                return status
            if sigtimedwait((SIGCHLD,), _TICK_S):
                continue
            ticks += 1
            processes = {pid: proc.look(pid) for pid in (starter, *proc.children(starter))}
            states = [stat.state for stat in processes.values() if stat]
            stopped += not {*states}.isdisjoint("Tt")
            reason = "is stopped" if stopped * _TICK_S > _STOPPED_AFTER_S else ""
            reason = reason or (
                f"does not answer for {_START_TIMEOUT_S} seconds" if ticks * _TICK_S > _START_TIMEOUT_S else ""
            )
            if reason or "Z" in states and states[0] == "S":
                for pid in processes:
                    try:
                        os.kill(pid, SIGKILL)
                    except ProcessLookupError:
                        continue
                if reason:
                    raise TimeoutError(reason)
                return int(SIGKILL)
    finally:
        pthread_sigmask(SIG_SETMASK, before)


def _spawn(command: list[str], fds: set[int]) -> int:
    """Start a FUSE server that becomes a daemon, with the open descriptors ``fds``. Return the process to wait for.

    A descriptor of -1 is ignored. This uses posix_spawn(3), because fork(2) takes a millisecond in a Python process.
    """
    actions: list[tuple[object, ...]] = [(os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDWR, 0)]
    actions += [(os.POSIX_SPAWN_DUP2, 0, 1), (os.POSIX_SPAWN_DUP2, 0, 2)]
    # The server must not keep a pipe of the caller open, so let execve(2) close other descriptors. POSIX_SPAWN_CLOSE
    # fails for descriptors above the limit of open files: posix_spawn(3).
    changed = [(fd, True) for fd in map(int, os.listdir("/proc/self/fd")) if fd > 2 and _is_inheritable(fd)]
    changed += [(fd, False) for fd in fds if fd >= 0]
    for fd, inheritable in changed:
        os.set_inheritable(fd, not inheritable)
    try:
        # A signal that ends or stops the container must not reach its server.
        return os.posix_spawn(command[0], command, _ENVIRON, file_actions=actions, setsigmask=signals.UNHEARD)
    finally:
        for fd, inheritable in changed:
            os.set_inheritable(fd, inheritable)


def _is_inheritable(fd: int) -> bool:
    try:
        return os.get_inheritable(fd)
    except OSError:  # the descriptor of the directory that was listed
        return False


def _program(image: str, opened: int, *, keeps_owners: bool, offset: int) -> list[str]:
    """Return the FUSE server for ``image`` with its options. Raises ImageError if none is installed.

    Without ``keeps_owners``, the server shows all files as the user's. A user namespace with one user maps no other
    owners: their directories would belong to nobody, and overlayfs would not change them, path_resolution(7).
    """
    offset_option = ["-o", f"offset={offset}"] if offset else []
    owner: list[str] = []
    if not keeps_owners:
        try:
            with Fd(os.open(image, os.O_RDONLY | os.O_CLOEXEC) if opened < 0 else os.dup(opened)) as file:
                if not superblock.is_all_root(file, offset):
                    owner = ["-o", f"uid={os.geteuid()},gid={os.getegid()}"]
        except OSError as e:
            raise ImageError(f"cannot read {image}: {e.strerror}") from e
    quick = carried.installed("squashfuse_ll")
    program = quick if not owner or _takes_owner(quick) else carried.installed("squashfuse")
    if program := program or carried.installed("squashfuse"):
        command = [*(carried.command(os.path.basename(program)) or [program]), *offset_option, *owner]
        return [*command, *_KEEP_NAMES] if owner and program != quick else command
    unpack = f"the image: penroot create {image}" if opened < 0 else f"it: unsquashfs {image}"
    raise ImageError(
        f"cannot mount {image}: squashfuse is not installed on {os.uname().nodename}",
        hint=f"install the package squashfuse, or unpack {unpack}",
    )


def _takes_owner(program: str) -> bool:
    """Return whether squashfuse_ll has the options uid and gid, added in 0.2.0. squashfuse has them from libfuse."""
    if not program:
        return False
    with Fd(os.open(program, os.O_RDONLY | os.O_CLOEXEC)) as text:
        return b"uid=%d" in text.content()


def open_device(instead: str) -> Fd:
    """Open /dev/fuse, in the user namespace that mounts the file system (see fuse(4)). Raises NamespaceError.

    ``instead`` is for the hint: a command or setting that works without /dev/fuse.
    """
    try:
        return Fd(os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC))
    except OSError as e:
        from enroot_py.runtime import pods

        raise NamespaceError(f"cannot open /dev/fuse: {e.strerror}", hint=pods.without_fuse(instead)) from e


def mount(fuse: int, *, checks_modes: bool = True) -> Fd:
    """Return a detached mount of the file system whose server holds ``fuse``. Raises OSError."""
    attributes = linux.MOUNT_ATTR_NOSUID | linux.MOUNT_ATTR_NODEV | linux.MOUNT_ATTR_RDONLY
    options = mount_options(fuse, checks_modes=checks_modes)
    return mounting.mount_filesystem("fuse.squashfuse", "squashfuse", options, attributes)


def mount_options(fuse: int, *, checks_modes: bool = True) -> list[str]:
    """Return the mount options for a FUSE file system that the whole container can read."""
    ids = f"user_id={os.geteuid()}", f"group_id={os.getegid()}"
    return [f"fd={fuse}", "rootmode=40000", *ids, "allow_other", *["default_permissions"] * checks_modes]


def _read_ahead(root: int, path: str) -> tuple[bytes, str]:
    """Return the first page of a file, and its real path beneath the root. Raises OSError."""
    with paths.open_in(root, path, os.O_RDONLY | os.O_NONBLOCK) as fd:
        # One call reads at most one window.
        for offset in range(0, min(os.fstat(fd).st_size, _PROGRAM_READ_AHEAD_BYTES), _READ_AHEAD_WINDOW_BYTES):
            os.posix_fadvise(fd, offset, _READ_AHEAD_WINDOW_BYTES, os.POSIX_FADV_WILLNEED)
        place = os.readlink(f"/proc/self/fd/{fd}").removeprefix(os.readlink(f"/proc/self/fd/{root}"))
        return os.pread(fd, 4096, 0), place
