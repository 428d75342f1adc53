"""``penroot start`` and ``batch``: parse the command line, and start the container through runtime/enter.py.

Imports slow down every start: import only os, sys and modules of penroot here.
"""

from __future__ import annotations

import os
import sys

from enroot_py import called_as
from enroot_py.base import log, operations
from enroot_py.base.errors import UsageError
from enroot_py.base.fds import Fd
from enroot_py.base.frozen import Frozen
from enroot_py.base.operations import Operation
from enroot_py.config import files
from enroot_py.config.settings import Settings, load
from enroot_py.config.table import slips
from enroot_py.config.words import nearest
from enroot_py.runtime import environ, etc, fstab, namespaces, rootfs
from enroot_py.runtime.enter import Start, enter
from enroot_py.runtime.execute import Container, close_descriptors
from enroot_py.runtime.rootfs import Source
from enroot_py.store import containers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import NoReturn, Protocol

    from enroot_py.runtime.mounting import Mount

    class StartDescription(Protocol):
        """The description of one start, such as an environment file. Methods raise PenrootError."""

        @property
        def mounts(self) -> tuple[Mount, ...]: ...

        host: dict[str, str]

        @property
        def identity(self) -> str: ...
        @property
        def target(self) -> str: ...
        def settings(self, settings: Settings) -> Settings: ...
        def variables(self, image: Mapping[str, str]) -> dict[str, tuple[str | None, str]]: ...
        def fit(self, container: Container, command: tuple[str, ...]) -> Container: ...


SYNOPSIS = {
    "start": "start [options] [--] NAME|IMAGE [COMMAND] [ARG...]",
    "batch": "batch [options] [--] CONFIG [COMMAND] [ARG...]",
}
HELP = """\
Start a container and run its command, or COMMAND.

NAME is a container created by 'penroot create'. IMAGE is a squashfs image or a
reference such as docker://ubuntu. CONFIG is a configuration script with a line
#ENROOT_ROOTFS=NAME|IMAGE.

 Options:
   -c, --conf CONFIG        run a configuration script before the start
   -d, --detach             run in the background, and print the name
   -e, --env KEY[=VALUE]    set KEY, or copy it from your environment
   -m, --mount FSTAB        mount SOURCE:TARGET[:OPTIONS], such as /a:/b:ro, or
                            SOURCE:TARGET:TYPE[:OPTIONS]
       --name NAME          name a container that runs in the background
       --rc SCRIPT          run this script instead of the image's /etc/rc
   -r, --root               be root inside the container
   -w, --rw                 make the root filesystem writable
       --rw=disk            keep changes in a directory that disappears at the end
       --pid, --net, --ipc, --uts
                            use private PID, network, IPC or UTS namespaces
       --workdir DIR        run in DIR instead of the image's working directory
       --explain            print mounts, variables and hooks without a start
   -h, --help               show this help
"""


def usage(verb: str) -> str:
    """Return the help text of ``start`` or ``batch`` with its usage line."""
    return f"Usage: {called_as()} {SYNOPSIS[verb]}\n\n{help_text()}"


def help_text() -> str:
    """Return HELP with the options of features inserted."""
    flags = feature_flags().values()
    shown = {row.name: f"{row.name}{'=' if row.name in FLAGS else ' '}{row.metavar}" for row in flags}
    rows = ((f"       {shown[row.name]}".ljust(27), row.help) for row in flags)
    lines = "".join(f"{name} {text}\n" if len(name) == 27 else f"{name}\n{'':28}{text}\n" for name, text in rows)
    return HELP.replace("       --explain ", f"{lines}       --explain ")


class FeatureFlag(Frozen):
    """An option that an optional feature adds to ``start``. A flag has no metavar.

    If FLAGS also has ``name``, as for --net, this row is for the form --net=VALUE. ``change`` returns the settings with
    the value applied. ``describe`` returns the description of the start.
    """

    name: str
    metavar: str
    help: str
    change: Callable[[Settings, str], Settings] | None = None
    describe: Callable[[str], StartDescription] | None = None


def feature_flags() -> dict[str, FeatureFlag]:
    """Return the options of features by name."""
    from enroot_py.base.features import plugged

    return {row.name: row for feature in plugged("flags") for row in feature.FLAGS}


def changed(settings: Settings, name: str, value: str) -> Settings:
    """Return the settings with an option of a feature applied. Raises UsageError."""
    row = feature_flags().get(name)
    if row is None or row.change is None:
        raise UsageError(f"this penroot has no {name}")
    return row.change(settings, value)


class Options:
    """The parsed command line of ``penroot start``."""

    __slots__ = (
        *("env", "of_features", "file", "mounts", "conf", "rc", "explain", "changes", "target", "command"),
        *("detach", "name", "workdir", "on_disk"),
    )

    def __init__(self) -> None:
        self.env: list[str] = []
        self.file: StartDescription | None = None
        self.of_features: list[tuple[FeatureFlag, str]] = []
        self.mounts: list[str] = []
        self.conf: list[str] = []
        self.rc: list[str] = []
        self.explain = False
        self.detach = False
        self.name: list[str] = []
        self.workdir: list[str] = []
        self.changes: dict[str, bool] = {}
        self.on_disk = False
        self.target = ""
        self.command: tuple[str, ...] = ()


FLAGS = {
    "-r": "remap_root",
    "--root": "remap_root",
    "-w": "rootfs_writable",
    "--rw": "rootfs_writable",
    "--pid": "unshare_pid",
    "--net": "unshare_net",
    "--ipc": "unshare_ipc",
    "--uts": "unshare_uts",
}
VALUES = {
    "-e": "env",
    "--env": "env",
    "-m": "mounts",
    "--mount": "mounts",
    "-c": "conf",
    "--conf": "conf",
    "--rc": "rc",
    "--name": "name",
    "--workdir": "workdir",
}
SWITCHES = {"-d": "detach", "--detach": "detach", "--explain": "explain"}

_TARGET = "a container or an image"
_NAME_HINT = "{0} start --detach --name NAME IMAGE, or {0} create --name NAME IMAGE && {0} start NAME"
# For options of docker and podman: the line to type instead. {0} stands for penroot, {1} stands for the option.
_INSTEAD = {
    **dict.fromkeys(("-i", "-t", "--interactive", "--tty"), "remove {1}: a container has its caller's terminal"),
    "-p": "{0} start --net=pasta --publish HOST:CONTAINER NAME (without --net, NAME has the host's network)",
    **dict.fromkeys(("-u", "--user"), "{0} start --root NAME (without --root you stay yourself)"),
    **dict.fromkeys(("-v", "--volume"), "{0} start --mount SOURCE:TARGET[:ro] NAME"),
    "-w": "{0} start --workdir DIR NAME COMMAND",
    "--entrypoint": "{0} start --rc SCRIPT NAME COMMAND",
    "--gpus": "{0} start --device nvidia.com/gpu=all NAME",
    "--network": "{0} start --net=none|pasta NAME (without --net, NAME has the host's network)",
    "--rm": "remove {1}: only '{0} create' leaves a container behind",
}


def parse(arguments: list[str], verb: str = "start") -> Options | None:
    """Parse a command line. Return None for --help. Raises UsageError."""
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
            getattr(options, VALUES[name]).append(_value(verb, name, value, [] if equals else rest))
        elif word in SWITCHES:
            setattr(options, SWITCHES[word], True)
        elif name == "--rw":
            if value != "disk":
                raise mistake(verb, f"unknown value: {word}", "use --rw, or --rw=disk for changes on disk")
            options.on_disk = options.changes["rootfs_writable"] = True
        else:
            row = _feature_flag(verb, word, name)
            text = _value(verb, name, value, [] if equals else rest) if row.metavar else ""
            options.of_features.append((row, text))
    if rest:
        options.target, options.command = rest[0], tuple(rest[1:])
        if "rootfs_writable" in options.changes and options.target.startswith("/") and os.path.isdir(options.target):
            message = f"{options.target} is a directory: -w means --rw, and takes no value"
            raise mistake(verb, message, _INSTEAD["-w"].format(called_as()))
    elif verb == "batch" or not described_by(options):  # the description may name the image
        raise mistake(verb, f"{verb} needs {'a configuration script' if verb == 'batch' else _TARGET}")
    return options


def _value(verb: str, name: str, value: str, rest: list[str]) -> str:
    """Return the value of an option: the next word of ``rest``, or else ``value``. Raises UsageError."""
    value = rest.pop(0) if rest else value
    if not value:
        raise mistake(verb, f"option {name} needs a value")
    return value


def _feature_flag(verb: str, word: str, name: str) -> FeatureFlag:
    """Return the feature's option ``name``. Raises UsageError if there is none."""
    rows = feature_flags()
    row = rows.get(name)
    if row is None or not row.metavar and word != name:
        similar = nearest(name[2:], [known[2:] for known in (*FLAGS, *VALUES, *SWITCHES, *rows, "--help")])
        hint = _INSTEAD.get(name, similar and f"did you mean --{similar}?")
        raise mistake(verb, f"unknown option: {word}", hint.format(called_as(), word))
    return row


def described_by(options: Options) -> tuple[FeatureFlag, str] | None:
    """Return the last option that describes the start, and the value of this option."""
    return next(((row, value) for row, value in reversed(options.of_features) if row.describe), None)


def read_description(options: Options, verb: str) -> None:
    """Read the description of a start. If it names an image, all arguments are the command. Raises PenrootError."""
    row, value = described_by(options) or (None, "")
    if row is None or row.describe is None:
        return
    if verb == "batch":
        raise mistake(verb, f"batch takes no {row.name}", "name the image in the script: #ENROOT_ROOTFS=NAME|IMAGE")
    options.file = row.describe(value)
    if options.file.target:
        words = (options.target, *options.command) if options.target else ()
        options.target, options.command = options.file.target, words
    elif not options.target:
        raise mistake(verb, f"start needs {_TARGET}", f"name an image in {value}, or on the command line")


def mistake(verb: str, message: str, hint: str = "") -> UsageError:
    """Return the error for an invalid command line."""
    return UsageError(message, hint=hint or f"{called_as()} {verb} --help", usage=usage(verb))


def main(arguments: list[str], *, batch: bool = False) -> None:
    """Run ``penroot start``, or ``batch``, with ``arguments``. Raises PenrootError."""
    verb = "batch" if batch else "start"
    options = parse(arguments, verb)
    if options is None:
        sys.stdout.write(usage(verb))
        return
    if options.of_features:
        read_description(options, verb)
    settings = read_settings(options, batch=batch)
    # Decide this before the start: in the user namespace of the container, the caller may look like root.
    superuser = namespaces.privileged(settings)
    if options.explain:
        from enroot_py.cli.explain import explain

        source = find(options.target, settings)
        explain(source, settings, options.command, lambda changed: entered(source, changed, options))
        return
    if settings.close_descriptors and settings.mpi and "PMI_FD" in os.environ:
        raise UsageError(
            "ENROOT_CLOSE_DESCRIPTORS=yes would close PMI_FD, which connects this rank to the MPI launcher",
            hint="set ENROOT_CLOSE_DESCRIPTORS=no, or ENROOT_MPI=no if the program is not an MPI rank",
        )
    if options.name and not options.detach:
        raise mistake(verb, "--name needs --detach", _NAME_HINT.format(called_as()))
    if settings.is_extended:
        prepare_process(settings)
    if options.detach:
        from enroot_py.cli import detached

        def run(source: Source, ready: Callable[[], None]) -> NoReturn:
            with Operation("start", settings):
                container = entered(on_disk(source, settings, options), settings, options)
            ready()
            execute(container, settings, options.command, superuser=superuser)

        name = options.name[-1] if options.name else ""
        detached.start(name, options.target, settings, lambda: find(options.target, settings), run)
        return
    with Operation("start", settings):
        joined = joins(settings) and not options.on_disk
        container = enter_shared(settings, options) if joined else enter_own(settings, options)
    execute(container, settings, options.command, superuser=superuser)


def prepare_process(settings: Settings) -> None:
    """Let features change this process, or execute its command line again. Raises PenrootError."""
    from enroot_py.base.features import plugged

    for feature in plugged("process"):
        feature.prepare(settings)


def execute(container: Container, settings: Settings, command: tuple[str, ...], *, superuser: bool) -> NoReturn:
    """Drop descriptors and privileges, and execute the command. Raises CommandError, ContainerError, NamespaceError."""
    if settings.close_descriptors:
        close_descriptors(container.environ)
    if not superuser:
        namespaces.confine(remap_root=settings.remap_root)
    container.execute(command)


def enter_own(settings: Settings, options: Options) -> Container:
    """Enter a new container, which no other MPI rank shares. Raises PenrootError."""
    source = find(options.target, settings)
    operations.phase("image")
    operations.fact(**source.facts)
    return entered(on_disk(source, settings, options), settings, options)


def on_disk(source: Source, settings: Settings, options: Options) -> Source:
    """Return ``source``. With --rw=disk, add a private directory for changes. Raises ContainerError."""
    if not options.on_disk:
        return source
    from enroot_py.store import throwaway

    return throwaway.fork(source, settings)


def read_settings(options: Options, *, batch: bool) -> Settings:
    """Read the settings of a start. Precedence, lowest first: files, variables, directives, description, options."""
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
                raise UsageError(f"{options.conf[0]} names no container", hint="add a line #ENROOT_ROOTFS=NAME|IMAGE")
    settings = load(dict(os.environ), directives)  # a dict: os.environ encodes and decodes at each access
    for line in slips(os.environ):
        log.warn(line)
    if options.file:
        settings = options.file.settings(settings)
    for row, value in options.of_features:
        settings = row.change(settings, value) if row.change else settings
    if options.changes:
        settings = settings.replace("command line", **options.changes)
    return settings


def entered(source: Source, settings: Settings, options: Options) -> Container:
    """Enter and return the container that the command line describes. Raises PenrootError."""
    container = enter(requested_start(source, settings, options))
    environ.warn_of_missing_paths(container.environ)
    return fitted(container, options)


def fitted(container: Container, options: Options) -> Container:
    """Apply the description of the start and --workdir to the entered container."""
    if options.file:
        container = options.file.fit(container, options.command)
    if options.workdir:
        container.workdir, container.origins["PWD"] = options.workdir[-1], "--workdir"
    return container


def requested_start(source: Source, settings: Settings, options: Options) -> Start:
    """Return the start that the command line describes. Raises PenrootError."""
    own_mounts = tuple(fstab.parse_option(text, os.environ, f"--mount {text}") for text in options.mounts)
    file = options.file
    start = Start(
        source=source,
        settings=settings,
        host={**os.environ, **(file.host if file else {})},
        superuser=namespaces.privileged(settings),
        mounts=(*file.mounts, *own_mounts) if file else own_mounts,
        env=environ.of_options(tuple(options.env), os.environ),
        file=file.variables if file else None,
        conf=options.conf[-1] if options.conf else "",
        script=read_script(options.rc[-1]) if options.rc else None,
        command=options.command,
    )
    if source.upper and settings.rootfs_writable and not options.on_disk:
        from enroot_py.store import claims

        claims.change_alone(source)
    return start


def read_script(path: str) -> str:
    try:
        return os.fsdecode(files.script(path))
    except OSError as e:
        raise UsageError(f"--rc {path}: {e.strerror}", hint="give a shell script: --rc SCRIPT") from e


def joins(settings: Settings) -> bool:
    """Return whether this MPI rank shares a container. Ranks share no PID namespace: it ends with its first process."""
    return settings.join == "auto" and settings.mpi and environ.is_rank(os.environ) and not settings.unshare_pid


def enter_shared(settings: Settings, options: Options) -> Container:
    """Join the container of the other ranks, or create it if this rank is the first. Raises PenrootError."""
    from enroot_py.runtime import pmix, ranks

    scratch = rootfs.make_scratch(settings)
    env_options = environ.of_options(tuple(options.env), os.environ)
    identity = [os.path.realpath(path) for path in (options.target, *options.rc[-1:]) if os.path.isfile(path)]
    identity += [options.target, *sorted(env_options), *options.conf, "", *options.mounts]
    identity += [options.file.identity] if options.file else []
    record = ranks.Record(identity, settings, os.environ, scratch)
    rank_variables = {**ranks.variables(os.environ, settings), **env_options}
    for name in pmix.FITTED:
        rank_variables.pop(name, None)  # keep the values that the first rank has adapted to the image
    joined = record.join()
    if joined is None:
        record.sweep()
        container = entered(find(options.target, settings), settings, options)
        record.keep(container.environ, container.origins, rank_variables)
        return container
    shared, origins = joined
    variables = environ.Variables(
        {**shared, **rank_variables}, dict.fromkeys([*origins, *rank_variables], "the launcher")
    )
    with Fd(os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as root:
        container = Container(variables, etc.of_image(root), login_shell=settings.login_shell)
    return fitted(container, options)


def find(target: str, settings: Settings) -> Source:
    """Find the root file system of a container, an image file or a reference. Raises PenrootError."""
    if containers.is_reference(target, settings):
        from enroot_py.registry import reference
        from enroot_py.store import pull

        image = reference.of_command_line(target)
        return containers.of_image(reference.without_password(target), pull.pull(image, settings))
    return containers.find(target, settings)
