"""Run a bundle: parse its options and start its image as ``penroot start`` does.

header.sh unpacks the interpreter, the modules and the programs of the bundle into a directory, and calls run(). run()
removes the directory before the container's program begins: by then, everything needed from the directory is in
memory or mounted. If the image had to be unpacked into the directory, a process outside the container removes the
directory after the end of the container.
"""

from __future__ import annotations

import errno
import os
import sys
from _signal import SIG_DFL, SIG_IGN, SIGCHLD, SIGHUP, SIGKILL, SIGTERM, getsignal, signal
from marshal import loads

from enroot_py.base import carried, linux, log, signals, trees
from enroot_py.base.errors import ConfigError, ImageError, PenrootError, UsageError
from enroot_py.base.fds import Fd
from enroot_py.base.operations import Operation
from enroot_py.cli import start
from enroot_py.config.settings import Settings
from enroot_py.runtime import fstab, mounting, namespaces, rootfs, squashfuse, supervise
from enroot_py.runtime.rootfs import Source
from enroot_py.store import squashfs

ABOUT = "about"  # the file in which `penroot bundle` writes metadata
PREFIX = "penroot-bundle."
_LIVE = "live"  # a file that is open for writing while the directory is in use
_SCRATCH = "runtime"
_STARTING_S, _ABANDONED_S = 60, 3600
_SHOW_PROGRESS_BYTES = 64 << 20
_FUSE = os.makedev(10, 229)  # /dev/fuse: the kernel's devices.txt

USAGE = """\

 Options:
   -i, --info           Display the information about this bundle
   -k, --keep           Keep the bundle extracted in the target directory
   -q, --quiet          Suppress the progress of the extraction
   -v, --verify         Verify this bundle, and that the host can run it
   -x, --extract        Extract the bundle in the target directory and exit

   -c, --conf CONFIG    Specify a configuration script to run before the container starts
   -e, --env KEY[=VAL]  Export an environment variable inside the container
   -m, --mount FSTAB    Perform a mount from the host inside the container (colon-separated)
       --rc SCRIPT      Override the command script inside the container
   -r, --root           Ask to be remapped to root inside the container
   -w, --rw             Make the container root filesystem writable
       --pid            Run the container in a new PID namespace
       --net            Run the container in a new network namespace (loopback only)
       --ipc            Run the container in a new IPC namespace
       --uts            Run the container in a new UTS namespace
"""
_LETTERS = {"help": "h", "info": "i", "verify": "v", "keep": "k", "extract": "x", "quiet": "q"}
_ACTIONS = {word: action for action, letter in _LETTERS.items() for word in (f"-{letter}", f"--{action}")}
_FINAL_ACTIONS = ("help", "info", "verify")  # options after one of these are not read
_START_FLAGS = ("-r", "--root", "-w", "--rw", "--pid", "--net", "--ipc", "--uts")
_START_VALUES = ("-c", "--conf", "-e", "--env", "-m", "--mount", "--rc")

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


def run(words: list[str]) -> int:
    """Run the bundle with the arguments from header.sh.

    Returns the exit status unless a container starts. Raises PenrootError.
    """
    carried.directory, path, offset, live, checksum, *words = words
    sys.argv[0] = path
    for name in ("LD_PRELOAD", "LD_AUDIT"):  # header.sh renamed these, to hide them from the bundle's Python
        if (value := os.environ.pop(f"PENROOT_{name}", None)) is not None:
            os.environ[name] = value
    work = WorkDirectory(carried.directory, int(live or -1))
    try:
        return Bundled(path, int(offset), checksum, work).run(words)
    finally:
        work.remove()


class WorkDirectory:
    """The directory that header.sh unpacked into.

    This process removes the directory. If this process is killed, a later run of any bundle removes the directory.
    """

    def __init__(self, path: str, live: int) -> None:
        parent, self._name = os.path.split(path)
        self.path = path
        self._live = live
        self._parent = os.open(parent or "/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._outlives = False
        if live >= 0:
            os.set_inheritable(live, False)
        for number in (SIGHUP, SIGTERM):
            if getsignal(number) == SIG_DFL:
                signal(number, self._end)

    def _end(self, number: int, _: object) -> None:
        self.remove()
        signal(number, SIG_DFL)
        os.kill(os.getpid(), number)

    def remove(self) -> None:
        """Remove the directory, unless another process will remove it. This also works inside the container."""
        if self._outlives:
            return
        try:
            _remove(self._parent, self._name)
        except OSError as e:
            if e.errno != errno.EBUSY:
                log.warn(f"cannot delete {self.path}: {e.strerror}")
                return
            linux.umount2(f"{self.path}/{_SCRATCH}", linux.MNT_DETACH)  # still mounted, because a start has failed
            _remove(self._parent, self._name)

    def sweep(self) -> None:
        """Remove directories that killed bundles of this user have left in the same parent directory."""
        for name in os.listdir(self._parent):
            if name.startswith(PREFIX) and name != self._name and _is_abandoned(self._parent, name):
                try:
                    _remove(self._parent, name)
                except OSError as e:
                    log.warn(f"cannot delete {name}, left by a killed bundle: {e.strerror}")

    def outlive(self) -> None:
        """Fork, and continue in the child. The parent waits for the child, then removes the directory.

        The parent exits with the child's status. If the parent is killed, a watcher process kills the child and removes
        the directory.
        """
        child = supervise.fork()
        if not child:
            self._outlives = True
            return
        with Fd(os.pidfd_open(os.getpid())) as waiting, Fd(os.pidfd_open(child)) as container:
            self._watch(waiting, child, container)
        status = supervise.wait(child)
        self.remove()
        supervise.end(status)

    def _watch(self, waiting: int, child: int, container: int) -> None:
        """Start the watcher process: detached, in its own session, and without the caller's descriptors."""
        if middle := os.fork():
            os.waitpid(middle, 0)
            return
        try:
            if os.fork():
                return
            os.setsid()
            for number in signals.CATCHABLE - {SIGCHLD}:
                signal(number, SIG_IGN)
            linux.close_others((waiting, container, self._parent, self._live))
            os.chdir("/")
            _await(waiting)
            if os.path.exists(self.path):
                os.kill(child, SIGKILL)
                _await(container)
                _remove(self._parent, self._name)
        finally:
            os._exit(0)


def _await(process: int) -> None:
    from select import POLLIN, poll

    waiting = poll()
    waiting.register(process, POLLIN)
    waiting.poll()


def _remove(parent: int, name: str) -> None:
    try:
        trees.remove_in(parent, name)
    except FileNotFoundError:
        return  # another process removed it first


def _is_abandoned(parent: int, name: str) -> bool:
    """Return whether the directory ``name`` is this user's, and is no longer in use.

    While a process uses the directory, it has the file ``live`` open for writing: then fcntl(2) refuses a read lease,
    even if the process is in another PID namespace. Without lease support, or without the file, the age of the
    directory decides.
    """
    from fcntl import F_RDLCK, F_SETLEASE, fcntl
    from time import time

    try:
        state = os.stat(name, dir_fd=parent, follow_symlinks=False)
        if state.st_uid != os.geteuid():
            return False
        with Fd(os.open(f"{name}/{_LIVE}", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)) as fd:
            fcntl(fd, F_SETLEASE, F_RDLCK)
            return True
    except FileNotFoundError:
        return time() - state.st_mtime > _STARTING_S
    except OSError as e:
        return e.errno == errno.EINVAL and time() - state.st_mtime > _ABANDONED_S


class BundleOptions(start.Options):
    """The command line of a bundle."""

    __slots__ = ("actions",)

    def __init__(self) -> None:
        super().__init__()
        self.actions: set[str] = set()


def parse(words: list[str]) -> BundleOptions:
    """Parse a command line. Ignore the words after --help, --info or --verify. Raises UsageError."""
    options = BundleOptions()
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        name, equals, value = word.partition("=") if word.startswith("--") else (word[:2], word[2:], word[2:])
        if word == "--":
            break
        if word in _ACTIONS:
            options.actions.add(_ACTIONS[word])
            if _ACTIONS[word] in _FINAL_ACTIONS:
                break
        elif word in _START_FLAGS:
            options.changes[start.FLAGS[word]] = True
        elif name in _START_VALUES and (value or not equals):
            value = value or (rest.pop(0) if rest else "")
            if not value:
                raise UsageError(f"option {name} needs a value")
            getattr(options, start.VALUES[name]).append(value)
        else:
            raise UsageError(f"unknown option: {word}")
    options.command = tuple(rest)
    return options


class Bundled:
    """The bundle at ``path``, with the image at ``offset``. ``checksum``, if not "", covers all but the header."""

    def __init__(self, path: str, offset: int, checksum: str, work: WorkDirectory) -> None:
        self.path = path
        self.offset = offset
        self.checksum = checksum
        self.work = work
        with open(f"{work.path}/{ABOUT}", "rb") as f:
            self.about = loads(f.read())

    def run(self, words: list[str]) -> int:
        """Carry out a command line. Returns the exit status unless a container starts. Raises PenrootError."""
        self.work.sweep()
        try:
            options = parse(words)
        except UsageError as e:  # usage on stdout and exit status 0, as in enroot's bundles
            sys.stdout.write(self._usage())
            sys.stdout.flush()
            log.error(str(e))
            return 0
        for name, action in (("help", self._help), ("info", self._info), ("verify", self._verify)):
            if name in options.actions:
                return int(action())
        self._check_sum()
        self._start(options)
        return 0

    def _usage(self) -> str:
        about = f"\n{self.about['description']}\n" if self.about["description"] else ""
        return f"Usage: {os.path.basename(self.path)} [options] [--] [COMMAND] [ARG...]\n{about}{USAGE}"

    def _help(self) -> int:
        sys.stdout.write(self._usage())
        return 0

    def _info(self) -> int:
        about = self.about
        lines = [f"Checksum: {self.checksum}"] if self.checksum else []
        lines += [f"Compression: {about['compression']}", f"Description: {about['description'] or 'none'}"]
        lines += [f"Runtime version: {about['version']}", f"Target directory: {about['target']}"]
        sys.stdout.write("\n".join([*lines, f"Uncompressed size: {-(-about['size'] // 1024)} KB", ""]))
        return 0

    def _check_sum(self) -> None:
        """Raises ImageError if the bundle does not match its checksum."""
        if self.checksum:
            from enroot_py.base import run

            with Fd(os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)) as file:
                os.lseek(file, self.about["start"], os.SEEK_SET)
                output = run.Program(["sha256sum"], stdin=file).run()
            if output.split()[:1] != [self.checksum]:
                raise ImageError(f"Checksum validation failed: {self.path} is damaged, copy it again")

    def _verify(self) -> bool:
        """Check the bundle and the host. Return True if the host lacks a requirement. Raises ImageError."""
        from enroot_py.base import run

        self._check_sum()
        if self.checksum:
            _report("Checksum", "", True)
        try:
            squashfs.check(self.path, self.offset)
            listing = [*carried.command("unsquashfs"), "-offset", str(self.offset), "-ls", self.path]
            run.Program(listing, environ={"PATH": "/usr/bin:/bin"}).run()
        except PenrootError as e:
            raise ImageError(f"{self.path} is damaged, copy it again") from e
        _report("Image tables", "", True)
        is_able = _report("User and mount namespaces", "required: see user_namespaces(7)", _succeeds(_enter))
        has_seccomp = os.access("/proc/sys/kernel/seccomp/actions_avail", os.R_OK)
        is_able = _report("System call filter", "required: CONFIG_SECCOMP_FILTER", has_seccomp) and is_able
        _report("Overlay file system in a user namespace", "optional", _succeeds(self._mount_overlay))
        benefit = "optional: needed to start without extracting"
        _report("/dev/fuse", benefit, _succeeds(_mount_fuse))
        _report("squashfuse", benefit, bool(carried.installed("squashfuse_ll", "squashfuse")))
        return not is_able

    def _mount_overlay(self) -> None:
        _enter()
        for name in ("lower", "upper", "work"):
            os.mkdir(f"{self.work.path}/{name}")
        rootfs.mount_scratch(self.work.path + "/lower")
        scratch = self.work.path + "/lower"
        os.close(rootfs.overlay((f"{scratch}/lower",), f"{scratch}/upper", f"{scratch}/work", ["userxattr"]))

    def _start(self, options: BundleOptions) -> None:
        """Start the container: this process becomes its program. Raises PenrootError."""
        for path in (*options.conf, *options.rc):
            if not os.access(path, os.R_OK):
                raise ConfigError(f"cannot read {path}")
        for name in options.env:
            if "=" not in name and not (name.isascii() and name.isidentifier()):
                hint = f"set the value: --env {name}=VALUE"
                raise UsageError(f"--env {name}: a shell cannot export a variable of this name", hint=hint)
        for name, value in self.about["settings"].items():
            os.environ.setdefault(name, value)
        os.environ["ENROOT_SYSCONF_PATH"] = self.work.path + "/etc/system"
        os.environ["ENROOT_CONFIG_PATH"] = self.work.path + "/etc/user"
        os.environ["ENROOT_RUNTIME_PATH"] = f"{self.work.path}/{_SCRATCH}"
        settings = start.read_settings(options, batch=False)
        superuser = namespaces.privileged(settings)
        for text in options.mounts:
            if (mount := fstab.parse_option(text, os.environ, f"--mount {text}")).fstype == mounting.SQUASHFS:
                raise UsageError(f"cannot mount {mount.source}: only penroot start and srun mount squashfs files")
        source = self._source(settings, options)
        with Operation("start", settings):
            container = start.entered(source, settings, options)
        self.work.remove()
        start.execute(container, settings, options.command, superuser=superuser)

    def _source(self, settings: Settings, options: BundleOptions) -> Source:
        """Return the root file system: kept by --keep, mounted from the bundle, or unpacked. Raises PenrootError."""
        quiet = "quiet" in options.actions
        if options.actions & {"keep", "extract"}:
            target = self._keep(settings, quiet=quiet)
            if "extract" in options.actions:
                self.work.remove()
                sys.exit()
            return Source(os.path.basename(target), directory=target)
        if carried.installed("squashfuse_ll", "squashfuse") and _succeeds(_mount_fuse):
            source = Source(self.path, image=self.path)
            source.offset = self.offset
            return source
        directory = self.work.path + "/rootfs"
        self.work.outlive()
        self._unpack(directory, settings, quiet=quiet)
        return Source("rootfs", directory=directory)

    def _keep(self, settings: Settings, *, quiet: bool) -> str:
        """Unpack the image into the target directory and return its path. Raises PenrootError."""
        from enroot_py.base import making
        from enroot_py.config.words import expand

        target = os.path.abspath(expand(self.about["target"], dict(os.environ)))
        if os.path.lexists(target):
            hint = "remove it, or run without --keep and --extract"
            raise ImageError(f"File already exists: {target}", hint=hint)
        try:
            mask = os.umask(0o077)
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.umask(mask)
            making.sweep(os.path.dirname(target))
            with making.Directory(target, 0o700) as directory:
                self._unpack(directory.path, settings, quiet=quiet)
                directory.publish()
        except OSError as e:
            hint = "change to a directory that you can write to, or run without --keep and --extract"
            raise ImageError(f"cannot keep this bundle in {target}: {e.strerror}", hint=hint) from e
        return target

    def _unpack(self, directory: str, settings: Settings, *, quiet: bool) -> None:
        """Unpack the image into an empty or new directory. Raises PenrootError, OSError."""
        from enroot_py.store import unsquashfs

        os.makedirs(directory, 0o755, exist_ok=True)
        state = os.statvfs(directory)
        free, needed = state.f_bavail * state.f_frsize, self.about["size"]
        if free < needed:
            sizes = f"{needed >> 20} MiB are needed, {free >> 20} MiB are free"
            hint = "set ENROOT_TEMP_PATH to another directory"
            raise ImageError(f"not enough space in {directory}: {sizes}", hint=hint)
        shows = not quiet and log.on_terminal() and needed > _SHOW_PROGRESS_BYTES
        progress_pid = _show_progress(directory, free, needed) if shows else 0
        try:
            unsquashfs.unpack(self.path, directory, settings, offset=self.offset)
        finally:
            if progress_pid:
                os.kill(progress_pid, SIGKILL)
                os.waitpid(progress_pid, 0)
        if shows:
            log.info("Extracting 100%")


def _show_progress(directory: str, free: int, needed: int) -> int:
    """Start a process that shows the progress, estimated by the file system's free space. Return its PID."""
    if child := os.fork():
        return child
    from time import sleep

    try:
        linux.prctl(linux.PR_SET_PDEATHSIG, SIGKILL)
        while True:
            state = os.statvfs(directory)
            done = (free - state.f_bavail * state.f_frsize) * 100 // needed
            log.rewrite(f"Extracting {min(max(done, 0), 99)}%")
            sleep(0.1)
    finally:
        os._exit(1)


def _report(check: str, importance: str, passed: bool) -> bool:
    sys.stdout.write(f"{check:45}: {'OK' if passed else f'KO ({importance})'}\n")
    return passed


def _succeeds(trial: Callable[[], None]) -> bool:
    """Run ``trial`` in a child process. Return True if it raises nothing."""
    sys.stdout.flush()
    if not (child := os.fork()):
        status = 1
        try:
            trial()
            status = 0
        except (PenrootError, OSError):
            pass
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1] == 0


def _enter() -> None:
    namespaces.enter_user(0, 0)
    namespaces.unshare(linux.CLONE_NEWNS)


def _mount_fuse() -> None:
    """Try to mount a FUSE file system, without a server, in new namespaces. Raises PenrootError, OSError."""
    _enter()
    with squashfuse.open_device("") as fuse:
        if os.fstat(fuse).st_rdev != _FUSE:
            raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))
        mounting.mount_filesystem("fuse.squashfuse", "squashfuse", squashfuse.mount_options(fuse), 0)
