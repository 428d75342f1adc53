"""``penroot-unshare``, ``penroot-mount`` and ``penroot-switchroot``: the steps of a start, as programs for bash hooks.

unshare (alias nsenter) creates or joins namespaces. mount executes the mounts of an fstab(5) beneath a root directory.
switchroot changes the root directory and drops privileges. Without arguments, a program shows its usage, as in enroot.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterable
from typing import NoReturn

from enroot_py.base import linux, paths
from enroot_py.base.errors import CommandError, ConfigError, MountError, PenrootError, UsageError
from enroot_py.base.fds import Fd
from enroot_py.config import files
from enroot_py.runtime import etc, execute, fstab, isolated, mounting, namespaces, rootfs, supervise

_SPACES = {  # in the order of joining: the user namespace comes first and gives the right to join the others
    "--user": ("user", linux.CLONE_NEWUSER),
    "--pid": ("pid", linux.CLONE_NEWPID),
    "--ipc": ("ipc", linux.CLONE_NEWIPC),
    "--uts": ("uts", linux.CLONE_NEWUTS),
    "--net": ("net", linux.CLONE_NEWNET),
    "--cgroup": ("cgroup", linux.CLONE_NEWCGROUP),
    "--mount": ("mnt", linux.CLONE_NEWNS),
}
_UNSHARE = """\
Usage: {} [options] [--] COMMAND [ARG...]

Run a command in new namespaces. Default: as root, in a new user namespace
and a new mount namespace.

 Options:
   --user --mount --pid --net --ipc --uts --cgroup   namespaces to create, or to join
   --remap-root      be root in the new user namespace (default: keep your user id)
   --target PID      join these namespaces of process PID, and always its cgroup namespace
   --envfd FD        read the environment, lines KEY=VALUE, from file descriptor FD
   --envfile FILE    read the environment, lines KEY=VALUE, from FILE
   --workdir DIR     change to DIR
"""
_MOUNT = """\
Usage: {} [--root DIR] [--pass N] [--image FSTAB] FSTAB...

Mount the entries of FSTAB, or of stdin if it is '-'.

 Options:
   --root DIR        mount beneath DIR (default: /)
   --pass N          mount only entries whose passno is N (default: 0)
   --image FSTAB     mount the fstab of an image, which may only name tmpfs mounts and
                     directories beneath ENROOT_ROOTFS
"""
_SWITCHROOT = """\
Usage: {} [options] [--] ROOTFS [COMMAND] [ARG...]

 Options:
   --login           use a login shell
   --norc            skip the image's command script, /etc/rc
   --exec            execute COMMAND directly, without shell or script
   --rcfile FILE     run FILE instead of the image's command script
   --envfile FILE    read the environment, lines KEY=VALUE, from FILE (default: the caller's)
   --env KEY=VALUE   set a variable
   --workdir DIR     change to DIR inside
   --lock            enter a second user namespace, in which root cannot change the mounts
   --net --uts       with --lock: create a network or UTS namespace that belongs to this
                     second user namespace
   --drop            drop capabilities even if the caller is root
   --keyring         create a session keyring without the caller's keys
   --close           close all descriptors except stdin, stdout and stderr
"""
_DEFAULT_SEARCH = "/bin:/usr/bin"
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def main() -> None:
    """Run the program that sys.argv[0] names."""
    program = os.path.basename(sys.argv[0])
    run = switchroot if program.endswith("switchroot") else mount if program.endswith("mount") else unshare
    try:
        run(program, sys.argv[1:])
        sys.stdout.flush()
    except (PenrootError, OSError) as e:
        reason = str(e.strerror) if isinstance(e, OSError) else str(e)
        hint = "" if isinstance(e, (OSError, CommandError)) or not e.hint else f"; {e.hint}"
        sys.stderr.write(f"{program}: {reason}{hint}\n")
        sys.exit(1 if isinstance(e, OSError) else e.exit_code)


class _Options:
    """A parsed command line: ``flags``, the ``values`` of options by name, and the ``rest``."""

    def __init__(self, words: list[str], flags: set[str], values: set[str]) -> None:
        """Raises UsageError for an option that is neither in ``flags`` nor in ``values``."""
        self.flags: set[str] = set()
        self.values: dict[str, list[str]] = {}
        self.rest = list(words)
        self.help = False
        while self.rest and self.rest[0].startswith("-") and self.rest[0] != "-":
            word = self.rest.pop(0)
            name, equals, value = word.partition("=")
            if word == "--":
                break
            if word in ("--help", "-h"):
                self.help = True
                break
            if word in flags:
                self.flags.add(word)
            elif name in values:
                if not equals and not self.rest:
                    raise UsageError(f"option {name} needs a value")
                self.values.setdefault(name, []).append(value if equals else self.rest.pop(0))
            else:
                raise UsageError(f"unknown option: {word}")

    def value(self, name: str) -> str | None:
        return self.values[name][-1] if name in self.values else None


def mount(program: str, words: list[str]) -> None:
    """``mount [--root DIR] [--pass N] [--image FSTAB] FSTAB...``. Raises PenrootError."""
    options = _Options(words, set(), {"--root", "--pass", "--image"})
    image, number = options.value("--image"), options.value("--pass") or "0"
    if not number.removeprefix("-").isdecimal():
        raise UsageError(f"--pass must be a number, not '{number}'")
    if options.help or not options.rest and image is None:
        sys.stdout.write(_MOUNT.format(program))
        return
    directory = options.value("--root") or "/"
    try:
        root = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as e:
        raise UsageError(f"cannot open {directory}: {e.strerror}") from e
    _check_kernel()
    os.umask(0o022)
    variables = dict(os.environ)
    if image is not None:
        rootfs_path = variables.get("ENROOT_ROOTFS", "")
        _mount_all(fstab.parse_image(_text(image), rootfs_path, "/etc/fstab of the image"), root, int(number))
    for name in options.rest:
        _mount_all(fstab.parse_file(_text(name), variables, "stdin" if name == "-" else name), root, int(number))


def _check_kernel() -> None:
    try:
        linux.mount_setattr(-1, "", 0, 0, 0, 0)
    except OSError as e:
        if e.errno == errno.ENOSYS:
            raise MountError(f"this kernel is too old: Linux {linux.FLOOR} or later is needed") from e


def _mount_all(mounts: Iterable[mounting.Mount], root: int, number: int) -> None:
    is_host_root = os.path.samestat(os.fstat(root), os.stat("/"))
    for entry in mounts:
        if entry.passno != number:
            continue
        if entry.fstype == mounting.SQUASHFS:
            message = f"cannot mount {entry.source}: a squashfs file needs penroot start or srun"
            raise MountError(f"{entry.origin}: {message}")
        if is_host_root:  # links of the host may lead to any mount, but links of an image must not lead out of its root
            above, name = os.path.split(os.path.normpath(entry.target))
            entry.target = os.path.join(os.path.realpath("/" + above), name)
        try:
            fstab.execute(entry, root)
        except MountError as e:
            raise MountError(f"{entry.origin}: {e}") from e


def _text(name: str) -> str:
    try:
        if name == "-":
            with open(0, "rb", closefd=False) as f:
                return os.fsdecode(f.read())
        return os.fsdecode(files.script(name))
    except OSError as e:
        raise ConfigError(f"cannot read {name}: {e.strerror}") from e


def unshare(program: str, words: list[str]) -> None:
    """``unshare [options] COMMAND [ARG...]``: run a command in new or joined namespaces. Raises PenrootError."""
    options = _Options(words, {*_SPACES, "--remap-root"}, {"--target", "--envfd", "--envfile", "--workdir"})
    if options.help or not options.rest:
        sys.stdout.write(_UNSHARE.format(program))
        return
    remap = "--remap-root" in options.flags
    flags = sum(flag for name, (_, flag) in _SPACES.items() if name in options.flags)
    workdir, target = options.value("--workdir"), options.value("--target")
    if target is not None:
        if not target.isdecimal():
            raise UsageError(f"not a process id: {target}")
        _join(target, flags | linux.CLONE_NEWCGROUP, workdir)
    else:
        if not flags and not remap and "nsenter" not in program:
            flags, remap = linux.CLONE_NEWUSER | linux.CLONE_NEWNS, True
        _create(flags, remap=remap)
        if workdir is not None:
            _enter(workdir)
    variables = dict(os.environ)
    if (number := options.value("--envfd")) is not None:
        variables = _variables(int(number) if number.isdecimal() else -1, number)
    if (path := options.value("--envfile")) is not None:
        variables = _variables(path, path)
    _execute(options.rest, variables)


def _execute(command: list[str], variables: dict[str, str]) -> NoReturn:
    """Execute a command. Without PATH, search for the command as execvp(3) does. Raises CommandError."""
    name, path = command[0], command[0]
    if "/" not in name and "PATH" not in variables:
        path = next(filter(os.path.exists, execute.candidates(name, _DEFAULT_SEARCH)), f"/bin/{name}")
    execute.execute((path, *command[1:]), variables, argv0=name)


def _enter(directory: str) -> None:
    try:
        os.chdir(directory)
    except OSError as e:
        raise UsageError(f"cannot change to {directory}: {e.strerror}") from e


def _variables(file: int | str, name: str) -> dict[str, str]:
    try:
        with open(file, "rb") as f:
            pairs = (line.partition("=") for line in os.fsdecode(f.read()).split("\n"))
            return {key: value for key, equals, value in pairs if key and equals}
    except OSError as e:
        raise UsageError(f"cannot read {name}: {e.strerror}") from e


def _create(flags: int, *, remap: bool) -> None:
    """Create the namespaces ``flags``. Raises NamespaceError."""
    user, other_flags = flags & linux.CLONE_NEWUSER, flags & ~linux.CLONE_NEWUSER
    if user:
        namespaces.enter_user(*((0, 0) if remap else (os.geteuid(), os.getegid())))
        if not remap:
            supervise.keep_capabilities()
    if other_flags:
        namespaces.unshare(other_flags)
    if other_flags & linux.CLONE_NEWNET:
        isolated.raise_loopback()
    if other_flags & linux.CLONE_NEWNS and not user:  # in a new user namespace, the kernel makes mounts slaves
        linux.mount_setattr(linux.AT_FDCWD, "/", linux.AT_RECURSIVE, 0, 0, linux.MS_SLAVE)
    if other_flags & linux.CLONE_NEWPID:
        _fork()


def _join(target: str, flags: int, workdir: str | None) -> None:
    """Enter namespaces of a process. Open all of them first, because its mount namespace may have another /proc."""
    spaces = []
    for name, flag in _SPACES.values():
        if flags & flag:
            try:
                space = os.open(f"/proc/{target}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC)
            except OSError as e:
                raise UsageError(f"cannot open the {name} namespace of process {target}: {e.strerror}") from e
            if not os.path.samestat(os.fstat(space), os.stat(f"/proc/self/ns/{name}")):
                spaces.append((name, flag, space))
    try:  # before joining: /proc/PID/cwd names the directory only from outside
        directory = os.open(workdir, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC) if workdir is not None else -1
    except OSError:
        directory = -1
    # Without hide(), root in the container could read this process's memory, and its descriptors of host files, until
    # the command is executed.
    namespaces.hide()
    rootfs.import_no_files()
    for name, flag, space in spaces:
        try:
            with Fd(space):
                linux.setns(space, flag)
        except OSError as e:
            raise UsageError(f"cannot join the {name} namespace of process {target}: {e.strerror}") from e
    joined = {name for name, _, _ in spaces}
    if "user" in joined and os.geteuid():
        supervise.keep_capabilities()
    if "pid" in joined:
        _fork()
    if directory >= 0:
        os.fchdir(directory)
    elif workdir is not None:
        _enter(workdir)


def _fork() -> None:
    """Continue in a child, the first process of a new PID namespace. The parent exits with the child's status."""
    child = supervise.fork()
    if child:
        namespaces.hide()
        supervise.end(supervise.wait(child))


def switchroot(program: str, words: list[str]) -> None:
    """``switchroot [options] ROOTFS [COMMAND] [ARG...]``. Raises PenrootError, OSError."""
    flags = {"--login", "--norc", "--exec", "--lock", "--net", "--uts", "--drop", "--keyring", "--close"}
    options = _Options(words, flags, {"--rcfile", "--envfile", "--workdir", "--env"})
    if options.help or not options.rest:
        sys.stdout.write(_SWITCHROOT.format(program))
        return
    assignments = [text.partition("=") for text in options.values.get("--env", [])]
    for name, equals, _ in assignments:
        if not name or not equals:
            raise UsageError(f"--env {name}: not KEY=VALUE")
    rootfs_path, *command = options.rest
    if "--close" in options.flags:
        linux.close_range(3, 0xFFFFFFFF, linux.CLOSE_RANGE_CLOEXEC)
    execute.withhold(new_keyring="--keyring" in options.flags)
    rcfile = options.value("--rcfile")
    script = "" if rcfile is None else _copy_to_memory(rcfile)
    environ = dict(os.environ)
    if (envfile := options.value("--envfile")) is not None:
        environ = etc.read_environment(_text(envfile))
    environ.update((name, value) for name, _, value in assignments)
    _switch(rootfs_path)
    _complete(environ, login="--login" in options.flags)
    if (workdir := options.value("--workdir")) is not None:
        _enter(workdir)
    _confine(options.flags)
    if not script and "--norc" not in options.flags and os.path.exists("/etc/rc"):
        script = "/etc/rc"
    if "--exec" in options.flags and command:
        environ["PWD"] = os.getcwd()  # as a shell would set it
        environ.setdefault("SHLVL", "0")
        _execute(command, environ)
    _run_shell(script, command, environ, login="--login" in options.flags)


def _copy_to_memory(path: str) -> str:
    """Copy the command script into memory. Return a path that stays valid when the root directory changes."""
    fd = os.memfd_create("rc", 0)
    with open(fd, "wb", closefd=False) as f:
        f.write(os.fsencode(_text(path)))
    os.lseek(fd, 0, os.SEEK_SET)
    return f"/proc/self/fd/{fd}"


def _switch(directory: str) -> None:
    """Make a directory the root of this mount namespace. Raises PenrootError."""
    try:
        os.chdir(directory)
    except OSError as e:
        raise UsageError(f"cannot enter {directory}: {e.strerror}") from e
    try:
        linux.mount(None, "/", None, linux.MS_REC | linux.MS_SLAVE)  # so that unmounts do not reach the host
        try:
            rootfs.switch(".")
        except OSError as e:
            if e.errno not in (errno.EINVAL, errno.EBUSY):
                raise
            linux.mount(".", ".", None, linux.MS_BIND | linux.MS_REC)  # pivot_root(2) needs a mount point
            rootfs.switch(os.path.realpath("."))
    except OSError as e:
        raise MountError(f"cannot make {directory} the root: {e.strerror}") from e
    try:
        linux.unshare(linux.CLONE_NEWCGROUP)
    except OSError as e:
        if e.errno != errno.EINVAL:  # EINVAL: the kernel has no cgroup namespaces
            raise


def _confine(flags: set[str]) -> None:
    if "--lock" in flags:
        namespaces.enter_user(os.geteuid(), os.getegid())
        net, uts = "--net" in flags and linux.CLONE_NEWNET, "--uts" in flags and linux.CLONE_NEWUTS
        namespaces.unshare(linux.CLONE_NEWNS | net | uts)
        if net:
            isolated.raise_loopback()
    namespaces.confine(remap_root=os.geteuid() == 0 and "--drop" not in flags)


def _complete(environ: dict[str, str], *, login: bool) -> None:
    """Set the unset variables that login(1) sets, from the image's passwd(5) and login.defs(5).

    With ``login``, also set the umask and enter HOME.
    """
    with Fd(os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as root:
        entries = (line.split(":") for line in _lines(root, "/etc/passwd"))
        entry = next((e for e in entries if len(e) > 6 and e[2] == str(os.geteuid())), None)
        defs = dict(line.split(None, 1) for line in _lines(root, "/etc/login.defs") if len(line.split()) > 1)
    if entry:
        shell = entry[6] if entry[6] and os.access(entry[6], os.X_OK) else "/bin/sh"
        variables = {"USER": entry[0], "LOGNAME": entry[0], "HOME": entry[5] or "/", "SHELL": shell}
        for name, value in variables.items():
            environ.setdefault(name, value)
    environ.setdefault("HOME", "/" if os.geteuid() else "/root")
    environ.setdefault("SHELL", "/bin/sh")
    if login:
        environ.setdefault("TERM", "dumb")
        path = defs.get("ENV_PATH" if os.geteuid() else "ENV_SUPATH", "").strip().strip('"').removeprefix("PATH=")
        if path:
            environ.setdefault("PATH", path)
        mask = defs.get("UMASK", "").strip()
        if mask and not mask.strip("01234567"):
            os.umask(int(mask, 8) & 0o777)
        os.chdir(environ["HOME"] if os.path.isdir(environ["HOME"]) else "/")
    environ.setdefault("PATH", _PATH)


def _lines(root: int, path: str) -> list[str]:
    try:
        return os.fsdecode(paths.read(root, path)).splitlines()
    except OSError:
        return []


def _run_shell(script: str, command: list[str], environ: dict[str, str], *, login: bool) -> NoReturn:
    """Run the script or the command in a shell, or an interactive shell. Raises CommandError."""
    shell = environ["SHELL"] if os.access(environ["SHELL"], os.X_OK) else "/bin/sh"
    if not os.access(shell, os.X_OK) and not script and command:  # the image has no shell
        _execute(command, environ)
    words = [script, *command] if script else ["-c", 'exec "$@"', "sh", *command] if command else []
    name = ("-" if login else "") + os.path.basename(shell)
    execute.execute((shell, *words), environ, argv0=name)
