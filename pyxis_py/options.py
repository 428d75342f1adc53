"""The container options of srun, sbatch and salloc: one table, from which everything else is derived.

Parsed into a frozen Request at submit and again in every step. header.py
makes the SPANK plugin's table of it. On the step path: no typing, no re.
"""

from __future__ import annotations

import os

from enroot_py.base.errors import UsageError
from enroot_py.base.frozen import Frozen
from pyxis_py import mounts
from pyxis_py.mounts import PATH_MAX, bounded, split

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import Any

    from enroot_py.runtime.mounts import Mount
    from pyxis_py.mounts import MountEntry

# A container lives in a directory pyxis_JOBID_NAME; NAME_MAX is 255.
NAME_LIMIT = 255 - len("pyxis_4294967295_")
NAME_MODES = ("auto", "create", "exec", "no_exec")
NAMESPACES = ("net", "ipc", "uts")
YES = ("1", "true", "yes", "y")
NO = ("0", "false", "no", "n")


class Request(Frozen):
    """What a step asks for; where an attribute is None, a setting decides.

    ``origins`` has for messages the option or the variable that each of the others comes from.
    """

    origins: Mapping[str, str]
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

    @property
    def wants_container(self) -> bool:
        """Whether an image or a name says which container; without them there is none, whatever the other options."""
        return self.image is not None or self.name is not None

    def is_file(self, cwd: str) -> bool:
        """Whether the image is a path on the node: it begins as one, or ends in .sqsh and is one word or a file."""
        image = self.image or ""
        if image.startswith(("/", ".")):
            return True
        # One word is a file even if it is missing or not written yet: a registry's image is docker://x.sqsh.
        return image.endswith(".sqsh") and (not set(image) & set("/:#@") or os.path.isfile(f"{cwd}/{image}"))

    def fstab(self) -> list[Mount]:
        """The mounts as lines of fstab(5). Raises ConfigError for a flag that none has."""
        return [mount.fstab(self.origins["mounts"]) for mount in self.mounts]


def _image(text: str) -> str:
    if text.startswith(("/", ".", "~", "$")):
        _path(text)
        if _is_directory_name(text):
            raise ValueError("is a directory", "give a squashfs file, or an image without a leading '.' or '/'")
    elif len(text.encode(errors="surrogateescape")) >= PATH_MAX:
        raise ValueError(f"is longer than {PATH_MAX - 1} bytes")
    elif any(c.isspace() or not c.isprintable() for c in text):
        raise ValueError("has characters that no image reference has")
    return text


def _path(text: str) -> str:
    if text.startswith(("~", "$")):
        hint = f"write the path out; a file of that name is ./{text}"
        raise ValueError(f"no shell has replaced the {text[0]}", hint)
    return bounded(text)


def _is_directory_name(path: str) -> bool:
    return path.rpartition("/")[2] in ("", ".", "..")


def _save(text: str) -> str:
    if _is_directory_name(text):
        raise ValueError("is a directory", "give the file to write, for example ./saved.sqsh")
    if text == "-":
        raise ValueError("is no file", "a step's stdout is that of its tasks: give a file, for example ./saved.sqsh")
    return _path(text)


def _name(text: str) -> tuple[str, str]:
    name, _, mode = text.partition(":")
    if not name:
        raise ValueError("the name is empty")
    if "/" in name or not name.isprintable():
        raise ValueError("a name has neither '/' nor control characters", "images go to --container-image")
    if len(name.encode(errors="surrogateescape")) > NAME_LIMIT:
        raise ValueError(f"a name has at most {NAME_LIMIT} bytes")
    if mode and mode not in NAME_MODES:
        raise ValueError(f"unknown mode {mode!r}", "modes are " + ", ".join(NAME_MODES))
    return name, mode or "auto"


def _environ_entries(text: str) -> tuple[str, ...]:
    entries = [entry.replace("\\,", ",") for entry in split(text, ",")]
    for entry in entries:
        name, equals, _ = entry.partition("=")
        if not name:
            raise ValueError("a name is empty", "separate names with one comma each; a comma in a value is \\,")
        if equals and "*" in name:
            raise ValueError(f"{entry}: a pattern has no value", "give NAME=VALUE for each name")
        # What the job has may have other names: BASH_FUNC_module%%.
        if equals and not (name.isascii() and name.isidentifier()) or any(map(str.isspace, name)):
            raise ValueError(f"{name!r} is not the name of a variable", "write NAME, or NAME=VALUE, and commas between")
    return tuple(dict.fromkeys(entries))


def chosen(entries: Iterable[str], environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that the entries of --container-env stand for; of two values of a name the later one counts.

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
    """fnmatch(3) with ``*`` alone: Python's own imports re."""
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
    """One row: the option, the attribute of Request that it sets, and how.

    A flag has a ``value`` and no ``parse``. ``selects`` marks those that ask
    for a container at all.
    """

    __slots__ = ("name", "sets", "parse", "value", "arginfo", "usage", "example", "selects", "variable")

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
    ) -> None:
        self.name = name
        self.sets = sets
        self.usage = usage
        self.parse = parse
        self.value = value
        self.arginfo = arginfo
        self.example = example
        self.selects = selects
        # The no- options have none: PYXIS_CONTAINER_MOUNT_HOME=no says it.
        self.variable = "" if name.startswith("no-") else "PYXIS_" + name.upper().replace("-", "_")

    def from_command_line(self, text: str) -> object:
        return self._read(f"--{self.name}", text) if self.parse else self.value

    def from_variable(self, text: str) -> object:
        if self.parse:
            return self._read(self.variable, text)
        if text.lower() not in YES + NO:
            raise UsageError(f"{self.variable}={text}: neither yes nor no", hint=f"values are {', '.join(YES + NO)}")
        return self.value if text.lower() in YES else not self.value

    def _read(self, origin: str, text: str) -> object:
        assert self.parse is not None
        hint = f"for example {origin}={self.example}"
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
        "image to run in: a reference to a registry, or the path of a squashfs file on the node (begins with / or .)",
        parse=_image,
        arginfo="[USER@][REGISTRY#]IMAGE[:TAG]|PATH",
        example="ubuntu:24.04",
        selects=True,
    ),
    Option(
        "container-mounts",
        "mounts",
        "what to mount in the container; SRC is a path, tmpfs or umount; flags are those of fstab joined with '+'",
        parse=mounts.parse,
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
        "keep the container under this name on the nodes, or use the one that has it; unnamed ones go with the step",
        parse=_name,
        arginfo="NAME[:auto|create|exec|no_exec]",
        example="work",
        selects=True,
    ),
    Option(
        "container-save",
        "save",
        "write the container to a squashfs file on the node when the step has ended",
        parse=_save,
        arginfo="PATH",
        example="./saved.sqsh",
    ),
    Option("container-mount-home", "mount_home", "mount the home directory", value=True),
    Option("no-container-mount-home", "mount_home", "do not mount the home directory", value=False),
    Option("container-remap-root", "remap_root", "be root in the container, without power outside of it", value=True),
    Option("no-container-remap-root", "remap_root", "keep the own user name in the container", value=False),
    Option("container-entrypoint", "entrypoint", "run the entrypoint of the image", value=True),
    Option("no-container-entrypoint", "entrypoint", "do not run the entrypoint of the image", value=False),
    Option("container-entrypoint-log", "entrypoint_log", "show what the entrypoint prints", value=True),
    Option("container-writable", "writable", "make the root filesystem writable", value=True),
    Option("container-readonly", "writable", "make the root filesystem read-only", value=False),
    Option(
        "container-env",
        "env",
        "variables of which the job's value wins over the image's; NAME may hold *, and with =VALUE it is set to that",
        parse=_environ_entries,
        arginfo="NAME[=VALUE][,NAME...]",
        example="LANG,NCCL_*,MODE=fast",
    ),
    Option(
        "container-unshare",
        "unshare",
        "further namespaces that the container gets of its own: net, ipc, uts",
        parse=_unshare,
        arginfo="NS[,NS...]",
        example="net",
    ),
)
_BY_NAME = {option.name: option for option in OPTIONS}


def check_switched_off(said: Sequence[tuple[str, str]], command: str) -> None:
    """Where a site has sbatch_support=0, the variables are for the steps. Raises UsageError for options."""
    if said:
        raise UsageError(
            f"--{said[0][0]}: container options of {command} are switched off on this cluster",
            hint="give them to srun, inside the job",
        )


def parse(given: Iterable[tuple[str, str]], environ: Mapping[str, str], cwd: str = "") -> Request:
    """The request of one step: the options of the command line, then PYXIS_CONTAINER_* for what they leave unsaid.

    Where ``cwd`` is given, ``environ`` is the job's: relative mount sources are taken from
    there and variables in mounts from here. Raises UsageError for a bad value and for two
    options that contradict each other.
    """
    asked: dict[str, tuple[Any, str]] = {}
    for name, text in given:
        if name not in _BY_NAME:
            raise UsageError(f"--{name}: unknown option", hint="the plugin is of another version: pyxis-py install")
        option = _BY_NAME[name]
        _add(asked, option, option.from_command_line(text), f"--{name}")
    by_options = frozenset(asked)
    for option in OPTIONS:
        if option.variable and option.variable in environ and option.sets not in by_options:
            _add(asked, option, option.from_variable(environ[option.variable]), option.variable)
    values = {attribute: value for attribute, (value, _) in asked.items()}
    origins = {attribute: origin for attribute, (_, origin) in asked.items()}
    if "name" in values:
        values["name"], values["name_mode"] = values["name"]
    if cwd and "mounts" in values:
        try:
            values["mounts"] = tuple(mount.resolved(cwd, environ) for mount in values["mounts"])
        except ValueError as e:
            why, hint = e.args
            raise UsageError(f"{origins['mounts']}: {why}", hint=hint) from None
    return Request(**values, origins=origins)


def _add(asked: dict[str, tuple[Any, str]], option: Option, value: object, origin: str) -> None:
    """Note the value of an attribute, and the option or variable that it comes from. Raises UsageError."""
    known, before = asked.get(option.sets, (value, origin))
    if known == value:  # Slurm calls back more than once with the same value
        asked[option.sets] = value, origin
        return
    if before == origin:
        hint = (
            f"Slurm passes only the last one on: give it once, as {origin}={option.arginfo}; "
            "components of a heterogeneous job: an srun each, with --het-group; "
            "what salloc was given holds for each srun in it"
        )
        raise UsageError(f"{origin} is given twice with different values", hint=hint)
    raise UsageError(f"{before} and {origin} contradict each other", hint="give only one of them")


def ignored(request: Request) -> list[str]:
    """The options that have no effect because neither an image nor a name is given: a line for each, for people."""
    if request.wants_container:
        return []
    missing = "neither --container-image nor --container-name is given"
    return [f"ignoring {origin}: {missing}" for origin in request.origins.values()]
