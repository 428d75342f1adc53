"""The table of the container options of srun, sbatch and salloc.

Options are parsed into a frozen Request at submit, and again in every step. header.py generates the SPANK plugin's
table from this one. Every step imports this module, so it imports neither typing nor re.
"""

from __future__ import annotations

import os

from enroot_py.base.errors import UsageError
from enroot_py.base.frozen import Frozen
from enroot_py.config.words import NO, YES, truth
from enroot_py.runtime import container_mounts
from enroot_py.runtime.container_mounts import PATH_MAX, bounded, split

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from typing import Any

    from enroot_py.config.description import Description, DescriptionEntry
    from enroot_py.runtime.container_mounts import MountEntry
    from enroot_py.runtime.mounting import Mount

# A container lives in a directory pyxis_JOBID_NAME; NAME_MAX is 255.
MAX_NAME_BYTES = 255 - len("pyxis_4294967295_")
NAME_MODES = ("auto", "create", "exec", "no_exec")
NAMESPACES = ("net", "ipc", "uts")
_SENT = "bcast:"  # prefix of a path on srun's host
_DIGITS = "0123456789"


class Request(Frozen):
    """The request of a step. If a flag such as ``writable`` is None, a setting decides.

    ``origins`` maps an attribute to its option, variable or line of an environment file, for messages. ``file`` is the
    environment file, which has keys without an attribute here.
    """

    origins: Mapping[str, str]
    file: Description | None = None
    image: str | None = None
    mounts: tuple[MountEntry, ...] = ()
    workdir: str | None = None
    name: str | None = None
    name_mode: str = "auto"
    save: str | None = None
    mount_home: bool | None = None
    remap_root: bool | None = None
    entrypoint: bool | None = None
    entrypoint_log: bool | None = None
    writable: bool | None = None
    env: tuple[str, ...] = ()
    unshare: tuple[str, ...] = ()
    of_features: Mapping[str, Any] = {}

    def value(self, row: Option) -> Any:
        """Return the value of a feature's option, or None if it is not given."""
        return self.of_features.get(row.sets)

    @property
    def wants_container(self) -> bool:
        """Return whether an image or a name is given. The other options need an image or a name."""
        return self.image is not None or self.name is not None

    def is_file(self, cwd: str) -> bool:
        """Return whether the image is a path on the node.

        Paths begin with / or a dot. A bare name that ends in .sqsh is a path too, as is x/y.sqsh if the file exists.
        """
        image = self.image or ""
        if image.startswith(("/", ".")):
            return True
        # A bare name is a file, even if it does not exist yet. A registry image of that name is docker://x.sqsh.
        return image.endswith(".sqsh") and (not set(image) & set("/:#@") or os.path.isfile(f"{cwd}/{image}"))

    def is_reference(self, cwd: str) -> bool:
        """Return whether the image is a reference, and not a path."""
        return self.image is not None and not self.sent and not self.is_file(cwd)

    @property
    def sent(self) -> str:
        """Return the path of an image that srun sends to the nodes, or "" for other images."""
        return _sent(self.image or "")

    def fstab(self) -> list[Mount]:
        """Return the mounts as lines of fstab(5), parsed. Raises ConfigError for an unknown flag."""
        return [mount.fstab(self.origins.get("mounts", "")) for mount in self.mounts]


def _sent(image: str) -> str:
    path = image.removeprefix(_SENT)
    is_registry = path[:1] in _DIGITS and path.lstrip(_DIGITS)[:1] in ("/", "#")  # bcast:5000#x: a registry, bcast:5000
    return "" if path == image or is_registry else path


def image_text(text: str) -> str:
    if path := _sent(text):
        image_text(path if path.startswith(("/", ".", "~", "$")) else f"./{path}")
    elif text.startswith(("/", ".", "~", "$")):
        _path(text)
        if _is_directory_name(text):
            raise ValueError("is a directory", "give a squashfs file, or an image without a leading '.' or '/'")
    elif len(text.encode(errors="surrogateescape")) >= PATH_MAX:
        raise ValueError(f"is longer than {PATH_MAX - 1} bytes")
    elif any(c.isspace() or not c.isprintable() for c in text):
        raise ValueError("has characters that are invalid in an image reference")
    return text


def file_name(text: str) -> str:
    if not text.isprintable():
        raise ValueError("a name cannot have control characters")
    return _path(text)


def _path(text: str) -> str:
    if text.startswith(("~", "$")):
        hint = f"write the full path; write ./{text} for a file of this name"
        raise ValueError(f"no shell has replaced the {text[0]}", hint)
    return bounded(text)


def _is_directory_name(path: str) -> bool:
    return path.rpartition("/")[2] in ("", ".", "..")


def _save(text: str) -> str:
    if _is_directory_name(text):
        raise ValueError("is a directory", "use a file, for example ./saved.sqsh")
    if text == "-":
        raise ValueError("is not a file", "use a file, for example ./saved.sqsh: stdout belongs to the tasks")
    return _path(text)


def _name(text: str) -> tuple[str, str]:
    name, _, mode = text.partition(":")
    if not name:
        raise ValueError("the name is empty")
    if "/" in name or not name.isprintable():
        raise ValueError("a name cannot have '/' or control characters", "for an image, use --container-image")
    if len(name.encode(errors="surrogateescape")) > MAX_NAME_BYTES:
        raise ValueError(f"a name has at most {MAX_NAME_BYTES} bytes")
    if mode and mode not in NAME_MODES:
        raise ValueError(f"unknown mode {mode!r}", "modes are " + ", ".join(NAME_MODES))
    return name, mode or "auto"


def _environ_entries(text: str) -> tuple[str, ...]:
    entries = [entry.replace("\\,", ",") for entry in split(text, ",")]
    for entry in entries:
        name, equals, _ = entry.partition("=")
        if not name:
            raise ValueError("a name is empty", "separate names with one comma each; write a comma in a value as \\,")
        if equals and "*" in name:
            raise ValueError(f"{entry}: a pattern cannot have a value", "give NAME=VALUE for each name")
        # A name without a value can be any variable of the job, such as BASH_FUNC_module%%.
        if equals and not (name.isascii() and name.isidentifier()) or any(map(str.isspace, name)):
            raise ValueError(f"{name!r} is not the name of a variable", "separate NAME or NAME=VALUE with commas")
    return tuple(dict.fromkeys(entries))


def chosen(entries: Iterable[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the entries of --container-env select. The later value of a name counts.

    An entry is a name, a pattern in which ``*`` is any text, or NAME=VALUE.
    """
    variables: dict[str, str] = {}
    for entry in entries:
        name, equals, value = entry.partition("=")
        if equals:
            variables[name] = value
        elif "*" in name:
            variables.update({each: environ[each] for each in environ if _matches(each, name)})
        elif name in environ:
            variables[name] = environ[name]
    return variables


def _matches(name: str, pattern: str) -> bool:
    """Match like fnmatch(3), with ``*`` only: Python's fnmatch imports re."""
    first, *middle, last = pattern.split("*")
    if not name.startswith(first) or not name.endswith(last) or len(name) < len(first) + len(last):
        return False
    at, end = len(first), len(name) - len(last)
    for part in middle:
        at = name.find(part, at, end)
        if at < 0:
            return False
        at += len(part)
    return True


def _unshare(text: str) -> tuple[str, ...]:
    names = text.split(",")
    for name in names:
        if name not in NAMESPACES:
            raise ValueError(f"unknown namespace {name!r}", "namespaces are " + ", ".join(NAMESPACES))
    return tuple(dict.fromkeys(names))


class Option:
    """One row of the table: an option and its attribute of Request.

    A flag has a ``value`` and no ``parse``. With ``selects``, the option requests a container. With ``of_job``, it
    works without a container too: sbatch and salloc apply it to the later steps of a job. With ``annotated``, an
    environment file can set it by the annotation com.pyxis.ATTRIBUTE. With ``describes``, it names an environment file.
    ``variable`` is given if the option shares the variable of another option.
    """

    __slots__ = tuple("name sets parse value arginfo usage example selects of_job annotated describes variable".split())

    def __init__(
        self,
        name: str,
        sets: str,
        usage: str,
        *,
        parse: Callable[[str], object] | None = None,
        value: bool | None = None,
        arginfo: str = "",
        example: str = "",
        selects: bool = False,
        of_job: bool = False,
        annotated: bool = False,
        describes: bool = False,
        variable: str = "",
    ) -> None:
        self.name = name
        self.sets = sets
        self.usage = usage
        self.parse = parse
        self.value = value
        self.arginfo = arginfo
        self.example = example
        self.selects = selects
        self.of_job = of_job
        self.annotated = annotated
        self.describes = describes
        # A no- option has no variable: PYXIS_CONTAINER_MOUNT_HOME=no does the same.
        self.variable = variable or ("" if name.startswith("no-") else "PYXIS_" + name.upper().replace("-", "_"))

    def from_command_line(self, text: str) -> object:
        return self.read(f"--{self.name}", text) if self.parse else self.value

    def from_variable(self, text: str) -> object:
        if self.parse:
            return self.read(self.variable, text)
        try:
            return self.value is truth(text)
        except ValueError:
            hint = f"values are {', '.join(YES + NO)}"
            raise UsageError(f"{self.variable}={text}: neither yes nor no", hint=hint) from None

    def from_file(self, entry: DescriptionEntry, text: str) -> object:
        """Return the value of an entry of an environment file; ``text`` is its text with variables expanded."""
        return self.read(entry.where, text) if self.parse else (self.value is truth(text))

    def read(self, origin: str, text: str) -> object:
        assert self.parse is not None
        hint = f"for example {origin.rpartition(' ')[2]}={self.example}"
        if not text:
            raise UsageError(f"{origin}= needs a value", hint=hint)
        try:
            return self.parse(text)
        except ValueError as e:
            why, hint = e.args if len(e.args) == 2 else (e.args[0], hint)
            raise UsageError(f"{origin}={text}: {why}", hint=hint) from None


OPTIONS = (
    Option(
        "container-image",
        "image",
        "image to run: a registry reference, the path of a squashfs file on the node (begins with / or .), "
        "or bcast:PATH for a file that srun sends to the nodes",
        parse=image_text,
        arginfo="[USER@][REGISTRY#]IMAGE[:TAG]|[bcast:]PATH",
        example="ubuntu:24.04",
        selects=True,
    ),
    Option(
        "container-mounts",
        "mounts",
        "mount SRC (a path, tmpfs or umount) at DST; join fstab flags, or sqsh, with '+'",
        parse=container_mounts.parse,
        arginfo="SRC[:DST[:FLAG+FLAG]][,SRC...]",
        example="/data:/data:ro,tmpfs:/scratch",
    ),
    Option(
        "container-workdir",
        "workdir",
        "working directory in the container",
        parse=_path,
        arginfo="PATH",
        example="/workspace",
    ),
    Option(
        "container-name",
        "name",
        "use or create a container of this name, which stays on the node; without a name, it is removed with the step",
        parse=_name,
        arginfo="NAME[:auto|create|exec|no_exec]",
        example="work",
        selects=True,
    ),
    Option(
        "container-save",
        "save",
        "save the container to a squashfs file on the node when the step ends",
        parse=_save,
        arginfo="PATH",
        example="./saved.sqsh",
    ),
    Option("container-mount-home", "mount_home", "mount the home directory", value=True),
    Option("no-container-mount-home", "mount_home", "do not mount the home directory", value=False),
    Option("container-remap-root", "remap_root", "be root in the container (not on the host)", value=True),
    Option("no-container-remap-root", "remap_root", "stay your own user in the container", value=False),
    Option("container-entrypoint", "entrypoint", "run the entrypoint of the image", value=True),
    Option("no-container-entrypoint", "entrypoint", "do not run the entrypoint of the image", value=False),
    Option(
        "container-entrypoint-log", "entrypoint_log", "show the output of the entrypoint", value=True, annotated=True
    ),
    Option("container-writable", "writable", "make the root filesystem writable", value=True),
    Option("container-readonly", "writable", "make the root filesystem read-only", value=False),
    Option(
        "container-env",
        "env",
        "take these variables from the job instead of the image; NAME may contain *; NAME=VALUE sets a variable",
        parse=_environ_entries,
        arginfo="NAME[=VALUE][,NAME...]",
        example="LANG,NCCL_*,MODE=fast",
    ),
    Option(
        "container-unshare",
        "unshare",
        "use private namespaces: net, ipc, uts",
        parse=_unshare,
        arginfo="NS[,NS...]",
        example="net",
    ),
)
_BY_NAME = {option.name: option for option in OPTIONS}
_ATTRIBUTES = frozenset(Request.__annotations__)
_VARIABLES = frozenset(option.variable for option in OPTIONS)


def all_options() -> tuple[Option, ...]:
    """Return the options of the core, then those of the features."""
    from enroot_py.base.features import plugged

    return *OPTIONS, *(option for feature in plugged("options") for option in feature.OPTIONS)


def _known(names: Iterable[str], environ: Mapping[str, str]) -> tuple[Option, ...]:
    """Return the core's options. Add the features' options if some name or variable belongs to no core option."""
    of_core = all(name in _BY_NAME for name in names)
    of_core = of_core and not any(name.startswith("PYXIS_") and name not in _VARIABLES for name in environ)
    return OPTIONS if of_core else all_options()


def refuse_all(options: Sequence[tuple[str, str]], command: str) -> None:
    """With sbatch_support=0, raise UsageError if there are options. Variables still apply to the steps."""
    if options:
        raise UsageError(
            f"--{options[0][0]}: container options of {command} are switched off on this cluster",
            hint="use container options with srun, inside the job",
        )


def parse(
    command_line: Iterable[tuple[str, str]],
    environ: Mapping[str, str],
    cwd: str = "",
    read: Callable[[str, str], Description] | None = None,
) -> Request:
    """Return the request of one step. Precedence, highest first: options, environment file, PYXIS_CONTAINER_*.

    If ``cwd`` is given, ``environ`` is the job's: relative mount sources begin at ``cwd``, and variables in mounts are
    expanded from ``environ``. ``read`` loads an environment file by its name and origin. Raises UsageError for a bad
    value and for contradicting options.
    """
    requested: dict[str, tuple[Any, str]] = {}
    command_line = tuple(command_line)
    known = _known([name for name, _ in command_line], environ)
    by_name = _BY_NAME if known is OPTIONS else {option.name: option for option in known}
    for name, text in command_line:
        if name not in by_name:
            raise UsageError(f"--{name}: unknown option", hint="the plugin is of another version: pyxis-py install")
        option = by_name[name]
        _add(requested, option, option.from_command_line(text), f"--{name}")
    by_options = frozenset(requested)
    option_of_file = next((option for option in known if option.describes), None)
    file = _file(option_of_file, requested, environ, read) if option_of_file else None
    job = environ if cwd else None
    by_file = _of_file(file, job) if file else {}
    for option in known:
        if option.variable and option.variable in environ and option.sets not in by_options | by_file.keys():
            _add(requested, option, option.from_variable(environ[option.variable]), option.variable)
    flags = {key: file.flag(key) for key in ("entrypoint", "writable")} if file else {}
    requested = {**flags, **by_file, **requested}
    values = {attribute: value for attribute, (value, _) in requested.items()}
    origins = {attribute: origin for attribute, (_, origin) in requested.items()}
    if "name" in values:
        values["name"], values["name_mode"] = values["name"]
    if file:
        values["mounts"] = tuple(dict.fromkeys((*_mounts(file, job), *values.get("mounts", ()))))
    if cwd and "mounts" in values:
        values["mounts"] = tuple(_resolved(mount, cwd, environ, origins) for mount in values["mounts"])
    of_features = {attribute: values.pop(attribute) for attribute in values.keys() - _ATTRIBUTES}
    request = Request(**values, file=file, origins=origins, of_features=of_features)
    if file and option_of_file and not request.wants_container:
        message = f"{origins[option_of_file.sets]}={file.name}: neither the file nor its bases name an image"
        raise UsageError(message, hint='add image = "ubuntu:24.04" to the file, or give --container-image')
    return request


# Options that environment files have as keys. A key has the name of the option's attribute.
_IN_FILES = tuple(
    _BY_NAME[name] for name in ("container-image", "container-workdir", "container-entrypoint", "container-writable")
)


def _file(
    option: Option,
    requested: dict[str, tuple[Any, str]],
    environ: Mapping[str, str],
    read: Callable[[str, str], Description] | None,
) -> Description | None:
    """Return the requested environment file, or None."""
    if option.sets not in requested and option.variable in environ:
        _add(requested, option, option.from_variable(environ[option.variable]), option.variable)
    return read(*requested[option.sets]) if read and option.sets in requested else None


def _of_file(file: Description, job: Mapping[str, str] | None) -> dict[str, tuple[Any, str]]:
    """Return the attributes that a file sets, each with its line. Raises UsageError, ConfigError."""
    values = {}
    for option in _IN_FILES:
        entry = file.last(option.sets)
        text = file.value(entry, job) if entry else ""
        if entry and (job is not None or not file.needs_job(text)):
            values[option.sets] = option.from_file(entry, text), entry.where
        elif entry and option.sets == "image":
            raise UsageError(
                f"{entry.where}: only the job knows {text}",
                hint="use a variable that is set at submission: the image must be known before the job starts",
            )
    for option in all_options():
        if option.annotated and (annotation := file.annotation(f"com.pyxis.{option.sets}")):
            values[option.sets] = annotation
    return values


def _mounts(file: Description, job: Mapping[str, str] | None) -> Iterator[MountEntry]:
    """Yield the mounts of a file. Raises UsageError, ConfigError."""
    for entry in file.all("mounts"):
        try:
            yield container_mounts.parse_one(file.mount(entry, job), entry.where)
        except ValueError as e:
            why, hint = e.args if len(e.args) == 2 else (e.args[0], 'for example mounts = ["/data:/data:ro"]')
            raise UsageError(f"{entry.where}: {why}", hint=hint) from None


def _resolved(mount: MountEntry, cwd: str, environ: Mapping[str, str], origins: Mapping[str, str]) -> MountEntry:
    """Return a mount with its variables expanded. Raises UsageError."""
    try:
        return mount.resolved(cwd, environ)
    except ValueError as e:
        why, hint = e.args
        raise UsageError(f"{mount.origin or origins['mounts']}: {why}", hint=hint) from None


def _add(requested: dict[str, tuple[Any, str]], option: Option, value: object, origin: str) -> None:
    """Record the value of an attribute with its option or variable. Raises UsageError."""
    known, before = requested.get(option.sets, (value, origin))
    if known == value:  # Slurm calls back more than once with the same value
        requested[option.sets] = value, origin
        return
    if before == origin:
        hint = (
            f"give the option once (Slurm passes on only the last value): {origin}={option.arginfo}; "
            "for the components of a heterogeneous job, use one srun each, with --het-group; "
            "options of salloc apply to each srun in it"
        )
        raise UsageError(f"{origin} is given twice with different values", hint=hint)
    raise UsageError(f"{before} and {origin} contradict each other", hint="give only one of them")


def ignored(request: Request) -> list[str]:
    """Return a message for each option that has no effect without an image or a name."""
    if request.wants_container:
        return []
    missing = "neither --container-image nor --container-name is given"
    of_job = {option.sets for option in (all_options() if request.of_features else OPTIONS) if option.of_job}
    return [f"ignoring {origin}: {missing}" for name, origin in request.origins.items() if name not in of_job]
