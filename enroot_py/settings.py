"""Settings: one table, from which everything else is derived.

A value comes from, in order: the environment, the user's enroot.conf, the
system's enroot.conf, the default. On the start path: no typing, no re.
"""

import os
from _collections_abc import Iterator, Mapping

from enroot_py.errors import ConfigError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_YES = frozenset(("1", "y", "yes", "true", "t", "on"))
_NO = frozenset(("", "0", "n", "no", "false", "f", "off"))


class Setting:
    """One row of the table: an attribute of Settings that knows its variable."""

    kind = "str"

    def __init__(self, default: str, doc: str) -> None:
        self.default = default
        self.doc = doc

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name
        self.variable = "ENROOT_" + name.upper()

    def parse(self, text: str) -> "Any":
        return text


class Text(Setting):
    def __get__(self, instance: "Settings", owner: type) -> str:
        return instance.text(self)


class Path(Text):
    """An absolute path; a relative one is an error."""

    kind = "path"

    def parse(self, text: str) -> str:
        if not text.startswith("/"):
            raise ValueError("must be an absolute path")
        return text.rstrip("/") or "/"


class Bool(Setting):
    kind = "bool"

    def parse(self, text: str) -> bool:
        word = text.lower()
        if word not in _YES and word not in _NO:
            raise ValueError("must be yes or no")
        return word in _YES

    def __get__(self, instance: "Settings", owner: type) -> bool:
        return self.parse(instance.text(self))


class Int(Setting):
    kind = "int"

    def parse(self, text: str) -> int:
        if not text.isdecimal():
            raise ValueError("must be a whole number")
        return int(text)

    def __get__(self, instance: "Settings", owner: type) -> int:
        return self.parse(instance.text(self))


class Size(Setting):
    """A number of bytes: 500M, 20G, 2T, powers of 1000."""

    kind = "size"

    def parse(self, text: str) -> int:
        factor = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}.get(text[-1:].upper(), 1)
        digits = text[:-1] if factor > 1 else text
        if not digits.isdecimal():
            raise ValueError("must be a size such as 500M or 20G")
        return int(digits) * factor

    def __get__(self, instance: "Settings", owner: type) -> int:
        return self.parse(instance.text(self))


class Settings:
    """The settings of one run, each with its origin. Read-only once loaded."""

    runtime_path = Path("${XDG_RUNTIME_DIR}/enroot", "where a start keeps its working mounts")
    config_path = Path("${XDG_CONFIG_HOME}/enroot", "configuration and credentials of the user")
    cache_path = Path("${XDG_CACHE_HOME}/enroot", "the store of layers and images")
    cache_limit = Size("0", "size beyond which unused images leave the store, oldest first; 0: no limit")
    shared_blobs = Text("", "directory where nodes share what they fetch; empty: each fetches for itself")
    data_path = Path("${XDG_DATA_HOME}/enroot", "containers")
    temp_path = Path("${TMPDIR}", "temporary files")
    squash_options = Text("-comp zstd -Xcompression-level 1 -b 256K", "options given to mksquashfs")
    max_processors = Int("0", "worker processes and mksquashfs threads; 0: the CPUs of the affinity mask")
    max_connections = Int("10", "parallel downloads")
    connect_timeout = Int("30", "seconds to wait for a connection")
    transfer_timeout = Int("0", "seconds that one download may take; 0: no limit")
    transfer_retries = Int("3", "how often a failed transfer is tried again")
    stall_timeout = Int("30", "seconds without a byte after which a transfer counts as failed")
    allow_http = Bool("no", "talk plain HTTP to registries that do not speak TLS")
    login_shell = Bool("no", "run the command through a login shell of the image")
    rootfs_writable = Bool("no", "make the root filesystem writable")
    remap_root = Bool("no", "be root inside the container")
    mount_home = Bool("no", "mount the home directory")
    restrict_dev = Bool("no", "give the container a /dev of its own, with standard and selected devices only")
    devices = Text("", "more devices, separated by commas: names of CDI, as vendor.com/class=name, or paths in /dev")
    unshare_pid = Bool("no", "give the container processes of its own, of which its command is number 1")
    unshare_net = Bool("no", "give the container a network of its own, with a loopback only")
    unshare_ipc = Bool("no", "give the container System V and POSIX IPC, and a /dev, of its own")
    unshare_uts = Bool("no", "give the container a host name of its own")
    force_override = Bool("no", "overwrite what exists")

    def __init__(self, values: "dict[str, tuple[str, str]]", passed_on: "Mapping[str, str] | None" = None) -> None:
        self._values = values
        # What enroot.conf says to hooks: a default for the caller's own variables.
        self.passed_on = passed_on or {}

    def text(self, setting: Setting) -> str:
        return self._values[setting.name][0]

    def origin(self, setting: Setting) -> str:
        return self._values[setting.name][1]

    def replace(self, origin: str, **changes: object) -> "Settings":
        """A copy with some values changed: an option of the command line over a setting."""
        values = dict(self._values)
        for name, value in changes.items():
            text = ("no", "yes")[value] if isinstance(value, bool) else str(value)
            values[name] = (text, origin)
        return Settings(values, self.passed_on)


SETTINGS: "dict[str, Setting]" = {s.variable: s for s in vars(Settings).values() if isinstance(s, Setting)}

# Keys of enroot.conf that are not settings of ours but reach hooks and clients.
_PASSED_ON = ("MELLANOX_", "NVIDIA_", "SSL_CERT_", "PENROOT_")
_PROXIES = ("all_proxy", "no_proxy", "http_proxy", "https_proxy")


def sysconf_path(environ: "Mapping[str, str]" = os.environ) -> str:
    return environ.get("ENROOT_SYSCONF_PATH") or "/etc/enroot"


def load(environ: "Mapping[str, str]" = os.environ) -> Settings:
    """Read the settings of this process.

    Raises ConfigError, with file and line, for a value that does not parse.
    Source of the format: enroot(1), configuration.
    """
    base = _base_directories(environ)
    found: dict[str, tuple[str, str]] = {}
    sysconf = sysconf_path(environ)
    for path in (
        *_conf_files(sysconf),
        *_conf_files(environ.get("ENROOT_CONFIG_PATH") or base["XDG_CONFIG_HOME"] + "/enroot"),
    ):
        for key, text, origin in _read_conf(path, {**base, **environ}):
            found[key] = (text, origin)
    values = {}
    for variable, setting in SETTINGS.items():
        if variable in environ:
            text, origin = environ[variable], "environment"
        elif variable in found:
            text, origin = found[variable]
        else:
            text, origin = expand(setting.default, base), "default"
        try:
            setting.parse(text)
        except ValueError as e:
            raise ConfigError(f"{origin}: {variable}={text!r} {e}", hint=f"it means: {setting.doc}") from None
        values[setting.name] = (text, origin)
    passed_on = {key: text for key, (text, _) in found.items() if key.startswith(_PASSED_ON) or key in _PROXIES}
    return Settings(values, passed_on)


def _base_directories(environ: "Mapping[str, str]") -> "dict[str, str]":
    """XDG base directories and TMPDIR with their defaults (XDG base directory specification)."""
    home = environ.get("HOME") or _home()
    tmp = environ.get("TMPDIR") or "/tmp"
    run = environ.get("XDG_RUNTIME_DIR") or ""
    if not run or not os.access(run, os.W_OK):
        run = f"{tmp}/penroot-{os.geteuid()}"
    return {
        "HOME": home,
        "TMPDIR": tmp,
        "XDG_CONFIG_HOME": environ.get("XDG_CONFIG_HOME") or home + "/.config",
        "XDG_CACHE_HOME": environ.get("XDG_CACHE_HOME") or home + "/.cache",
        "XDG_DATA_HOME": environ.get("XDG_DATA_HOME") or home + "/.local/share",
        "XDG_RUNTIME_DIR": run,
    }


def _home() -> str:
    import pwd

    try:
        return pwd.getpwuid(os.geteuid()).pw_dir
    except KeyError:
        return "/"


def _conf_files(directory: str) -> "Iterator[str]":
    yield directory + "/enroot.conf"
    try:
        names = sorted(os.listdir(directory + "/enroot.conf.d"))
    except OSError:
        return
    for name in names:
        if name.endswith(".conf"):
            yield f"{directory}/enroot.conf.d/{name}"


def _read_conf(path: str, variables: "Mapping[str, str]") -> "Iterator[tuple[str, str, str]]":
    """Yield (key, value, origin) of each line ``KEY VALUE`` or ``KEY=VALUE`` of enroot.conf."""
    try:
        with open(path, "rb") as f:
            lines = os.fsdecode(f.read()).splitlines()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return
    for number, line in enumerate(lines, 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        cut = min((i for i in (line.find(" "), line.find("\t"), line.find("=")) if i >= 0), default=len(line))
        key, text = line[:cut], line[cut + 1 :].strip().strip("\"'")
        origin = f"{path}:{number}"
        if not key.startswith(("ENROOT_", *_PASSED_ON)) and key not in _PROXIES:
            raise ConfigError(f"{origin}: unknown key {key!r}", hint="keys are ENROOT_*, MELLANOX_*, NVIDIA_*, proxies")
        try:
            yield key, expand(text, variables), origin
        except ValueError as e:
            raise ConfigError(f"{origin}: {key}: {e}") from None


def expand(text: str, variables: "Mapping[str, str]") -> str:
    """Replace ``${NAME}``, ``$NAME``, ``${NAME:-default}`` and ``$(id -u)``; no other shell is run.

    An unset variable is the empty string, as in a shell. Raises ValueError
    for any other ``$(command)``.
    """
    out = ""
    while (at := text.find("$")) >= 0:
        out, text = out + text[:at], text[at + 1 :]
        if text.startswith("("):
            command, close, text = text[1:].partition(")")
            known = {"id -u": os.geteuid, "id -g": os.getegid}
            if not close or command.strip() not in known:
                raise ValueError(f"$({command}) is not run: only $(id -u) and $(id -g) are known")
            out += str(known[command.strip()]())
        elif text.startswith("{"):
            inner, close, text = text[1:].partition("}")
            if not close:
                raise ValueError("'${' without '}'")
            name, _, default = inner.partition(":-")
            out += variables.get(name.removesuffix("-")) or expand(default, variables)
        else:
            end = 0
            while end < len(text) and (text[end].isalnum() or text[end] == "_"):
                end += 1
            name, text = text[:end], text[end:]
            out += variables.get(name, "") if name else "$"
    return out + text
