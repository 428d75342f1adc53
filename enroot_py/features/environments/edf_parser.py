"""Find and parse environment files in TOML, with the line of each value.

Source: docs.cscs.ch, "EDF reference" and "Using container engine". On a node, a step normally does not import this
module, because parsing TOML takes longer than starting a container.
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
# The number of files to read, and of trailing commas to ignore in a file: each comma costs another parse.
_MAX_FILES_OR_COMMAS = 100
# The number of characters that _lines() parses in total. It parses some lines repeatedly, because each line with a
# closing bracket or quotes may be the end of a statement.
_MAX_REPARSED_CHARS = 1 << 20
_SUFFIX = ".toml"

# Each key with its type, an example, and its meaning. Arrays and tables have strings as values.
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
        "one mount per string, SRC[:DST[:FLAG+FLAG]]; added after the mounts of the bases",
    ),
    "workdir": (str, 'workdir = "/work"', "the working directory (default: the image's)"),
    "entrypoint": (bool, "entrypoint = true", "run the entrypoint of the image (default: false)"),
    "writable": (bool, "writable = false", "make the root filesystem writable (default: true)"),
    "devices": (list, 'devices = ["nvidia.com/gpu=all"]', "CDI names or paths in /dev; added after those of the bases"),
    "env": (dict, '[env] and below it NAME = "VALUE"', "variables; an empty value unsets the variable"),
    "annotations": (
        dict,
        '[annotations] and below it com.hooks.NAME.enabled = "true"',
        "annotations; hooks get them in the variable PENROOT_ANNOTATIONS, one line KEY=VALUE each",
    ),
}
_TYPE_NAMES = {str: "a string", bool: "true or false", list: "an array of strings", dict: "a table of strings"}
# Keys whose values may contain $NAME without braces, as in bash. In other values, $NAME without braces stays
# unchanged: a program may expand it.
_BARE_NAME_KEYS = ("base_environment", "image", "mounts", "workdir", "devices")
# Patterns for the values that no parser of an srun option checks.
_ANY_TEXT = re.compile(".*", re.DOTALL)
_FORMS = {
    "workdir": (re.compile("/.*", re.DOTALL), "an absolute path"),
    "devices": (re.compile("/dev/.+|[^/=]+/[^/=]+=.+"), "a path in /dev or a CDI name"),
}
_BARE_NAME = re.compile(r"(?<!\$)((?:\$\$)*)\$([A-Za-z_]\w*)", re.ASCII)
_DUPLICATE = re.compile("Cannot (overwrite|declare|mutate)|Duplicate")  # tomllib's messages about duplicates
_HOOK = re.compile(r"com\.hooks\.(.+)\.enabled")
# CSCS hooks that we replace. The annotation that enables a hook at CSCS enables our replacement.
REPLACED_HOOKS = frozenset(("cxi", "aws_ofi_nccl"))
_SARUS = "com.sarus."  # annotations of Sarus Suite
_NETSTACK = "com.hooks.netstack."  # annotations that select CSCS's Slingshot libraries built for containers
# Our annotations by prefix. An unknown annotation with one of these prefixes is a typo.
_PYXIS_ANNOTATIONS = ("com.pyxis.entrypoint_log", "com.pyxis.slurm", "com.pyxis.pytorch_remap_vars")
_BOOLEAN_ANNOTATIONS = (*_PYXIS_ANNOTATIONS, *(f"com.hooks.{name}.enabled" for name in sorted(REPLACED_HOOKS)))
_ANNOTATIONS_BY_PREFIX = {
    "com.pyxis.": _PYXIS_ANNOTATIONS,
    "com.hooks.cxi.": ("com.hooks.cxi.enabled",),
    "com.hooks.aws_ofi_nccl.": ("com.hooks.aws_ofi_nccl.enabled", "com.hooks.aws_ofi_nccl.variant"),
}


def read(name: str, origin: str, cwd: str, environ: Mapping[str, str]) -> Environment:
    """Read the environment ``name`` for a process in ``cwd``. ``origin`` names the option or variable for messages.

    Raises UsageError if a file does not exist, and ConfigError for an error in a file.
    """
    reading = _Reading(cwd, environ)
    entries = tuple(reading.read(name, origin, ()))
    used = {variable for entry in entries for variable in _variables(entry)}
    host = {variable: environ[variable] for variable in sorted(used & set(environ)) if not edf.is_of_job(variable)}
    return Environment(name, reading.paths[0], entries, host)


def check(environment: Environment) -> None:
    """Check the merged content of a file and its bases.

    Raises ConfigError for an invalid value, and UsageError if the content is too large for the environment of a job.
    """
    for entry in environment.entries:
        if entry.key in ("devices", "annotations", "workdir"):  # other code checks the other keys
            text = environment.value(entry)
            pattern, description = _FORMS.get(entry.key, (_ANY_TEXT, ""))
            if text and not environment.needs_job(text) and not pattern.fullmatch(text):
                raise ConfigError(
                    f"{entry.where}={text} is not {description}", hint=f"for example {KEYS[entry.key][1]}"
                )
    for name in _BOOLEAN_ANNOTATIONS:
        environment.annotation(name)
    if len(environment.dumps()) > CARRIED_BYTES:
        raise UsageError(
            f"{environment.path} is longer than the {CARRIED_BYTES >> 10} KiB that fit into the environment of a job",
            hint="mount one parent directory instead of many paths, and put values into a file that the program reads",
        )


def annotation_warning(environment: Environment) -> str:
    """Return a warning about annotations that no hook implements, or ""."""
    missing = {
        match[1]: entry
        for name, entry in environment.by_name("annotations").items()
        if (match := _HOOK.fullmatch(name)) and _is_true(entry) and match[1] not in REPLACED_HOOKS
    }
    netstack = {name: entry for name, entry in environment.by_name("annotations").items() if name.startswith(_NETSTACK)}
    source = netstack.get(f"{_NETSTACK}source")
    if netstack and not (source and source.text.strip() == "host"):  # the host's libraries: features/fabric
        missing["netstack"] = next(iter(netstack.values()))
    hooks = [f"com.hooks.{name} ({entry.origin})" for name, entry in missing.items()]
    annotations = environment.by_name("annotations").items()
    hooks += [f"{name} ({entry.origin})" for name, entry in annotations if name.startswith(_SARUS)]
    hooks += [typo for name, entry in annotations if (typo := _unknown_annotation(name, entry))]
    if not hooks:
        return ""
    return f"{environment.path}: no hook implements these annotations: {', '.join(hooks)}"


def _is_true(entry: FileEntry) -> bool:
    try:
        return bool(true_or_false(entry.text))
    except ValueError:
        return False


def _unknown_annotation(name: str, entry: FileEntry) -> str:
    """Describe an annotation for a warning if it has one of our prefixes but is unknown. Otherwise return ""."""
    known = next((names for begin, names in _ANNOTATIONS_BY_PREFIX.items() if name.startswith(begin)), (name,))
    if name in known:
        return ""
    return f"{name} ({entry.origin}; did you mean {nearest(name, known) or ' or '.join(known)}?)"


class _Reading:
    """Read one file and its bases. Relative paths start at the directory ``cwd``."""

    def __init__(self, cwd: str, environ: Mapping[str, str]) -> None:
        self._cwd = cwd
        self._environ = environ
        self.paths: list[str] = []  # of all files that were read; the requested file is the first

    def read(self, name: str, origin: str, above: tuple[str, ...]) -> Iterator[FileEntry]:
        """Yield the entries of a file's bases, then the file's own entries.

        ``above`` is the chain of files that led to this file: each is based on the next.
        """
        path = self._find(name, origin)
        self.paths.append(path)
        if any(os.path.realpath(path) == os.path.realpath(each) for each in above):
            raise ConfigError(f"{origin}: {path} is its own base", hint=" is based on ".join((*above, path)))
        if len(above) > _MAX_BASE_LEVELS or len(self.paths) > _MAX_FILES_OR_COMMAS:
            too_many = f"and its bases are more than {_MAX_FILES_OR_COMMAS} files"
            if len(above) > _MAX_BASE_LEVELS:
                too_many = f"has more than {_MAX_BASE_LEVELS} levels of bases"
            message = f"{origin}: the environment file {too_many}"
            raise ConfigError(message, hint="merge some of these files: " + " is based on ".join((*above, path)[-3:]))
        own = list(_entries(path))
        for entry in own:
            if entry.key == "base_environment":
                base = Environment("", "", (), self._environ).value(entry)
                yield from self.read(base, entry.where, (*above, path))
        yield from (entry for entry in own if entry.key != "base_environment")

    def _find(self, name: str, origin: str) -> str:
        """Return the path of a file. Raises UsageError."""
        if name.startswith(("~", "$")):
            hint = f"write the full path; if the name really begins with {name[0]}, write ./{name}"
            raise UsageError(f"{origin}: no shell has replaced the {name[0]}", hint=hint)
        in_cwd = files.path_in(self._cwd, name)
        if edf.is_path(name):
            if not _may_exist(in_cwd):
                hint = (
                    self._hint(name, in_cwd) or "to search EDF_PATH, use a name without a / and without a leading dot"
                )
                raise UsageError(f"{origin}: there is no file {in_cwd}", hint=hint)
            return in_cwd
        if name.endswith(_SUFFIX) and _may_exist(in_cwd):
            return in_cwd
        directories = self._search_directories()
        for directory in directories:
            path = f"{directory}/{name.removesuffix(_SUFFIX)}{_SUFFIX}"
            if os.path.lexists(path):
                _check_directory(directory)
                return path
        raise UsageError(
            f"{origin}: there is no {name.removesuffix(_SUFFIX)}{_SUFFIX} in {', '.join(directories)}",
            hint=self._hint(name, in_cwd) or self._nearest(name, directories),
        )

    def _hint(self, name: str, path: str) -> str:
        """Return a hint with the path of an existing file that the user may mean, or ""."""
        for suffix in ("", _SUFFIX):
            if os.path.exists(path + suffix):
                shown = path if name.startswith("/") else "./" + name.removeprefix("./")
                return f"it may be {shown}{suffix}"
        return ""

    @staticmethod
    def _nearest(name: str, directories: list[str]) -> str:
        for directory in directories:
            if os.path.isdir(directory) and not os.access(directory, os.R_OK | os.X_OK):
                return f"cannot suggest a name: no permission to list {directory}; check the spelling"
        names = [
            file.removesuffix(_SUFFIX)
            for directory in directories
            for file in _listed(directory)
            if file.endswith(_SUFFIX)
        ]
        if meant := nearest(name.removesuffix(_SUFFIX), names):
            return f"did you mean {meant}?"
        return "begin a path with / or ./, or set EDF_PATH to the directory of the file"

    def _search_directories(self) -> list[str]:
        """Return the directories to search for names. Raises ConfigError."""
        directories = [directory for directory in self._environ.get("EDF_PATH", "").split(":") if directory]
        for directory in directories:
            if not directory.startswith("/"):
                raise ConfigError(
                    f"EDF_PATH: {directory} is not an absolute path", hint="for example EDF_PATH=$PWD/edf"
                )
        return directories or [base_directories(self._environ)["HOME"] + "/.edf"]


def _may_exist(path: str) -> bool:
    """Return False only if a path certainly does not exist.

    For a dangling link or an unreadable directory, return True: opening the path reports the error.
    """
    try:
        os.lstat(path)
    except OSError as e:
        return not isinstance(e, (FileNotFoundError, NotADirectoryError))
    return True


def _listed(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []


def _check_directory(directory: str) -> None:
    """Raise ConfigError for a world-writable directory, because an environment file decides what is mounted."""
    if os.stat(directory).st_mode & stat.S_IWOTH:
        raise ConfigError(f"{directory} is world-writable: it is not trusted", hint=f"chmod o-w {directory}")


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
        text, values = _parse(path, text)
        lines = _lines(text)
        return [
            entry
            for key, value in values.items()
            for entry in _key_entries(key, value, lambda *names: f"{path}:{lines[names]}" if names in lines else path)
        ]
    except RecursionError:
        raise ConfigError(
            f"{path}: tables or arrays are nested too deeply", hint="is it an environment file?"
        ) from None


def _parse(path: str, text: str) -> tuple[str, dict[str, Any]]:
    """Parse TOML. Return the text without invalid trailing commas, and the values by key. Raises ConfigError.

    Examples of CSCS have a comma at the end of some lines. Replace such a comma by a space, and print a warning.
    """
    ignored_commas = 0
    while True:
        try:
            return text, tomllib.loads(text)
        except tomllib.TOMLDecodeError as e:
            why, lines = str(e), text.rstrip("\n").split("\n")
            position = re.search(r" \(at (?:line (\d+), column (\d+)|end of document)\)$", why)
            number = min(int(position[1]), len(lines)) if position and position[1] else len(lines)
            line, at = lines[number - 1], int(position[2]) - 1 if position and position[2] else 0
            if not re.fullmatch(r",\s*(#.*)?", line[at:]) or ignored_commas == _MAX_FILES_OR_COMMAS:
                hint = "TOML: put strings in double quotes, and only a comment after a value"
                if _DUPLICATE.match(why):
                    hint = "TOML: define each key and each table once; merge the duplicates"
                message = f"{path}:{number}: {why[: position.start()] if position else why}: {line.strip()[:80]}"
                raise ConfigError(message, hint=hint) from e
            log.warn(f"{path}:{number}: ignoring the comma at the end, because it is not valid TOML")
            ignored_commas += 1
            lines[number - 1] = f"{line[:at]} {line[at + 1 :]}"
            text = "\n".join(lines)


def _lines(text: str) -> dict[tuple[str, ...], int]:
    """Return the line number of each key in valid TOML. For a long text, omit the keys of its last lines.

    A statement ends with the first line that makes it valid TOML. The header of a table applies to the following lines.
    """
    remaining_chars = _MAX_REPARSED_CHARS
    numbers: dict[tuple[str, ...], int] = {}
    table: tuple[str, ...] = ()
    begin, lines = 0, text.split("\n")
    for number, line in enumerate(lines):
        if number > begin and not any(mark in line for mark in ("]", "}", '"""', "'''")):
            continue  # inside a multi-line statement: the last line of such a statement has a mark
        statement = "\n".join(lines[begin : number + 1])
        remaining_chars -= len(statement)
        if remaining_chars < 0:
            break
        try:
            values = tomllib.loads(statement)
        except tomllib.TOMLDecodeError:
            continue
        names = list(_leaves(values))
        if line.lstrip().startswith("[") and number == begin:
            table, names = names[0], [()]
        for each in names:
            full = (*table, *each)
            for length in range(1, len(full) + 1):
                numbers.setdefault(full[:length], begin + 1)
        begin = number + 1
    return numbers


def _leaves(value: Any) -> Iterator[tuple[str, ...]]:
    """Yield the path of each leaf of nested tables, as a tuple of names.

    The path of a plain value or of an empty table is ().
    """
    if not isinstance(value, dict) or not value:
        yield ()
        return
    for name, inner in value.items():
        yield from ((name, *rest) for rest in _leaves(inner))


def _key_entries(key: str, value: Any, locate: Callable[..., str]) -> Iterator[FileEntry]:
    """Yield the entries of one key of a file. ``locate(*names)`` returns FILE:LINE of a key. Raises ConfigError."""
    if key not in KEYS:
        meant = nearest(key.lower(), KEYS)
        hint = f"did you mean {meant}?" if meant else f"keys are {', '.join(KEYS)}"
        if isinstance(value, dict):
            hint = f"put annotations such as {key}.… below a line [annotations]"
        raise ConfigError(f"{locate(key)}: unknown key {key!r}", hint=hint)
    kind, example, _ = KEYS[key]
    if key == "base_environment" and isinstance(value, str):
        value = [value] if value else []
    if isinstance(value, dict) and kind is dict:
        yield from _table_entries(key, value, locate)
        return
    values = value if isinstance(value, list) else [value]
    if not isinstance(value, kind) or not all(isinstance(each, bool if kind is bool else str) for each in values):
        raise ConfigError(f"{locate(key)}: {key} is not {_TYPE_NAMES[kind]}", hint=f"for example {example}")
    for each in values:
        yield _normalized(FileEntry(key, "", str(each).lower() if kind is bool else each, locate(key)))


def _table_entries(key: str, table: dict[str, Any], locate: Callable[..., str]) -> Iterator[FileEntry]:
    """Yield the entries of ``env``, or of ``annotations`` with its nested tables. Raises ConfigError."""
    for names in filter(None, _leaves(table)):
        value: Any = table
        for name in names:
            value = value[name]
        where, dotted = locate(key, *names), ".".join(names)
        if key == "env" and len(names) > 1 or not isinstance(value, str):
            hint = f'write {dotted} = "{str(value).lower() if isinstance(value, (bool, int)) else "VALUE"}"'
            if names[0] in KEYS:
                hint = f"put top-level keys such as {names[0]} before the first [table]"
            raise ConfigError(f"{where}: {dotted} in {key} is not a string", hint=hint)
        if key == "env" and dotted in KEYS:
            log.warn(
                f"{where}: {dotted} is a variable here, below [env]; to set the key {dotted}, put it before the first "
                "[table]"
            )
        yield _normalized(FileEntry(key, dotted, value, where))


def _normalized(entry: FileEntry) -> FileEntry:
    """Check an entry before its variables are expanded. In values of _BARE_NAME_KEYS, replace $NAME by ${NAME}.

    Raises ConfigError.
    """
    if "\0" in entry.text or "\0" in entry.name:
        raise ConfigError(f"{entry.where}: it contains a NUL byte", hint="remove \\u0000")
    if entry.key == "env" and not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", entry.name):
        raise ConfigError(f"{entry.where}: {entry.name!r} is not the name of a variable", hint='write NAME = "VALUE"')
    if entry.key in _BARE_NAME_KEYS:
        entry = FileEntry(entry.key, entry.name, _BARE_NAME.sub(r"\1${\2}", entry.text), entry.origin)
    _variables(entry)
    return entry


def _variables(entry: FileEntry) -> list[str]:
    """Return the names of the variables in an entry. Raises ConfigError."""
    try:
        return expansion.names(entry.text)
    except ValueError as e:
        why, hint = e.args
        raise ConfigError(f"{entry.where}: {why}", hint=hint) from None
