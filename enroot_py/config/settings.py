"""The settings of a run, each with its origin.

A value comes from, in order: the environment, the user's files, the system's
files, the default. In each directory penroot.yaml, the form with checked keys,
goes before enroot.conf. On the start path: no typing, no re, no yaml.
"""

from __future__ import annotations

import os
from _collections_abc import Iterable, Iterator, Mapping

from enroot_py import LIBRARY
from enroot_py.base import trusted
from enroot_py.base.errors import ConfigError
from enroot_py.config import files
from enroot_py.config.table import FIXED, SETTINGS, UNUSED, Setting, Table, all_settings, check_key
from enroot_py.config.words import base_directories, expand

# Directory of Slurm and penroot in a container: features/slurm_inside, c_shims/brought.h.
HERE = "/run/penroot/slurm"
BIN = f"{HERE}/bin"
SITE = f"{HERE}/etc/enroot" if f"{HERE}/penroot" == LIBRARY else "/etc/enroot"
POLICY = "policy.json"

TYPE_CHECKING = False
if TYPE_CHECKING:
    Value = tuple[str, str]  # the text, and where it comes from
    Entry = tuple[str, int, str]  # a variable, the line of its file, the text
    Place = tuple[str, list[str]]  # a directory, and the names in it


class Settings(Table):
    """The settings of one run, read-only."""

    def __init__(
        self, values: dict[str, Value], passed_on: Mapping[str, Value] | None = None, policies: tuple[str, ...] = ()
    ) -> None:
        super().__init__(values)
        self._passed_on = passed_on or {}
        self.policies = policies  # files that say which images are let in: store/policies.py

    @property
    def is_extended(self) -> bool:
        """Whether a feature's setting is set."""
        return len(self._values) > len(SETTINGS)

    @property
    def passed_on(self) -> dict[str, str]:
        """Variables of the files for hooks: defaults for the caller's variables."""
        return {key: text for key, (text, _) in self._passed_on.items()}

    def everything(self) -> Iterator[tuple[str, str, str]]:
        """Yield variable, value and origin of each setting, then of the variables for hooks."""
        for variable, setting in all_settings().items():
            yield variable, *self._values.get(setting.name, (setting.default, "default"))
        for variable, (text, origin) in self._passed_on.items():
            yield variable, text, origin

    def replace(self, origin: str, **changes: object) -> Settings:
        """Return a copy with some values changed, as by an option of the command line."""
        values = dict(self._values)
        for name, value in changes.items():
            text = ("no", "yes")[value] if isinstance(value, bool) else str(value)
            values[name] = (text, origin)
        return Settings(values, self._passed_on, self.policies)

    def with_devices(self, more: Iterable[str], origin: str) -> Settings:
        """Return a copy with devices added. Raises ConfigError without the feature for devices."""
        devices = tuple(more)
        if devices and "ENROOT_DEVICES" not in all_settings():
            raise ConfigError(f"{origin}: this penroot gives no devices", hint="this installation lacks that feature")
        known, _ = self._values.get("devices", ("", ""))
        return self.replace(origin, devices=",".join(filter(None, (known, *devices)))) if devices else self


def sysconf_path(environ: Mapping[str, str] = os.environ) -> str:
    return environ.get("ENROOT_SYSCONF_PATH") or SITE


def directories(name: str, settings: Settings, environ: Mapping[str, str]) -> tuple[str, str]:
    """Return the system's and the user's path of ``name``, such as hooks.d."""
    return f"{sysconf_path(environ)}/{name}", f"{settings.config_path}/{name}"


def load(
    environ: Mapping[str, str] = os.environ, directives: Mapping[str, Value] | None = None, *, in_job: bool = True
) -> Settings:
    """Read the settings of this process; ``directives`` of a configuration script, with origins, take precedence.

    Where a job is submitted, a file may name variables that only the job has: they are empty unless ``in_job``.
    Raises ConfigError, with file and line, for a key that is none, a value that does not parse, and a variable in it
    that is not set. Source of the format: enroot(1), configuration.
    """
    environ = dict(environ)  # os.environ encodes and decodes whatever it is asked for
    base = base_directories(environ)
    places = list(_places(environ, base))
    in_files = dict(_in_files(places, environ, base, in_job))
    values = {}
    others = (key for key in (*environ, *in_files, *(directives or ())) if key.startswith("ENROOT_"))
    known = SETTINGS if all(key in SETTINGS or key in FIXED or key in UNUSED for key in others) else all_settings()
    for variable, setting in known.items():
        if directives and variable in directives:
            value = directives[variable]
        elif environ.get(variable):  # an empty one is an unset one, as for enroot
            value = environ[variable], "environment"
        elif variable in in_files:
            value = in_files[variable]
        elif "$" in setting.default:
            value = expand(setting.default, base), "default"
        elif variable in SETTINGS:  # a test has parsed it
            values[setting.name] = setting.default, "default"
            continue
        else:  # of a feature: see FeatureTable
            continue
        _check(setting, *value)
        values[setting.name] = value
    for name in ("cache_path", "data_path", "runtime_path"):
        text, origin = values[name]
        values[name] = (_own(text), origin)
    store, origin = values["cache_path"]
    values["cache_path"] = (_of_our_group(store), origin)
    private, origin = values["restrict_dev"]
    if private == "auto":  # root could open the host's disks; with allow_superuser, root asks for that
        superuser = SETTINGS["ENROOT_ALLOW_SUPERUSER"].parse(values["allow_superuser"][0])
        values["restrict_dev"] = "yes" if os.geteuid() == 0 and not superuser else "no", f"auto, {origin}"
    passed_on = {key: value for key, value in in_files.items() if key not in known and key not in UNUSED}
    return Settings(values, passed_on, _policies(places, environ))


def _check(setting: Setting, text: str, origin: str) -> None:
    """Raise ConfigError for a value that does not parse."""
    try:
        setting.parse(text)
    except ValueError as e:
        hint = f"{setting.name}: {setting.doc}"
        if origin == "default":
            hint = f"it comes of {setting.default}: HOME, TMPDIR and XDG_* have to be absolute"
        raise ConfigError(f"{origin}: {setting.variable}={text!r} {e}", hint=hint) from None


def _own(path: str) -> str:
    try:
        return trusted.own(path)
    except OSError:
        return path  # the user of the path reports the error


def _of_our_group(store: str) -> str:
    """Return ``store``, or the subdirectory for our group if the store is of another group, as after newgrp(1).

    The one group of a user namespace is the process's own, and overlayfs changes nothing in a directory whose
    group is not there.
    """
    try:
        layers = os.stat(store + "/layers")
        if layers.st_mode & 0o2000:  # made by an older version in a set-group-ID directory: its trees tell the group
            with os.scandir(store + "/layers") as entries:
                layers = next(entries).stat()
    except (OSError, StopIteration):
        return store
    if layers.st_uid != os.geteuid() or layers.st_gid == os.getegid():
        return store
    return f"{store}/group-{os.getegid()}"


def read_files(environ: Mapping[str, str]) -> Iterator[str]:
    """Return the existing files of settings in the order in which they are read: the last value counts."""
    return _files(_places(environ, base_directories(environ)))


def _places(environ: Mapping[str, str], base: Mapping[str, str]) -> Iterator[Place]:
    """Return the existing directories of settings, the system's and the user's, with the names in each."""
    for directory in (sysconf_path(environ), environ.get("ENROOT_CONFIG_PATH") or base["XDG_CONFIG_HOME"] + "/enroot"):
        try:
            there = os.listdir(directory)
        except OSError as e:  # it may still let us in by name; and no policy of the site is passed over
            by_name = isinstance(e, PermissionError) or directory == SITE
            there = ["enroot.conf", "penroot.yaml", POLICY] if by_name and os.path.isdir(directory) else []
        if there:
            files.check(directory)
        yield directory, there


def _files(places: Iterable[Place]) -> Iterator[str]:
    for directory, there in places:
        for name, suffix in (("enroot.conf", ".conf"), ("penroot.yaml", ".yaml")):
            if name in there:
                yield f"{directory}/{name}"
            if name + ".d" in there:
                more = sorted(files.names(f"{directory}/{name}.d"))
                yield from (f"{directory}/{name}.d/{file}" for file in more if file.endswith(suffix) and file[0] != ".")


def _policies(places: Iterable[Place], environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the existing policies. No variable disables the site's policy; it can only add another one."""
    found = [f"{directory}/{POLICY}" for directory, there in places if POLICY in there]
    its_own = f"{SITE}/{POLICY}"
    if sysconf_path(environ) != SITE and _may_be(its_own):
        found.insert(0, its_own)
    return tuple(found)


def _may_be(path: str) -> bool:
    """Whether a file exists, or may exist in an unreadable directory: opening it reports the error."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        pass
    return True


def _in_files(
    places: Iterable[Place], environ: Mapping[str, str], base: Mapping[str, str], in_job: bool
) -> Iterator[tuple[str, Value]]:
    """Return the variables of the files; the last value counts. A line may use variables of earlier lines.

    Raises ConfigError.
    """
    variables = {**base, **environ}
    for path in _files(places):
        entries = _in_yaml(path, base["XDG_RUNTIME_DIR"]) if path.endswith(".yaml") else _in_conf(path)
        for key, line, text in entries:
            try:
                if "\0" in text:
                    raise ValueError("no value holds a NUL byte")
                text = expand(text, variables, may_be_unset=lambda name: not in_job and name.startswith("SLURM_"))
            except ValueError as e:
                raise ConfigError(f"{path}:{line}: {key}: {e}") from None
            yield key, (text, f"{path}:{line}")
            if not environ.get(key):
                variables[key] = text


def _in_yaml(path: str, runtime: str) -> Iterable[Entry]:
    """Yield the settings in a penroot.yaml."""
    from enroot_py.config import parsed

    def parse(path: str, data: bytes) -> list[Entry]:
        from enroot_py.config import yaml

        return yaml.parse(path, data)

    return parsed.read(path, runtime + "/penroot-settings", parse) or ()


def _in_conf(path: str) -> Iterator[Entry]:
    """Yield the lines ``KEY VALUE`` or ``KEY=VALUE`` of enroot.conf."""
    lines = os.fsdecode(files.content(path) or b"").splitlines()
    for number, line in enumerate(lines, 1):
        line = line.strip()
        if line and not line.startswith("#"):
            key, text = assignment(line)
            check_key(key, f"{path}:{number}")
            yield key, number, text


def assignment(line: str) -> tuple[str, str]:
    """Return key and value of ``KEY VALUE`` or ``KEY=VALUE``, without quotes and comment."""
    cut = min((i for i in (line.find(" "), line.find("\t"), line.find("=")) if i >= 0), default=len(line))
    key, text = line[:cut], line[cut:].lstrip(" \t=")
    quote = text[:1]
    if quote and quote in "\"'" and quote in text[1:]:
        return key, text[1 : text.index(quote, 1)]
    for mark in (" #", "\t#"):
        text = text.partition(mark)[0]
    return key, text.strip()
