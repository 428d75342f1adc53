"""``penroot start``: from a name to a running program, in one process, without a shell.

The start path. What is imported here is paid by every start: os and our own
modules, nothing else.
"""

from __future__ import annotations

import errno
import gc
import os
import sys
from _collections_abc import Mapping

from enroot_py import called_as
from enroot_py.base import linux, log, paths, trusted
from enroot_py.base.errors import CommandError, ContainerError, PenrootError, UsageError
from enroot_py.config import files
from enroot_py.config.settings import SETTINGS, Settings, load, nearest, slips, sysconf_path
from enroot_py.runtime import environ, hooks, mounts, namespaces, rc, rootfs
from enroot_py.store import containers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pwd import struct_passwd
    from typing import NoReturn

    from enroot_py.runtime.squashfuse import Server

SYNOPSIS = {
    "start": "start [options] [--] NAME|IMAGE [COMMAND] [ARG...]",
    "batch": "batch [options] [--] CONFIG [COMMAND] [ARG...]",
}
HELP = """\
Start a container and run its command, or COMMAND.

NAME is a container that 'penroot create' made; IMAGE is a squashfs image or a
reference such as docker://ubuntu. CONFIG is a configuration script that says
which with a line #ENROOT_ROOTFS=NAME|IMAGE.

 Options:
   -c, --conf CONFIG        run a configuration script before the container starts
       --device DEVICE      give a device: a name of CDI such as nvidia.com/gpu=0, or a path in /dev
   -e, --env KEY[=VALUE]    set a variable, or take it from the caller
       --join               share the container of equal starts by the same process, as ranks of MPI do
   -m, --mount FSTAB        mount SOURCE:TARGET[:TYPE:OPTIONS]
       --rc SCRIPT          run this script instead of the image's /etc/rc
   -r, --root               be root inside the container
   -w, --rw                 make the root filesystem writable
       --pid, --net, --ipc, --uts
                            give the container namespaces of its own
       --explain            show what would be mounted, set, hooked and run, and why
   -h, --help               this text
"""


def usage(verb: str) -> str:
    """The help text of ``start`` or ``batch``."""
    return f"Usage: {called_as()} {SYNOPSIS[verb]}\n\n{HELP}"


class Options:
    """The command line of ``penroot start``."""

    __slots__ = ("devices", "env", "mounts", "conf", "rc", "explain", "changes", "target", "command")

    def __init__(self) -> None:
        self.devices: list[str] = []
        self.env: list[str] = []
        self.mounts: list[str] = []
        self.conf: list[str] = []
        self.rc: list[str] = []
        self.explain = False
        self.changes: dict[str, bool] = {}
        self.target = ""
        self.command: tuple[str, ...] = ()


FLAGS = {
    "-r": "remap_root",
    "--root": "remap_root",
    "--join": "join",
    "-w": "rootfs_writable",
    "--rw": "rootfs_writable",
    "--pid": "unshare_pid",
    "--net": "unshare_net",
    "--ipc": "unshare_ipc",
    "--uts": "unshare_uts",
}
VALUES = {
    "--device": "devices",
    "-e": "env",
    "--env": "env",
    "-m": "mounts",
    "--mount": "mounts",
    "-c": "conf",
    "--conf": "conf",
    "--rc": "rc",
}


# What options of docker and podman are called here.
_ELSEWHERE = {
    "--gpus": "it is --device nvidia.com/gpu=all",
    "-i": "a container has the terminal of its caller",
    "-t": "a container has the terminal of its caller",
    "--rm": "a start leaves nothing but what --rw lets it write",
    "-v": "it is --mount SOURCE:TARGET",
    "--volume": "it is --mount SOURCE:TARGET",
}


def parse(arguments: list[str], verb: str = "start") -> Options | None:
    """The options of a command line, or None where it asks for help. Raises UsageError."""
    options = Options()
    rest = list(arguments)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        name, equals, value = word.partition("=") if word.startswith("--") else (word[:2], word[2:], word[2:])
        if word == "--":
            break
        if name in ("-h", "--help"):
            return None
        if name in FLAGS and not equals:
            options.changes[FLAGS[name]] = True
        elif name in VALUES:
            if not equals and rest:
                value = rest.pop(0)
            if not value:
                raise mistake(verb, f"option {name} needs a value")
            getattr(options, VALUES[name]).append(value)
        elif word == "--explain":
            options.explain = True
        else:
            meant = nearest(name[2:], [known[2:] for known in (*FLAGS, *VALUES, "--explain", "--help")])
            raise mistake(verb, f"unknown option: {word}", _ELSEWHERE.get(name, meant and f"did you mean --{meant}?"))
    if not rest:
        needs = "a configuration script" if verb == "batch" else "a container or an image"
        raise mistake(verb, f"{verb} needs {needs}")
    options.target, options.command = rest[0], tuple(rest[1:])
    return options


def mistake(verb: str, message: str, hint: str = "") -> UsageError:
    """The error for a command line that does not parse."""
    return UsageError(message, hint=hint or f"{called_as()} {verb} --help", usage=usage(verb))


def main(arguments: list[str], *, batch: bool = False) -> None:
    """Run ``penroot start``, or ``batch``, with ``arguments``. Returns only for --help; raises PenrootError."""
    verb = "batch" if batch else "start"
    options = parse(arguments, verb)
    if options is None:
        sys.stdout.write(usage(verb))
        return
    directives: dict[str, tuple[str, str]] = {}
    if batch:
        options.conf = [options.target]
    if options.conf:
        from enroot_py.runtime import shellhooks

        options.conf = [os.path.realpath(options.conf[-1])]
        directives = shellhooks.directives(options.conf[0], os.environ)
        if batch:
            options.target = directives.get("ENROOT_ROOTFS", ("",))[0] or os.environ.get("ENROOT_ROOTFS", "")
            if not options.target:
                raise UsageError(f"{options.conf[0]} does not say what to start", hint="add a line #ENROOT_ROOTFS=NAME")
    settings = load(os.environ, directives)
    for line in slips(os.environ):
        log.warn(line)
    if options.changes:
        settings = settings.replace("command line", **options.changes)
    if options.devices:
        asked = [settings.devices, *options.devices] if settings.devices else options.devices
        settings = settings.replace("command line", devices=",".join(asked))
    if options.explain:
        explain(find(options.target, settings), settings, options)
        return
    if joins(settings):
        container = enter_shared(settings, options)
    else:
        container = enter_as_asked(find(options.target, settings), settings, options)
    if not privileged(settings):
        namespaces.confine(remap_root=settings.remap_root)
    container.execute(options.command)


def privileged(settings: Settings) -> bool:
    """Whether root keeps his privileges, and so needs no user namespace."""
    return settings.allow_superuser and os.geteuid() == 0


def joins(settings: Settings) -> bool:
    """Whether this start shares a container. Raises UsageError."""
    if settings.join == "auto":
        return settings.mpi and environ.is_rank(os.environ) and not settings.unshare_pid
    if settings.join == "yes" and settings.unshare_pid:
        raise UsageError("--join and --pid exclude each other", hint="processes of one's own end with the first")
    return settings.join == "yes"


def enter_shared(settings: Settings, options: Options) -> Container:
    """Enter the container of the other ranks, or a new one for them to join. Raises PenrootError."""
    from enroot_py.runtime import pmix, ranks

    scratch = make_scratch(settings)
    given = environ.of_options(tuple(options.env), os.environ)
    asked = [os.path.realpath(path) for path in (options.target, *options.rc[-1:]) if os.path.isfile(path)]
    asked += [options.target, *sorted(given), *options.conf, "", *options.mounts]
    record = ranks.Record(asked, settings, os.environ, scratch)
    own = {**ranks.variables(os.environ, settings), **given}
    for name in pmix.FITTED:
        own.pop(name, None)  # the first has found out what the image can take
    joined = record.join()
    if joined is None:
        record.sweep()
        container = enter_as_asked(find(options.target, settings), settings, options)
        record.keep(container.environ, container.origins, own)
        return container
    variables, said = joined
    root = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    image = image_script(root)
    origins = dict.fromkeys([*said, *own], "the launcher")
    return Container({**variables, **own}, origins, image, settings.login_shell)


def enter_as_asked(source: rootfs.Source, settings: Settings, options: Options) -> Container:
    """Enter a container as the command line says. Raises PenrootError."""
    user_mounts = [mounts.parse_option(text, os.environ, f"--mount {text}") for text in options.mounts]
    env = environ.of_options(tuple(options.env), os.environ)
    conf = options.conf[-1] if options.conf else ""
    script = read_script(options.rc[-1]) if options.rc else None
    if source.upper and settings.rootfs_writable:
        from enroot_py.store import claims

        claims.change_alone(source)
    return enter(
        source,
        settings,
        os.environ,
        user_mounts,
        env,
        conf=conf,
        script=script,
        command=options.command,
        superuser=privileged(settings),
    )


def read_script(path: str) -> str:
    try:
        return os.fsdecode(files.script(path))
    except OSError as e:
        raise UsageError(f"--rc {path}: {e.strerror}", hint="--rc names a script of sh") from e


_PIPE = 128 + 13  # main() says so of a reader that is gone


def explain(source: rootfs.Source, settings: Settings, options: Options) -> None:
    """Show what a start would do: by doing it, in a child whose namespaces go with it.

    Nothing outside is changed: a directory that would be written to is covered by an overlay.
    """
    write = sys.stdout.write
    for setting in SETTINGS.values():
        if settings.origin(setting) != "default":
            write(f"setting  {setting.variable}={settings.text(setting)}  ({settings.origin(setting)})\n")
    write(f"rootfs   {source.describe()}{', writable' if settings.rootfs_writable else ''}\n")
    sys.stdout.flush()
    child = os.fork()
    if child:
        status = wait(child)
        if status == _PIPE:
            raise BrokenPipeError
        if status:
            raise ContainerError("it would fail as shown above")
        return
    log.explain = lambda line: print(line, flush=True)
    try:
        container = enter_as_asked(source, settings.replace("--explain", rootfs_writable=False), options)
        for key, value in sorted(container.environ.items()):
            log.explain(f"set      {key}={value}  ({container.origins.get(key, 'login')})")
        log.explain("run      " + " ".join(container.argv(options.command)))
    except PenrootError as e:
        log.error(str(e))
        if e.hint:
            log.hint(e.hint)
        os._exit(1)
    os._exit(0)


def find(target: str, settings: Settings) -> rootfs.Source:
    """The root file system of a container, an image file or a reference."""
    if ":" in target:  # else it costs no import
        from enroot_py.registry import reference

        if reference.is_uri(target):
            from enroot_py.store import pull

            return containers.of_image(target, pull.pull(reference.parse(target), settings))
    return containers.find(target, settings)


_RC = ("/bin/sh", "/etc/rc")
# For sh(1), after /etc/profile: what that adds to the PATH of the image stays, another one does not.
_KEEP_PATH = 'case ":$PATH:" in *":$1:"*) ;; *) PATH=$1 ;; esac; shift; '


class Container:
    """A container that this process has entered: its environment and what its image runs.

    ``origins`` says where each variable came from, for --explain; ``below`` has what --env has covered.
    """

    __slots__ = ("environ", "origins", "image", "login_shell", "below")

    def __init__(
        self,
        environ: dict[str, str],
        origins: dict[str, str],
        image: rc.Exec | None,
        login_shell: bool,
        below: dict[str, str] | None = None,
    ) -> None:
        self.environ = environ
        self.origins = origins
        self.image = image
        self.login_shell = login_shell
        self.below = below or {}

    def argv(self, command: tuple[str, ...]) -> tuple[str, ...]:
        """What runs for ``command``, or for none."""
        if self.image is not None and not self.login_shell:
            return self.image.argv(command)
        # A script that only a shell understands, or no script at all.
        keep = ""
        path: tuple[str, ...] = ()
        if self.login_shell and "PATH" in self.origins:
            keep, path = _KEEP_PATH, (self.environ["PATH"],)
        if os.path.exists("/etc/rc"):
            return ("/bin/sh", "-c", keep + ". /etc/rc", "/etc/rc", *path, *command) if keep else _RC + command
        if command[:1] == ("--",):
            command = command[1:]
        if command and " " in command[0] and not os.path.exists(command[0]):
            return ("/bin/sh", "-c", keep + command[0], "sh", *path, *command[1:])
        if command and not self.login_shell:
            return command
        return ("/bin/sh", "-c", keep + 'exec "$@"', "sh", *path, *command) if command else ("/bin/sh",)

    def execute(self, command: tuple[str, ...]) -> NoReturn:
        """Become ``command``, or the image's own. Raises CommandError, ContainerError."""
        argv = self.argv(command)
        if self.image is None or self.login_shell:
            directory = self.environ["HOME"]
            try:
                os.chdir(directory)
            except OSError:
                directory = "/"  # as login(1) does
                os.chdir(directory)
        else:
            directory = self.image.workdir
            try:
                os.chdir(directory)
            except OSError as e:
                raise ContainerError(f"cannot enter the image's working directory {directory}: {e.strerror}") from e
        # What a shell would set that had run the command.
        self.environ["PWD"] = os.path.normpath(directory)
        self.environ.setdefault("SHLVL", "0")
        execute(argv, self.environ, argv0="-sh" if self.login_shell else "")


def enter(
    source: rootfs.Source,
    settings: Settings,
    host: Mapping[str, str],
    user_mounts: list[mounts.Mount],
    env: Mapping[str, str],
    *,
    conf: str = "",
    script: str | None = None,
    command: tuple[str, ...] = (),
    program: str = "",
    superuser: bool = False,
) -> Container:
    """Move this process into a new container and return what it found there.

    ``conf`` is a configuration script, ``script`` stands for the image's
    /etc/rc, ``command`` is what the container will run, ``program`` what runs
    instead of the image's own script. A ``superuser`` stays in the user namespace
    in which he is root.

    The process keeps its capabilities in the container's user namespace; the
    caller drops them. Raises PenrootError, after which the process is fit only
    to exit: nothing that it mounted outlives it.
    """
    # Nothing here lives long enough to be garbage; with the hooks for devices a
    # collection would cost a tenth of a start.
    gc.disable()
    remap, writable = settings.remap_root, settings.rootfs_writable
    ids = os.geteuid(), os.getegid()
    scratch = make_scratch(settings)
    umask = os.umask(0o022)
    server, made = serve(source, settings, scratch, superuser=superuser)
    # What is of the host comes now: the server of an image starts meanwhile.
    user = account(*ids)
    with open("/proc/self/cgroup", errors="surrogateescape") as f:
        cgroups = f.read()
    mount_point = source.mount_point(scratch)
    variables = {**host, "ENROOT_ROOTFS": mount_point}
    system = site_mounts(settings, host, variables)
    of_site = environ.of_site(settings, host)
    loaded = hooks.load(hooks.STANDARD, settings, host)
    more = unshared(settings)
    if superuser:
        enter_as_superuser(more)
    else:
        enter_namespaces((0, 0) if remap else ids, more)
    rootfs.mount_scratch(scratch)
    root = rootfs.mount(source, scratch, server, writable=writable, made=made)
    context = hooks.Context(root, settings, {}, host, user, cgroups, mount_point)
    scripts = None
    if conf or any(hook.is_script for hook in loaded):
        from enroot_py.runtime.shellhooks import Scripts

        scripts = Scripts(context, scratch)
        if conf:
            scripts.source(conf, command)
            variables = {**context.host, "ENROOT_ROOTFS": mount_point}
            system, of_site = site_mounts(settings, host, variables), environ.of_site(settings, context.host)
    fstab = [*image_mounts(root, settings, variables), *system, *namespace_mounts(settings), *user_mounts]
    for mount in fstab:
        if mount.passno < 0:
            mount.execute(root)
    if more:
        from enroot_py.runtime import isolated

        isolated.complete(root, more)
    if ids[0] == 0:
        from enroot_py.runtime import masks

        masks.cover(root)
    origins: dict[str, str] = {}
    _update(context.environ, origins, environ.of_image(root, context.host), "/etc/environment of the image")
    _update(context.environ, origins, of_site, "environ.d")
    if scripts is not None and conf:
        before = dict(context.environ)
        scripts.environ()
        origins.update(_changed(before, context.environ, f"environ() of {conf}"))
    below = {name: context.environ[name] for name in env if name in context.environ}
    _update(context.environ, origins, env, "--env")  # hooks see these, but cannot override them
    before = dict(context.environ)
    if server is not None and (program or command):
        if not program:
            image = image_script(root)
            program = image.argv(command)[0] if image else "/bin/sh"
        server.read_ahead(root, program, context.environ.get("PATH", ""))
    context.mounted.update((mount.source.rstrip("/"), mount.target.rstrip("/")) for mount in user_mounts)
    hooks.run(loaded, context, scripts.hook if scripts is not None else None)
    if scripts is not None:
        later, of_conf = scripts.finish()
        fstab[-len(user_mounts) or len(fstab) :] = [*later, *user_mounts]
        script = of_conf if script is None else script
    origins.update(_changed(before, context.environ, "hooks"))
    _update(context.environ, origins, env, "--env")
    if script is not None:
        replace_script(root, scratch, script)
    rootfs.hide(scratch)
    for mount in fstab:
        if mount.passno >= 0:
            mount.execute(root)
    image = image_script(root)
    if image is not None and not paths.exists(root, image.workdir):
        make_workdir(root, image.workdir, user_mounts)
    shell = user.pw_shell if paths.exists(root, user.pw_shell) else "/bin/sh"
    if settings.login_shell:
        from enroot_py.runtime import login

        mask = login.prepare(root, context.environ, user=user, as_root=remap, given=bool(command))
        umask = umask if mask is None else mask
    if remap:
        environ.complete(context.environ, "root", "/root", shell)
    else:
        environ.complete(context.environ, user.pw_name, user.pw_dir, shell)
    if not writable:
        rootfs.seal(mount_point)
    os.close(root)
    if ids[0] == 0 and not (superuser or more):
        # What masks.py covers would not stay covered for who is root in the namespace that owns the mounts. Who
        # joins the container enters this one, which so has to own all namespaces that are not the host's.
        myself = os.open("/proc/self", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        rootfs.switch(mount_point)
        namespaces.enter_user(0, 0, myself=myself)
        unshare(linux.CLONE_NEWNS | linux.CLONE_NEWCGROUP)
        os.close(myself)
        namespaces.hide()
    else:
        namespaces.unshare(linux.CLONE_NEWCGROUP)  # not before: hooks look for the limits of the caller
        namespaces.hide()
        rootfs.switch(mount_point)
    os.umask(umask)
    return Container(context.environ, origins, image, settings.login_shell, below)


def _update(target: dict[str, str], origins: dict[str, str], new: Mapping[str, str], origin: str) -> None:
    target.update(new)
    origins.update(dict.fromkeys(new, origin))


def _changed(before: Mapping[str, str], now: Mapping[str, str], origin: str) -> dict[str, str]:
    return {key: origin for key, value in now.items() if before.get(key) != value}


def image_script(root: int) -> rc.Exec | None:
    """What the image's /etc/rc runs, or None where only a shell can tell. Raises ContainerError."""
    return rc.parse(paths.text(root, "/etc/rc"), paths.text(root, "/etc/rc.local"))


def make_workdir(root: int, path: str, user_mounts: list[mounts.Mount]) -> None:
    """Make the image's working directory; in a tree of the host only where the user has mounted that above it."""
    named = any(path.startswith(mount.target.rstrip("/") + "/") for mount in user_mounts)
    try:
        os.close(paths.create(root, path, directory=True, named=named))
    except OSError as e:
        message = f"cannot make the image's working directory {path}: {e.strerror}"
        raise ContainerError(message, hint="make it yourself where it belongs to the host; or: --rc SCRIPT") from e


def replace_script(root: int, scratch: str, script: str) -> None:
    """Let /etc/rc be ``script``, for this start only: a writable container keeps its own."""
    path = scratch + "/rc"
    with open(path, "wb") as f:
        f.write(os.fsencode(script))
    mounts.Mount(path, "/etc/rc", "none", "x-create=file,bind,nosuid,nodev", 0, "--rc").execute(root)


def replaced(mount: mounts.Mount, settings: Settings) -> bool:
    """Whether a namespace of the container's own stands for a system mount."""
    own = {"/proc": settings.unshare_pid, "/sys": settings.unshare_net}
    return mount.source == mount.target and own.get(mount.target, False)


def namespace_mounts(settings: Settings) -> list[mounts.Mount]:
    """The file systems that show a namespace, where the container has its own."""
    found = []
    if settings.unshare_pid:
        options = "x-create=dir,rw,nosuid,nodev,noexec,private"
        found.append(mounts.Mount("proc", "/proc", "proc", options, -1, "--pid"))
    if settings.unshare_net:
        options = "x-create=dir,ro,nosuid,nodev,noexec,private"
        found.append(mounts.Mount("sysfs", "/sys", "sysfs", options, -1, "--net"))
    return found


def unshared(settings: Settings) -> int:
    """The namespaces that a container has of its own by setting, as flags of unshare(2)."""
    flags = linux.CLONE_NEWNET if settings.unshare_net else 0
    flags |= linux.CLONE_NEWIPC if settings.unshare_ipc else 0
    flags |= linux.CLONE_NEWPID if settings.unshare_pid else 0
    return flags | (linux.CLONE_NEWUTS if settings.unshare_uts else 0)


def serve(source: rootfs.Source, settings: Settings, scratch: str, *, superuser: bool) -> tuple[Server | None, int]:
    """Start what serves the root file system: the server of an image, or that, and the detached mount, of an overlay.

    In a user namespace where the caller is root: files of an image belong to root, so they are his, and stay
    his in the one inside it where he is himself. And what runs as root in that one cannot look at the server,
    whose root directory is the node's.
    """
    overlaid = not settings.native_overlayfs and not (source.directory and settings.rootfs_writable)
    if source.shared >= 0 or not (source.image or overlaid):
        return None, source.shared
    if not superuser:
        namespaces.enter_user(0, 0)
        unshare(linux.CLONE_NEWNS)
    server = None
    if source.image:
        from enroot_py.runtime.squashfuse import Server

        server = Server(source.image)
    if not overlaid:
        return server, -1
    from enroot_py.runtime import fuseoverlay

    try:
        return server, fuseoverlay.mount(source, server, scratch, writable=settings.rootfs_writable)
    except OSError as e:
        raise ContainerError(f"cannot mount the root filesystem of {source.name}: {e.strerror}") from e


def enter_namespaces(ids: tuple[int, int], more: int) -> None:
    """Enter new user and mount namespaces as ``ids``, and ``more``.

    Mounts of a namespace with another owner arrive as slaves and locked,
    mount_namespaces(7): nothing done here reaches the host.
    """
    namespaces.enter_user(*ids)
    unshare(linux.CLONE_NEWNS | more)


def enter_as_superuser(more: int) -> None:
    """The same without a user namespace: whoever is root already keeps all that he may do."""
    unshare(linux.CLONE_NEWNS | more)
    # Without another owner, mounts arrive as peers of the host's.
    linux.mount_setattr(linux.AT_FDCWD, "/", linux.AT_RECURSIVE, 0, 0, linux.MS_SLAVE)


def unshare(flags: int) -> None:
    """Unshare namespaces of the container; with a PID namespace, continue as its process 1.

    The process that waits for that one stays behind, outside of the container, and never returns.
    """
    if flags & linux.CLONE_NEWPID:
        namespaces.unshare(linux.CLONE_NEWPID)
        child = os.fork()
        if child:
            namespaces.hide()
            os._exit(wait(child))
        linux.prctl(linux.PR_SET_PDEATHSIG, 9)
    namespaces.unshare(flags & ~linux.CLONE_NEWPID)


def account(uid: int, gid: int) -> struct_passwd:
    """The passwd(5) entry of a user in this group; one with these numbers where the database has none."""
    import pwd

    try:
        found = pwd.getpwuid(uid)
        return pwd.struct_passwd((*found[:3], gid, *found[4:]))
    except KeyError:
        return pwd.struct_passwd((f"user{uid}", "x", uid, gid, "", "/", "/bin/sh"))


def make_scratch(settings: Settings) -> str:
    """The directory under which a start mounts, in its own namespace. Raises ContainerError.

    It is the caller's own, and nobody can swap it: where the one of the settings is not, a private one.
    """
    path = settings.runtime_path
    try:
        trusted.place(path, make=True, strict=True)
        return path
    except OSError as e:
        error = e
    if error.errno == errno.EPERM:
        try:
            private = trusted.temporary(settings.temp_path)
        except OSError as e:
            error = e
        else:
            log.warn(f"not using ENROOT_RUNTIME_PATH={path}, which {error.strerror}: using {private}")
            return private
    from enroot_py.base import filesystems

    raise ContainerError(
        f"cannot create {path}: {error.strerror}", hint=filesystems.way_out(error, path, "ENROOT_RUNTIME_PATH")
    ) from error


def image_mounts(root: int, settings: Settings, variables: Mapping[str, str]) -> list[mounts.Mount]:
    """Mounts that the image's /etc/fstab asks for: its volumes."""
    text, origin = paths.text(root, "/etc/fstab"), "/etc/fstab of the image"
    if settings.image_fstab == "host":
        return list(mounts.parse_file(text, variables, origin))
    return list(mounts.parse_image(text, variables["ENROOT_ROOTFS"], origin))


def site_mounts(settings: Settings, host: Mapping[str, str], variables: Mapping[str, str]) -> list[mounts.Mount]:
    """System mounts and those of mounts.d, the system's and the user's."""
    directories = (sysconf_path(host) + "/mounts.d", settings.config_path + "/mounts.d")
    found: list[mounts.Mount] = []
    for origin, text in files.fragments(directories, ".fstab", mounts.SYSTEM):
        found += mounts.parse_file(text, variables, origin)
    return [mount for mount in found if not replaced(mount, settings)]


def execute(argv: tuple[str, ...], env: dict[str, str], argv0: str = "") -> NoReturn:
    """Become ``argv`` as a shell would find it in the container's PATH. Raises CommandError, 126 or 127."""
    import _signal

    # What Python ignores would stay ignored across exec, signal(7).
    _signal.signal(_signal.SIGPIPE, _signal.SIG_DFL)
    _signal.signal(_signal.SIGXFSZ, _signal.SIG_DFL)
    name = argv[0]
    path = name if "/" in name else find_command(name, env.get("PATH", ""))
    try:
        try:
            os.execve(path, [argv0 or name, *argv[1:]], env)
        except OSError as e:
            if e.errno != errno.ENOEXEC or not os.path.exists("/bin/sh"):
                raise
            os.execve("/bin/sh", ["sh", path, *argv[1:]], env)  # a script without #!, execvp(3)
    except OSError as e:
        missing = e.errno in (errno.ENOENT, errno.ENOTDIR)
        error = CommandError(f"cannot run {name}: {e.strerror}", hint=_advice(path) if missing else "")
        error.exit_code = 127 if missing else 126
        raise error from e
    except (TypeError, ValueError) as e:
        # The image, environ.d and hooks may say what no environment can hold.
        bad = next((key for key, value in env.items() if "\0" in f"{key}{value}" or "=" in key), "")
        raise CommandError(f"cannot run {name}: the variable {bad!r}: {e}", hint="penroot start --explain") from e


def execute_in(target: str, command: tuple[str, ...], env: tuple[str, ...], settings: Settings) -> int:
    """``penroot exec``: run ``command`` in a running container; returns its exit status. Raises PenrootError."""
    from enroot_py.runtime import processes

    given = environ.of_options(env, os.environ)
    outside = os.stat("/proc/self/ns/user").st_ino
    variables, forks = processes.join(processes.find(target, settings))
    superuser = os.geteuid() == 0 and os.stat("/proc/self/ns/user").st_ino == outside
    variables.update(given)
    child = os.fork() if forks else 0
    if child:
        return wait(child)
    if not superuser:
        namespaces.confine(remap_root=os.geteuid() == 0)
    execute(command, variables)


def wait(child: int) -> int:
    """Wait for ``child``, to which SIGTERM and SIGINT go on; returns the status that a shell would report."""
    import _signal

    for number in (_signal.SIGTERM, _signal.SIGINT, _signal.SIGHUP, _signal.SIGQUIT):
        _signal.signal(number, lambda number, _: os.kill(child, number))
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def find_command(name: str, search: str) -> str:
    """Where ``name`` is in the colon-separated ``search``; ``name`` itself where it is nowhere."""
    for directory in search.split(":"):
        path = f"{directory or '.'}/{name}"
        if os.access(path, os.X_OK) and not os.path.isdir(path):
            return path
    return name


def _advice(path: str) -> str:
    if os.path.exists(path):
        return "the file exists: its interpreter (#! line or ELF loader) does not, or it is for another architecture"
    if path.startswith("-"):
        return "what comes behind the container is its command: options go before it"
    return "the command is looked up inside the container"
