"""The settings of one run of penroot, each with its origin.

Precedence, highest first: the environment, the user's files, the system's files, the default. Within a directory,
penroot.yaml takes precedence over enroot.conf. Every start imports this module, so it imports neither typing, re nor
yaml.
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

# Where features/slurm_inside puts Slurm and penroot in a container that can submit jobs. Also in c_shims/brought.h.
HERE = "/run/penroot/slurm"
BIN = f"{HERE}/bin"
SITE = f"{HERE}/etc/enroot" if f"{HERE}/penroot" == LIBRARY else "/etc/enroot"
POLICY = "policy.json"

TYPE_CHECKING = False
if TYPE_CHECKING:
    Value = tuple[str, str]  # text, origin
    Entry = tuple[str, int, str]  # variable, line number, text
    Place = tuple[str, list[str]]  # directory, names of its files


class Settings(Table):
    """The read-only settings of one run."""

    def __init__(
        self, values: dict[str, Value], passed_on: Mapping[str, Value] | None = None, policies: tuple[str, ...] = ()
    ) -> None:
        super().__init__(values)
        self._passed_on = passed_on or {}
        self.policies = policies  # paths of policy.json files: features/trust

    @property
    def is_extended(self) -> bool:
        """Return whether a setting of an optional feature (base/features.py) is set."""
        return len(self._values) > len(SETTINGS)

    @property
    def passed_on(self) -> dict[str, str]:
        """Return the variables that files set for hooks and registries. Variables of the caller override them."""
        return {key: text for key, (text, _) in self._passed_on.items()}

    def everything(self) -> Iterator[tuple[str, str, str]]:
        """Yield variable, value and origin of each setting, then of each variable in passed_on."""
        for variable, setting in all_settings().items():
            yield variable, *self._values.get(setting.name, (setting.default, "default"))
        for variable, (text, origin) in self._passed_on.items():
            yield variable, text, origin

    def replace(self, origin: str, **changes: object) -> Settings:
        """Return a copy with some values changed, for example by a command-line option."""
        values = dict(self._values)
        for name, value in changes.items():
            text = ("no", "yes")[value] if isinstance(value, bool) else str(value)
            values[name] = (text, origin)
        return Settings(values, self._passed_on, self.policies)

    def with_devices(self, more: Iterable[str], origin: str) -> Settings:
        """Return a copy with devices added. Raises ConfigError if enroot_py/features/devices is not installed."""
        devices = tuple(more)
        if devices and "ENROOT_DEVICES" not in all_settings():
            raise ConfigError(
                f"{origin}: this penroot cannot select devices", hint="install penroot with the devices feature"
            )
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
    """Read the settings of this process. Raises ConfigError with file and line.

    ``directives`` are settings of a configuration script, with origins; they take precedence. Values in files may use
    SLURM_* variables of a job: unless ``in_job``, an unset SLURM_* variable is empty. Any other unset variable, an
    unknown key and an invalid value are errors. Source of the format: enroot(1), configuration.
    """
    environ = dict(environ)  # a plain dict is faster: os.environ encodes and decodes at each access
    base = base_directories(environ)
    places = list(_places(environ, base))
    in_files = dict(_in_files(places, environ, base, in_job))
    values = {}
    unlisted = (key for key in (*environ, *in_files, *(directives or ())) if key.startswith("ENROOT_"))
    known = SETTINGS if all(key in SETTINGS or key in FIXED or key in UNUSED for key in unlisted) else all_settings()
    for variable, setting in known.items():
        if directives and variable in directives:
            value = directives[variable]
        elif environ.get(variable):  # enroot treats an empty variable as unset
            value = environ[variable], "environment"
        elif variable in in_files:
            value = in_files[variable]
        elif "$" in setting.default:
            value = expand(setting.default, base), "default"
        elif variable in SETTINGS:  # needs no check: a unit test parses all defaults
            values[setting.name] = setting.default, "default"
            continue
        else:  # FeatureTable supplies the default
            continue
        _check(setting, *value)
        values[setting.name] = value
    for name in ("cache_path", "data_path", "runtime_path"):
        text, origin = values[name]
        values[name] = (_own(text), origin)
    store, origin = values["cache_path"]
    values["cache_path"] = (_of_our_group(store), origin)
    private, origin = values["restrict_dev"]
    if private == "auto":  # with the host's /dev, root could open disks: only allow_superuser permits that
        superuser = SETTINGS["ENROOT_ALLOW_SUPERUSER"].parse(values["allow_superuser"][0])
        values["restrict_dev"] = "yes" if os.geteuid() == 0 and not superuser else "no", f"auto, {origin}"
    passed_on = {key: value for key, value in in_files.items() if key not in known and key not in UNUSED}
    return Settings(values, passed_on, _policies(places, environ))


def _check(setting: Setting, text: str, origin: str) -> None:
    """Raise ConfigError for an invalid value."""
    try:
        setting.parse(text)
    except ValueError as e:
        name = _name(setting.variable, origin)
        hint = f"{name}: {setting.doc}"
        if origin == "default":
            hint = f"the default is {setting.default}: set HOME, TMPDIR and XDG_* to absolute paths"
        raise ConfigError(f"{origin}: {name}={text!r} {e}", hint=hint) from None


def _name(variable: str, origin: str) -> str:
    """Return a setting's name as the file at ``origin`` writes it: ENROOT_MOUNT_HOME is mount_home in penroot.yaml."""
    is_yaml = origin.rpartition(":")[0].endswith(".yaml")
    return variable.removeprefix("ENROOT_").lower() if is_yaml and variable in all_settings() else variable


def _own(path: str) -> str:
    try:
        return trusted.own(path)
    except OSError:
        return path  # the code that uses the path reports the error


def _of_our_group(store: str) -> str:
    """Return ``store``. If we own it but it has another group (after newgrp(1)), return a subdirectory for our group.

    A user namespace maps only the group of the process, and overlayfs cannot change a directory with an unmapped group.
    """
    try:
        layers = os.stat(store + "/layers")
        if layers.st_mode & 0o2000:  # an older version let layers/ inherit a group: use the group of a layer
            with os.scandir(store + "/layers") as entries:
                layers = next(entries).stat()
    except (OSError, StopIteration):
        return store
    if layers.st_uid != os.geteuid() or layers.st_gid == os.getegid():
        return store
    return f"{store}/group-{os.getegid()}"


def read_files(environ: Mapping[str, str]) -> Iterator[str]:
    """Return the paths of existing settings files, lowest precedence first."""
    return _files(_places(environ, base_directories(environ)))


def _places(environ: Mapping[str, str], base: Mapping[str, str]) -> Iterator[Place]:
    """Yield the settings directories of the system and the user, with the names of their files."""
    for directory in (sysconf_path(environ), environ.get("ENROOT_CONFIG_PATH") or base["XDG_CONFIG_HOME"] + "/enroot"):
        try:
            names = os.listdir(directory)
        except OSError as e:  # open() may work where listdir() fails: never skip the site's policy
            by_name = isinstance(e, PermissionError) or directory == SITE
            names = ["enroot.conf", "penroot.yaml", POLICY] if by_name and os.path.isdir(directory) else []
        if names:
            files.check(directory)
        yield directory, names


def _files(places: Iterable[Place]) -> Iterator[str]:
    for directory, names in places:
        for name, suffix in (("enroot.conf", ".conf"), ("penroot.yaml", ".yaml")):
            if name in names:
                yield f"{directory}/{name}"
            if name + ".d" in names:
                more = sorted(files.names(f"{directory}/{name}.d"))
                yield from (f"{directory}/{name}.d/{file}" for file in more if file.endswith(suffix) and file[0] != ".")


def _policies(places: Iterable[Place], environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the paths of the existing policy files.

    ENROOT_SYSCONF_PATH and ENROOT_CONFIG_PATH can add policies, but cannot disable the site's policy.
    """
    paths = [f"{directory}/{POLICY}" for directory, names in places if POLICY in names]
    site_policy = f"{SITE}/{POLICY}"
    if sysconf_path(environ) != SITE and _may_exist(site_policy):
        paths.insert(0, site_policy)
    return tuple(paths)


def _may_exist(path: str) -> bool:
    """Return whether a file exists, or could exist in an inaccessible directory. Opening the file reports the error."""
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
    """Yield the variables in the files, lowest precedence first. A line may use variables of earlier lines.

    Raises ConfigError.
    """
    variables = {**base, **environ}
    for path in _files(places):
        entries = _in_yaml(path, base["XDG_RUNTIME_DIR"]) if path.endswith(".yaml") else _in_conf(path)
        for key, line, text in entries:
            origin = f"{path}:{line}"
            try:
                if "\0" in text:
                    raise ValueError("the value contains a NUL byte")
                text = expand(text, variables, may_be_unset=lambda name: not in_job and name.startswith("SLURM_"))
            except ValueError as e:
                raise ConfigError(f"{origin}: {_name(key, origin)}: {e}") from None
            yield key, (text, origin)
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
    """Yield the settings in an enroot.conf: lines ``KEY VALUE`` or ``KEY=VALUE``."""
    lines = os.fsdecode(files.content(path) or b"").splitlines()
    for number, line in enumerate(lines, 1):
        line = line.strip()
        if line and not line.startswith("#"):
            key, text = assignment(line)
            check_key(key, f"{path}:{number}")
            yield key, number, text


def assignment(line: str) -> tuple[str, str]:
    """Split ``KEY VALUE`` or ``KEY=VALUE`` into key and value, without quotes and comment."""
    cut = min((i for i in (line.find(" "), line.find("\t"), line.find("=")) if i >= 0), default=len(line))
    key, text = line[:cut], line[cut:].lstrip(" \t=")
    quote = text[:1]
    if quote and quote in "\"'" and quote in text[1:]:
        return key, text[1 : text.index(quote, 1)]
    for mark in (" #", "\t#"):
        text = text.partition(mark)[0]
    return key, text.strip()
