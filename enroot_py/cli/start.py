"""``penroot start`` and ``batch``: the command line, and what it asks runtime/enter.py for.

The start path. What is imported here is paid by every start: os and our own
modules, nothing else.
"""

from __future__ import annotations

import os
import sys

from enroot_py import called_as
from enroot_py.base import log, recording
from enroot_py.base.errors import UsageError
from enroot_py.base.fds import Fd
from enroot_py.base.frozen import Frozen
from enroot_py.base.recording import Recording
from enroot_py.config import files
from enroot_py.config.settings import Settings, load
from enroot_py.config.table import slips
from enroot_py.config.words import nearest
from enroot_py.runtime import environ, etc, mounts, namespaces, rootfs
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
        """What one start is described by. Methods raise PenrootError."""

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

NAME is a container of 'penroot create'. IMAGE is a squashfs image or a
reference such as docker://ubuntu. CONFIG is a configuration script with a line
#ENROOT_ROOTFS=NAME|IMAGE.

 Options:
   -c, --conf CONFIG        run a configuration script before the container starts
   -e, --env KEY[=VALUE]    set KEY, or copy it from your environment
   -m, --mount FSTAB        mount SOURCE:TARGET[:OPTIONS], such as /a:/b:ro, or SOURCE:TARGET:TYPE[:OPTIONS]
       --rc SCRIPT          run this script instead of the image's /etc/rc
   -r, --root               be root inside the container
   -w, --rw                 make the root filesystem writable
       --pid, --net, --ipc, --uts
                            use private PID, network, IPC or UTS namespaces
       --explain            print all mounts, variables and hooks of the start, and do not run it
   -h, --help               show this help
"""


def usage(verb: str) -> str:
    """The help text of ``start`` or ``batch``."""
    return f"Usage: {called_as()} {SYNOPSIS[verb]}\n\n{help_text()}"


def help_text() -> str:
    """What ``start`` and ``batch`` do, and their options with those of features."""
    words = ((f"       {row.name} {row.metavar}".ljust(27), row.help) for row in feature_flags().values())
    more = "".join(f"{word} {text}\n" if len(word) == 27 else f"{word}\n{'':28}{text}\n" for word, text in words)
    return HELP.replace("       --explain ", f"{more}       --explain ")


class FeatureFlag(Frozen):
    """An option of ``start`` that a feature has; a flag has no metavar.

    ``change`` gets the settings and the value. ``describe`` gets the value, and returns a description of the start.
    """

    name: str
    metavar: str
    help: str
    change: Callable[[Settings, str], Settings] | None = None
    describe: Callable[[str], StartDescription] | None = None


def feature_flags() -> dict[str, FeatureFlag]:
    """The options of features."""
    from enroot_py.base.features import plugged

    return {row.name: row for feature in plugged("flags") for row in feature.FLAGS}


class Options:
    """The command line of ``penroot start``."""

    __slots__ = (
        "env",
        "of_features",
        "file",
        "mounts",
        "conf",
        "rc",
        "explain",
        "changes",
        "target",
        "command",
    )

    def __init__(self) -> None:
        self.env: list[str] = []
        self.file: StartDescription | None = None
        self.of_features: list[tuple[FeatureFlag, str]] = []
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
}


_TARGET = "a container or an image"
# What options of docker and podman are called here.
_ELSEWHERE = {
    "--gpus": "write --device nvidia.com/gpu=all",
    "-i": "remove -i: a container always has the caller's terminal",
    "-t": "remove -t: a container always has the caller's terminal",
    "--rm": "remove --rm: a start leaves no container behind",
    "-d": "penroot has no detached containers: start NAME COMMAND & in a shell",
    "-u": "write --root to be root; you are yourself otherwise",
    "--user": "write --root to be root; you are yourself otherwise",
    "--workdir": "write: start NAME sh -c 'cd DIR && COMMAND'",
    "--name": "create the container first: penroot create --name NAME IMAGE",
    "--network": "write --net for a private network; it is the host's otherwise",
    "--entrypoint": "write --rc SCRIPT, or give the command after NAME",
    "-v": "write --mount SOURCE:TARGET[:ro]",
    "--volume": "write --mount SOURCE:TARGET[:ro]",
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
            getattr(options, VALUES[name]).append(_value(verb, name, value, [] if equals else rest))
        elif word == "--explain":
            options.explain = True
        else:
            row = _feature_flag(verb, word, name)
            text = _value(verb, name, value, [] if equals else rest) if row.metavar else ""
            options.of_features.append((row, text))
    if rest:
        options.target, options.command = rest[0], tuple(rest[1:])
    elif verb == "batch" or not described_by(options):  # its image may be in the description
        raise mistake(verb, f"{verb} needs {'a configuration script' if verb == 'batch' else _TARGET}")
    return options


def _value(verb: str, name: str, value: str, rest: list[str]) -> str:
    """The value of an option, perhaps the first of the ``rest``, which is taken. Raises UsageError."""
    value = rest.pop(0) if rest else value
    if not value:
        raise mistake(verb, f"option {name} needs a value")
    return value


def _feature_flag(verb: str, word: str, name: str) -> FeatureFlag:
    """The option of a feature. Raises UsageError."""
    rows = feature_flags()
    row = rows.get(name)
    if row is None or not row.metavar and word != name:
        meant = nearest(name[2:], [known[2:] for known in (*FLAGS, *VALUES, *rows, "--explain", "--help")])
        raise mistake(verb, f"unknown option: {word}", _ELSEWHERE.get(name, meant and f"did you mean --{meant}?"))
    return row


def described_by(options: Options) -> tuple[FeatureFlag, str] | None:
    """The option that describes the start, and its value; the last one counts."""
    return next(((row, value) for row, value in reversed(options.of_features) if row.describe), None)


def read_description(options: Options, verb: str) -> None:
    """Read the description of a start: where it says the image, all words are the command. Raises PenrootError."""
    row, value = described_by(options) or (None, "")
    if row is None or row.describe is None:
        return
    if verb == "batch":
        raise mistake(verb, f"batch takes no {row.name}", "its script says what to start")
    options.file = row.describe(value)
    if options.file.target:
        words = (options.target, *options.command) if options.target else ()
        options.target, options.command = options.file.target, words
    elif not options.target:
        raise mistake(verb, f"start needs {_TARGET}", f"{value} says none")


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
    if options.of_features:
        read_description(options, verb)
    settings = read_settings(options, batch=batch)
    superuser = namespaces.privileged(settings)  # asked now: inside, root of a user namespace looks like root
    if options.explain:
        from enroot_py.cli.explain import explain

        source = find(options.target, settings)
        explain(source, settings, options.command, lambda changed: entered(source, changed, options))
        return
    if settings.close_descriptors and settings.mpi and "PMI_FD" in os.environ:
        raise UsageError(
            "ENROOT_CLOSE_DESCRIPTORS=yes would close PMI_FD, by which the MPI launcher reaches this rank",
            hint="set ENROOT_CLOSE_DESCRIPTORS=no, or ENROOT_MPI=no if the program is no rank",
        )
    with Recording("start", settings):
        container = enter_shared(settings, options) if joins(settings) else enter_own(settings, options)
    execute(container, settings, options.command, superuser=superuser)


def execute(container: Container, settings: Settings, command: tuple[str, ...], *, superuser: bool) -> NoReturn:
    """Give up what the program must not have, and become it. Raises CommandError, ContainerError, NamespaceError."""
    if settings.close_descriptors:
        close_descriptors(container.environ)
    if not superuser:
        namespaces.confine(remap_root=settings.remap_root)
    container.execute(command)


def enter_own(settings: Settings, options: Options) -> Container:
    """Enter a container that no other process shares. Raises PenrootError."""
    source = find(options.target, settings)
    recording.phase("image")
    recording.fact(**source.facts)
    return entered(source, settings, options)


def read_settings(options: Options, *, batch: bool) -> Settings:
    """The settings of a start: of the files and variables, of its configuration script, of its options."""
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
    settings = load(dict(os.environ), directives)  # which encodes and decodes at each look
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
    """Enter the container that the command line asks for. Raises PenrootError."""
    container = enter(asked(source, settings, options))
    environ.warn_of_missing_paths(container.environ)
    return options.file.fit(container, options.command) if options.file else container


def asked(source: Source, settings: Settings, options: Options) -> Start:
    """What the command line asks for. Raises PenrootError."""
    said = tuple(mounts.parse_option(text, os.environ, f"--mount {text}") for text in options.mounts)
    file = options.file
    start = Start(
        source=source,
        settings=settings,
        host={**os.environ, **(file.host if file else {})},
        superuser=namespaces.privileged(settings),
        mounts=(*file.mounts, *said) if file else said,
        env=environ.of_options(tuple(options.env), os.environ),
        file=file.variables if file else None,
        conf=options.conf[-1] if options.conf else "",
        script=read_script(options.rc[-1]) if options.rc else None,
        command=options.command,
    )
    if source.upper and settings.rootfs_writable:
        from enroot_py.store import claims

        claims.change_alone(source)
    return start


def read_script(path: str) -> str:
    try:
        return os.fsdecode(files.script(path))
    except OSError as e:
        raise UsageError(f"--rc {path}: {e.strerror}", hint="--rc names a script of sh") from e


def joins(settings: Settings) -> bool:
    """Whether this start shares a container. One with processes of its own would end with the first rank."""
    return settings.join == "auto" and settings.mpi and environ.is_rank(os.environ) and not settings.unshare_pid


def enter_shared(settings: Settings, options: Options) -> Container:
    """Enter the container of the other ranks, or a new one for them to join. Raises PenrootError."""
    from enroot_py.runtime import pmix, ranks

    scratch = rootfs.make_scratch(settings)
    given = environ.of_options(tuple(options.env), os.environ)
    same = [os.path.realpath(path) for path in (options.target, *options.rc[-1:]) if os.path.isfile(path)]
    same += [options.target, *sorted(given), *options.conf, "", *options.mounts]
    same += [options.file.identity] if options.file else []
    record = ranks.Record(same, settings, os.environ, scratch)
    own = {**ranks.variables(os.environ, settings), **given}
    for name in pmix.FITTED:
        own.pop(name, None)  # the first has found out what the image can take
    joined = record.join()
    if joined is None:
        record.sweep()
        container = entered(find(options.target, settings), settings, options)
        record.keep(container.environ, container.origins, own)
        return container
    shared, origins = joined
    variables = environ.Variables({**shared, **own}, dict.fromkeys([*origins, *own], "the launcher"))
    with Fd(os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as root:
        container = Container(variables, etc.of_image(root), login_shell=settings.login_shell)
    return options.file.fit(container, options.command) if options.file else container


def find(target: str, settings: Settings) -> Source:
    """The root file system of a container, an image file or a reference."""
    if ":" in target:  # else it costs no import
        from enroot_py.registry import reference

        if reference.is_uri(target):
            from enroot_py.store import pull

            image = reference.of_command_line(target)
            return containers.of_image(reference.without_password(target), pull.pull(image, settings))
    return containers.find(target, settings)
