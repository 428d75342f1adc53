"""Find and parse environment files in TOML, with the line of each value.

Source: docs.cscs.ch, "EDF reference" and "Using container engine". Off the step path: TOML costs more than a start.
"""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from enroot_py.base import log
from enroot_py.base.errors import ConfigError, UsageError
from enroot_py.base.features import CARRIED_BYTES
from enroot_py.config import files
from enroot_py.config.words import base_directories, nearest, true_or_false
from enroot_py.features.environments import edf, expansion
from enroot_py.features.environments.edf import Environment, FileEntry

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_MAX_FILE_BYTES = 64 << 10
_MAX_BASE_LEVELS = 10  # of base_environment
_MAX_FILES_OR_COMMAS = 100  # base files, and commas that look like the end of a line: both bound the work
_MAX_REPARSED_CHARS = 1 << 20  # to find the lines of keys: each line of an array may look like its end
_SUFFIX = ".toml"

# What a key holds: a value, an array of strings, or a table of strings; how that is written; and what it means.
KEYS: dict[str, tuple[type, str, str]] = {
    "base_environment": (
        list,
        'base_environment = ["common", "./mine.toml"]',
        "files to start from; this file overrides them",
    ),
    "image": (str, 'image = "ubuntu:24.04"', "the image, as for srun --container-image"),
    "mounts": (
        list,
        'mounts = ["/data:/data:ro"]',
        "SRC[:DST[:FLAG+FLAG]], one per entry, after the mounts of the bases",
    ),
    "workdir": (str, 'workdir = "/work"', "the working directory (default: the image's)"),
    "entrypoint": (bool, "entrypoint = true", "run the entrypoint of the image (default: false)"),
    "writable": (bool, "writable = false", "make the root filesystem writable (default: true)"),
    "devices": (list, 'devices = ["nvidia.com/gpu=all"]', "CDI names or paths in /dev, after the devices of the bases"),
    "env": (dict, '[env] and below it NAME = "VALUE"', "variables; an empty value unsets one"),
    "annotations": (
        dict,
        '[annotations] and below it com.hooks.NAME.enabled = "true"',
        "annotations for hooks, in the variable PENROOT_ANNOTATIONS: a line KEY=VALUE for each",
    ),
}
_WORDS = {str: "a string", bool: "true or false", list: "an array of strings", dict: "a table of strings"}
# Keys whose values take $NAME without braces, as in bash. No program reads these values.
_PATHS = ("base_environment", "image", "mounts", "workdir", "devices")
# The form of a whole value, if no option checks it.
_ANY = re.compile(".*", re.DOTALL)
_FORMS = {
    "workdir": (re.compile("/.*", re.DOTALL), "absolute path"),
    "devices": (re.compile("/dev/.+|[^/=]+/[^/=]+=.+"), "path in /dev and no name of CDI"),
}
_BARE = re.compile(r"(?<!\$)((?:\$\$)*)\$([A-Za-z_]\w*)", re.ASCII)
_TWICE = re.compile("Cannot (overwrite|declare|mutate)|Duplicate")  # in words of tomllib
_HOOK = re.compile(r"com\.hooks\.(.+)\.enabled")
# Hooks of CSCS for which we have a replacement, enabled by the same annotation.
SERVED = frozenset(("cxi", "aws_ofi_nccl"))
_SARUS = "com.sarus."  # settings of Sarus Suite
_NETSTACK = "com.hooks.netstack."  # libraries of CSCS for Slingshot that are made for containers
# Our annotations, by prefix: an unknown annotation with the prefix is a typo.
_OF_PYXIS = ("com.pyxis.entrypoint_log", "com.pyxis.slurm", "com.pyxis.pytorch_remap_vars")
_TRUTHS = (*_OF_PYXIS, *(f"com.hooks.{name}.enabled" for name in sorted(SERVED)))
_OURS = {
    "com.pyxis.": _OF_PYXIS,
    "com.hooks.cxi.": ("com.hooks.cxi.enabled",),
    "com.hooks.aws_ofi_nccl.": ("com.hooks.aws_ofi_nccl.enabled", "com.hooks.aws_ofi_nccl.variant"),
}


def read(name: str, origin: str, cwd: str, environ: Mapping[str, str]) -> Environment:
    """Read the environment ``name``, given by the option or variable ``origin``, for a process in ``cwd``.

    Raises UsageError if the file does not exist, ConfigError for an error in a file.
    """
    reading = _Reading(cwd, environ)
    entries = tuple(reading.file(name, origin, ()))
    named = {variable for entry in entries for variable in _variables(entry)}
    host = {variable: environ[variable] for variable in sorted(named & set(environ)) if not edf.is_of_job(variable)}
    return Environment(name, reading.paths[0], entries, host)


def check(environment: Environment) -> None:
    """Check a file as a whole. Raises UsageError if the file does not fit into a job, and ConfigError."""
    for entry in environment.entries:
        if entry.key in ("devices", "annotations", "workdir"):  # the parsers of options check all other keys
            text = environment.value(entry)
            form, what = _FORMS.get(entry.key, (_ANY, ""))
            if text and not environment.waits(text) and not form.fullmatch(text):
                raise ConfigError(f"{entry.where}={text} is no {what}", hint=f"for example {KEYS[entry.key][1]}")
    for name in _TRUTHS:
        environment.annotation(name)
    if len(environment.dumps()) > CARRIED_BYTES:
        raise UsageError(
            f"{environment.path} is longer than the {CARRIED_BYTES >> 10} KiB that fit into the environment of a job",
            hint="mount a directory above many, and let programs read files",
        )


def lacking(environment: Environment) -> str:
    """Return a message about annotations that no hook implements, or ""."""
    wanted = {
        match[1]: entry
        for name, entry in environment.by_name("annotations").items()
        if (match := _HOOK.fullmatch(name)) and _is_true(entry) and match[1] not in SERVED
    }
    stack = {name: entry for name, entry in environment.by_name("annotations").items() if name.startswith(_NETSTACK)}
    source = stack.get(f"{_NETSTACK}source")
    if stack and not (source and source.text.strip() == "host"):  # features/fabric brings the libraries of the host
        wanted["netstack"] = next(iter(stack.values()))
    hooks = [f"com.hooks.{name} ({entry.origin})" for name, entry in wanted.items()]
    annotations = environment.by_name("annotations").items()
    hooks += [f"{name} ({entry.origin})" for name, entry in annotations if name.startswith(_SARUS)]
    hooks += [slip for name, entry in annotations if (slip := _slip(name, entry))]
    if not hooks:
        return ""
    return f"{environment.path}: no hook implements these annotations: {', '.join(hooks)}"


def _is_true(entry: FileEntry) -> bool:
    try:
        return bool(true_or_false(entry.text))
    except ValueError:
        return False


def _slip(name: str, entry: FileEntry) -> str:
    """Return an unknown annotation with a known prefix, or ""."""
    known = next((names for begin, names in _OURS.items() if name.startswith(begin)), (name,))
    if name in known:
        return ""
    return f"{name} ({entry.origin}; did you mean {nearest(name, known) or ' or '.join(known)}?)"


class _Reading:
    """One file and its bases, found from the directory ``cwd``."""

    def __init__(self, cwd: str, environ: Mapping[str, str]) -> None:
        self._cwd = cwd
        self._environ = environ
        self.paths: list[str] = []  # of all files that were read; the requested file is the first

    def file(self, name: str, origin: str, above: tuple[str, ...]) -> Iterator[FileEntry]:
        """Return the entries of a file's bases, then its own. ``above`` are the files with this file as a base."""
        path = self._find(name, origin)
        self.paths.append(path)
        if any(os.path.realpath(path) == os.path.realpath(each) for each in above):
            raise ConfigError(f"{origin}: {path} is its own base", hint=" is based on ".join((*above, path)))
        if len(above) > _MAX_BASE_LEVELS or len(self.paths) > _MAX_FILES_OR_COMMAS:
            limit = f"{_MAX_BASE_LEVELS} levels" if len(above) > _MAX_BASE_LEVELS else f"{_MAX_FILES_OR_COMMAS} files"
            message = f"{origin}: the environment file has bases in more than {limit}"
            raise ConfigError(message, hint="merge some of these files: " + " is based on ".join((*above, path)[-3:]))
        own = list(_entries(path))
        for entry in own:
            if entry.key == "base_environment":
                base = Environment("", "", (), self._environ).value(entry)
                yield from self.file(base, entry.where, (*above, path))
        yield from (entry for entry in own if entry.key != "base_environment")

    def _find(self, name: str, origin: str) -> str:
        """Return the path of a file. Raises UsageError."""
        if name.startswith(("~", "$")):
            hint = f"write the path out; a file of that name is ./{name}"
            raise UsageError(f"{origin}: no shell has replaced the {name[0]}", hint=hint)
        here = files.path_in(self._cwd, name)
        if edf.is_path(name):
            if not _is_there(here):
                hint = self._hint(name, here) or "without a / or a dot before it, a name is looked for in EDF_PATH"
                raise UsageError(f"{origin}: there is no file {here}", hint=hint)
            return here
        if name.endswith(_SUFFIX) and _is_there(here):
            return here
        places = self._places()
        for place in places:
            path = f"{place}/{name.removesuffix(_SUFFIX)}{_SUFFIX}"
            if os.path.lexists(path):
                _check_place(place)
                return path
        raise UsageError(
            f"{origin}: there is no {name.removesuffix(_SUFFIX)}{_SUFFIX} in {', '.join(places)}",
            hint=self._hint(name, here) or self._nearest(name, places),
        )

    def _hint(self, name: str, here: str) -> str:
        """Return how to write a file that the user may mean."""
        for suffix in ("", _SUFFIX):
            if os.path.exists(here + suffix):
                there = here if name.startswith("/") else "./" + name.removeprefix("./")
                return f"it may be {there}{suffix}"
        return ""

    @staticmethod
    def _nearest(name: str, places: list[str]) -> str:
        for place in places:
            if os.path.isdir(place) and not os.access(place, os.R_OK | os.X_OK):
                return f"you may not look into {place}: check the name"
        there = [file.removesuffix(_SUFFIX) for place in places for file in _listed(place) if file.endswith(_SUFFIX)]
        if meant := nearest(name.removesuffix(_SUFFIX), there):
            return f"did you mean {meant}?"
        return "begin a path with / or ./, or set EDF_PATH to other directories"

    def _places(self) -> list[str]:
        """Return the directories in which names are searched. Raises ConfigError."""
        said = [place for place in self._environ.get("EDF_PATH", "").split(":") if place]
        for place in said:
            if not place.startswith("/"):
                raise ConfigError(f"EDF_PATH: {place} is not an absolute path", hint="write it out: EDF_PATH=$PWD/edf")
        return said or [base_directories(self._environ)["HOME"] + "/.edf"]


def _is_there(path: str) -> bool:
    """Return whether a path may exist, as a link or in an unreadable directory: opening it reports the error."""
    try:
        os.lstat(path)
    except OSError as e:
        return not isinstance(e, (FileNotFoundError, NotADirectoryError))
    return True


def _listed(place: str) -> list[str]:
    try:
        return os.listdir(place)
    except OSError:
        return []


def _check_place(place: str) -> None:
    """Raise ConfigError for a world-writable directory: an environment file decides which files are mounted."""
    if os.stat(place).st_mode & stat.S_IWOTH:
        raise ConfigError(f"{place} is world-writable: it is not trusted", hint=f"chmod o-w {place}")


def _entries(path: str) -> list[FileEntry]:
    """Return the entries of a file, in order. Raises ConfigError."""
    try:
        data = files.named(path) or b""
    except OSError as e:
        hint = (
            "in a world-writable directory, you or root must own the file, and nobody else may write to it: chmod go-w"
        )
        raise ConfigError(f"{path}: {e.strerror}: the file is not trusted", hint=hint) from e
    if len(data) > _MAX_FILE_BYTES:
        raise ConfigError(f"{path} is larger than {_MAX_FILE_BYTES >> 10} KiB", hint="is it an environment file?")
    try:
        text = data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as e:
        line = data.count(b"\n", 0, e.start) + 1
        raise ConfigError(f"{path}:{line}: this is not UTF-8", hint="save it as UTF-8") from e
    try:
        text, said = _parse(path, text)
        lines = _lines(text)
        return [
            entry
            for key, value in said.items()
            for entry in _of_key(key, value, lambda *names: f"{path}:{lines[names]}" if names in lines else path)
        ]
    except RecursionError:
        raise ConfigError(
            f"{path}: tables or arrays are nested too deeply", hint="is it an environment file?"
        ) from None


def _parse(path: str, text: str) -> tuple[str, dict[str, Any]]:
    """Parse TOML. A comma at the end of a line, which examples of CSCS have, counts as a space.

    Raises ConfigError.
    """
    passed_over = 0
    while True:
        try:
            return text, tomllib.loads(text)
        except tomllib.TOMLDecodeError as e:
            why, lines = str(e), text.rstrip("\n").split("\n")
            place = re.search(r" \(at (?:line (\d+), column (\d+)|end of document)\)$", why)
            number = min(int(place[1]), len(lines)) if place and place[1] else len(lines)
            line, at = lines[number - 1], int(place[2]) - 1 if place and place[2] else 0
            if not re.fullmatch(r",\s*(#.*)?", line[at:]) or passed_over == _MAX_FILES_OR_COMMAS:
                hint = "TOML: strings are in double quotes, and nothing is behind a value but a comment"
                if _TWICE.match(why):
                    hint = "TOML: a key or table comes once; the values of several belong into one"
                message = f"{path}:{number}: {why[: place.start()] if place else why}: {line.strip()[:80]}"
                raise ConfigError(message, hint=hint) from e
            log.warn(f"{path}:{number}: ignoring the comma at the end: it is not TOML")
            passed_over += 1
            lines[number - 1] = f"{line[:at]} {line[at + 1 :]}"
            text = "\n".join(lines)


def _lines(text: str) -> dict[tuple[str, ...], int]:
    """Return the line of each key of a valid text. For a long text, return only the lines of the first keys.

    A statement ends with the first line that makes it valid TOML. The header of a table applies to the following lines.
    """
    patience = _MAX_REPARSED_CHARS
    found: dict[tuple[str, ...], int] = {}
    table: tuple[str, ...] = ()
    begin, lines = 0, text.split("\n")
    for number, line in enumerate(lines):
        if number > begin and not any(mark in line for mark in ("]", "}", '"""', "'''")):
            continue  # inside a statement of several lines, which ends with such a mark
        statement = "\n".join(lines[begin : number + 1])
        patience -= len(statement)
        if patience < 0:
            break
        try:
            said = tomllib.loads(statement)
        except tomllib.TOMLDecodeError:
            continue
        names = list(_leaves(said))
        if line.lstrip().startswith("[") and number == begin:
            table, names = names[0], [()]
        for each in names:
            full = (*table, *each)
            for length in range(1, len(full) + 1):
                found.setdefault(full[:length], begin + 1)
        begin = number + 1
    return found


def _leaves(value: Any) -> Iterator[tuple[str, ...]]:
    """Yield the names in a table and in its nested tables."""
    if not isinstance(value, dict) or not value:
        yield ()
        return
    for name, inner in value.items():
        yield from ((name, *rest) for rest in _leaves(inner))


def _of_key(key: str, value: Any, origin: Callable[..., str]) -> Iterator[FileEntry]:
    """Yield the entries of one key of a file; ``origin`` returns the place of a name. Raises ConfigError."""
    if key not in KEYS:
        meant = nearest(key.lower(), KEYS)
        hint = f"did you mean {meant}?" if meant else f"keys are {', '.join(KEYS)}"
        if isinstance(value, dict):
            hint = f"annotations, as {key}.…, come below a line [annotations]"
        raise ConfigError(f"{origin(key)}: unknown key {key!r}", hint=hint)
    kind, example, _ = KEYS[key]
    if key == "base_environment" and isinstance(value, str):
        value = [value] if value else []
    if isinstance(value, dict) and kind is dict:
        yield from _of_table(key, value, origin)
        return
    values = value if isinstance(value, list) else [value]
    if not isinstance(value, kind) or not all(isinstance(each, bool if kind is bool else str) for each in values):
        raise ConfigError(f"{origin(key)}: {key} is not {_WORDS[kind]}", hint=f"for example {example}")
    for each in values:
        yield _checked(FileEntry(key, "", str(each).lower() if kind is bool else each, origin(key)))


def _of_table(key: str, table: dict[str, Any], origin: Callable[..., str]) -> Iterator[FileEntry]:
    """Yield the entries of ``env``, or of ``annotations`` with its nested tables. Raises ConfigError."""
    for names in filter(None, _leaves(table)):
        value: Any = table
        for name in names:
            value = value[name]
        where, dotted = origin(key, *names), ".".join(names)
        if key == "env" and len(names) > 1 or not isinstance(value, str):
            hint = f'write {dotted} = "{str(value).lower() if isinstance(value, (bool, int)) else "VALUE"}"'
            if names[0] in KEYS:
                hint = f"keys of the file itself, as {names[0]}, come before its first [table]"
            raise ConfigError(f"{where}: {dotted} in {key} is not a string", hint=hint)
        if key == "env" and dotted in KEYS:
            log.warn(f"{where}: {dotted} sets a variable here: keys of the file itself come before its first [table]")
        yield _checked(FileEntry(key, dotted, value, where))


def _checked(entry: FileEntry) -> FileEntry:
    """Raise ConfigError for a text that is invalid with any variables."""
    if "\0" in entry.text or "\0" in entry.name:
        raise ConfigError(f"{entry.where}: it contains a NUL byte", hint="take \\u0000 out")
    if entry.key == "env" and not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", entry.name):
        raise ConfigError(f"{entry.where}: {entry.name!r} is not the name of a variable", hint='write NAME = "VALUE"')
    if entry.key in _PATHS:
        entry = FileEntry(entry.key, entry.name, _BARE.sub(r"\1${\2}", entry.text), entry.origin)
    _variables(entry)
    return entry


def _variables(entry: FileEntry) -> list[str]:
    """Return the variables in an entry. Raises ConfigError."""
    try:
        return expansion.names(entry.text)
    except ValueError as e:
        why, hint = e.args
        raise ConfigError(f"{entry.where}: {why}", hint=hint) from None
