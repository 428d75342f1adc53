"""Settings: one table, from which everything else is derived.

A value comes from, in order: the environment, the user's files, the system's
files, the default. In each directory penroot.yaml, the form with checked keys,
goes before enroot.conf. On the start path: no typing, no re, no yaml.
"""

from __future__ import annotations

import os
from _collections_abc import Callable, Iterable, Iterator, Mapping

from enroot_py.base import trusted
from enroot_py.base.errors import ConfigError
from enroot_py.config import files

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_YES = frozenset(("1", "y", "yes", "true", "t", "on"))
_LONGEST = 1024  # bytes of a path: what lies beneath has to fit into PATH_MAX
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

    def parse(self, text: str) -> Any:
        return text


class Text(Setting):
    def __get__(self, instance: Settings, owner: type) -> str:
        return instance.text(self)


class Path(Text):
    """An absolute path; a relative one is an error."""

    kind = "path"

    def parse(self, text: str) -> str:
        if not text.startswith("/"):
            raise ValueError("must be an absolute path")
        if len(os.fsencode(text)) > _LONGEST:
            raise ValueError(f"is longer than {_LONGEST} bytes")
        return text.rstrip("/") or "/"


class Choice(Text):
    """One of some words."""

    def __init__(self, default: str, doc: str, *words: str) -> None:
        super().__init__(default, doc)
        self.words = words
        self.kind = "|".join(words)

    def parse(self, text: str) -> str:
        if text not in self.words:
            raise ValueError("must be one of " + ", ".join(self.words))
        return text


class Bool(Setting):
    kind = "bool"

    def parse(self, text: str) -> bool:
        word = text.lower()
        if word not in _YES and word not in _NO:
            raise ValueError("must be yes or no")
        return word in _YES

    def __get__(self, instance: Settings, owner: type) -> bool:
        return self.parse(instance.text(self))


class Hosts(Setting):
    """yes, no, or the hosts for which it is yes, which may be HOST:PORT; ``*`` is every host."""

    kind = "bool|hosts"

    def parse(self, text: str) -> tuple[str, ...]:
        words = text.lower().replace(",", " ").split()
        if len(words) < 2 and (not words or words[0] in _YES or words[0] in _NO):
            return ("*",) if words and words[0] in _YES else ()
        for word in words:
            if "/" in word or word in _YES or word in _NO:
                raise ValueError("must be yes, no, or HOST[:PORT] of registries, separated by commas")
        return tuple(words)

    def __get__(self, instance: Settings, owner: type) -> tuple[str, ...]:
        return self.parse(instance.text(self))


class Int(Setting):
    kind = "int"

    def parse(self, text: str) -> int:
        if not text.isdecimal():
            raise ValueError("must be a whole number")
        return int(text)

    def __get__(self, instance: Settings, owner: type) -> int:
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

    def __get__(self, instance: Settings, owner: type) -> int:
        return self.parse(instance.text(self))


class Settings:
    """The settings of one run, each with its origin. Read-only once loaded."""

    runtime_path = Path("${XDG_RUNTIME_DIR}/enroot", "where a start keeps its working mounts")
    config_path = Path("${XDG_CONFIG_HOME}/enroot", "configuration and credentials of the user")
    cache_path = Path("${XDG_CACHE_HOME}/enroot", "the store of layers and images")
    cache_limit = Size("0", "size beyond which unused images leave the store, oldest first; 0: no limit")
    store_form = Choice(
        "auto",
        "what an image is in the store: trees of files, or one squashfs file; auto: that on network file systems",
        *("auto", "tree", "squashfs"),
    )
    unpack = Bool("no", "start a squashfs image from an unpacked copy in the store, which all its containers share")
    shared_blobs = Text("", "directory where nodes share what they fetch; empty: each fetches for itself")
    shared_blobs_for = Choice(
        "everybody",
        "who reads what nodes share: everybody who may enter its directory, the user's group, or the user on all nodes",
        *("everybody", "group", "user"),
    )
    data_path = Path("${XDG_DATA_HOME}/enroot", "containers")
    temp_path = Path("${TMPDIR}", "temporary files")
    squash_options = Text("-comp lz4", "options given to mksquashfs")
    max_processors = Int("0", "worker processes and mksquashfs threads; 0: the CPUs of the affinity mask")
    max_connections = Int("10", "parallel downloads")
    connect_timeout = Int("30", "seconds to wait for a connection")
    transfer_timeout = Int("0", "seconds that one download may take; 0: no limit")
    transfer_retries = Int("3", "how often a failed transfer is tried again")
    stall_timeout = Int("30", "seconds without a byte, or with less than 1 kB a second, after which a try has failed")
    allow_http = Hosts(
        "no",
        "talk plain HTTP to registries that do not speak TLS: no, yes, or those alone that are named, HOST[:PORT],…",
    )
    login_shell = Bool("no", "run the command through a login shell of the image")
    rootfs_writable = Bool("no", "make the root filesystem writable")
    remap_root = Bool("no", "be root inside the container")
    mount_home = Bool("no", "mount the home directory")
    image_fstab = Choice(
        "own",
        "what the /etc/fstab of an image may mount: a tmpfs and its own directories, or whatever of the host it names",
        *("own", "host"),
    )
    restrict_dev = Bool("no", "give the container a /dev of its own, with standard and selected devices only")
    devices = Text("", "more devices, separated by commas: names of CDI, as vendor.com/class=name, or paths in /dev")
    unshare_pid = Bool("no", "give the container processes of its own, of which its command is number 1")
    unshare_net = Bool("no", "give the container a network of its own, with a loopback only")
    unshare_ipc = Bool("no", "give the container System V and POSIX IPC, and a /dev, of its own")
    unshare_uts = Bool("no", "give the container a host name of its own")
    mpi = Bool("yes", "let ranks of mpirun and srun find each other: their launcher's variables and session directory")
    join = Choice(
        "auto",
        "share one container with equal starts by the same process while they run; auto: ranks of MPI do",
        *("auto", "yes", "no"),
    )
    native_overlayfs = Bool("yes", "let the kernel make overlays; no: the program fuse-overlayfs, which is far slower")
    allow_superuser = Bool("no", "leave root his privileges in containers that he starts: no user namespace, no filter")
    bundle_all = Bool("no", "let bundles take the user's configuration along")
    bundle_checksum = Bool("no", "let bundles embed a checksum, which every run verifies")
    force_override = Bool("no", "overwrite what exists")

    def __init__(
        self, values: dict[str, tuple[str, str]], passed_on: Mapping[str, tuple[str, str]] | None = None
    ) -> None:
        self._values = values
        self._passed_on = passed_on or {}

    @property
    def passed_on(self) -> dict[str, str]:
        """What the files say to hooks: defaults for the caller's own variables."""
        return {key: text for key, (text, _) in self._passed_on.items()}

    def everything(self) -> Iterator[tuple[str, str, str]]:
        """Variable, value and origin of each setting, then of what is passed on to hooks."""
        for variable, setting in SETTINGS.items():
            yield variable, *self._values[setting.name]
        for variable, (text, origin) in self._passed_on.items():
            yield variable, text, origin

    def text(self, setting: Setting) -> str:
        return self._values[setting.name][0]

    def origin(self, setting: Setting) -> str:
        return self._values[setting.name][1]

    def replace(self, origin: str, **changes: object) -> Settings:
        """A copy with some values changed: an option of the command line over a setting."""
        values = dict(self._values)
        for name, value in changes.items():
            text = ("no", "yes")[value] if isinstance(value, bool) else str(value)
            values[name] = (text, origin)
        return Settings(values, self._passed_on)


SETTINGS: dict[str, Setting] = {s.variable: s for s in vars(Settings).values() if isinstance(s, Setting)}

# What enroot has and penroot has no use for. Said nothing about: sites' files have them.
UNUSED = {
    "ENROOT_GZIP_PROGRAM": "layers are decompressed by penroot itself",
    "ENROOT_ZSTD_OPTIONS": "layers are kept unpacked",
}
# What only a variable says, and no file.
_MORE = ("PENROOT_DEBUG", "PENROOT_HOST_ROOT", "PENROOT_NVIDIA_MODE", "PENROOT_SLURM_GPUS")
# Where penroot itself is: a file that it finds there cannot move it.
_FIXED = ("ENROOT_LIBRARY_PATH", "ENROOT_SYSCONF_PATH")
# Keys of enroot.conf that are not settings of ours but reach hooks and clients.
_PASSED_ON = ("MELLANOX_", "NVIDIA_", "SSL_CERT_", "PENROOT_")
_PROXIES = ("all_proxy", "no_proxy", "http_proxy", "https_proxy")


def sysconf_path(environ: Mapping[str, str] = os.environ) -> str:
    return environ.get("ENROOT_SYSCONF_PATH") or "/etc/enroot"


def load(environ: Mapping[str, str] = os.environ, directives: Mapping[str, tuple[str, str]] | None = None) -> Settings:
    """Read the settings of this process; ``directives`` of a configuration script, with their origins, go before all.

    Raises ConfigError, with file and line, for a key that is none or a value that does not parse.
    Source of the format: enroot(1), configuration.
    """
    base = base_directories(environ)
    found: dict[str, tuple[str, str]] = {}
    for path in read_files(environ, base):
        if path.endswith(".yaml"):
            for key, text, origin in _read_yaml(path, {**base, **environ}, base):
                found[key] = (text, origin)
        else:
            for key, text, origin in _read_conf(path, {**base, **environ}):
                found[key] = (text, origin)
    values = {}
    for variable, setting in SETTINGS.items():
        if directives and variable in directives:
            text, origin = directives[variable]
        elif environ.get(variable):  # an empty one is an unset one, as for enroot
            text, origin = environ[variable], "environment"
        elif variable in found:
            text, origin = found[variable]
        else:
            text, origin = expand(setting.default, base), "default"
        try:
            setting.parse(text)
        except ValueError as e:
            hint = f"it means: {setting.doc}"
            if origin == "default":
                hint = f"it comes of {setting.default}: HOME, TMPDIR and XDG_* have to be absolute"
            raise ConfigError(f"{origin}: {variable}={text!r} {e}", hint=hint) from None
        values[setting.name] = (text, origin)
    for name in ("cache_path", "data_path", "runtime_path"):
        text, origin = values[name]
        values[name] = (_own(text), origin)
    store, origin = values["cache_path"]
    values["cache_path"] = (_of_our_group(store), origin)
    return Settings(values, {key: said for key, said in found.items() if key not in SETTINGS and key not in UNUSED})


def _own(path: str) -> str:
    try:
        return trusted.own(path)
    except OSError:
        return path  # who uses it says what is wrong


def _of_our_group(store: str) -> str:
    """Where a store is of another group than this process, as after newgrp(1), there is one of our group in it.

    The one group of a user namespace is the process's own, and overlayfs changes nothing in a directory whose
    group is not there. Where a directory hands on its group, the trees in it have the caller's: trees.make().
    """
    try:
        found = os.stat(store + "/layers")
    except OSError:
        return store
    if found.st_uid != os.geteuid() or found.st_gid == os.getegid() or found.st_mode & 0o2000:
        return store
    return f"{store}/group-{os.getegid()}"


def base_directories(environ: Mapping[str, str]) -> dict[str, str]:
    """XDG base directories and TMPDIR with their defaults (XDG base directory specification)."""
    home = (environ.get("HOME") or _home()).rstrip("/")
    tmp = environ.get("TMPDIR") or "/tmp"
    run = environ.get("XDG_RUNTIME_DIR") or ""
    if not run or not os.access(run, os.W_OK):
        # A job brings the TMPDIR of the machine that it was sent from, which need not be here.
        run = f"{tmp if os.access(tmp, os.W_OK) else '/tmp'}/penroot-{os.geteuid()}"
    return {
        "HOME": home or "/",
        "TMPDIR": tmp,
        "XDG_CONFIG_HOME": environ.get("XDG_CONFIG_HOME") or home + "/.config",
        "XDG_CACHE_HOME": environ.get("XDG_CACHE_HOME") or home + "/.cache",
        "XDG_DATA_HOME": environ.get("XDG_DATA_HOME") or home + "/.local/share",
        "XDG_RUNTIME_DIR": run,
        # Variables that a shell sets by itself.
        "UID": str(os.getuid()),
        "EUID": str(os.geteuid()),
        "HOSTNAME": os.uname().nodename,
    }


def _home() -> str:
    import pwd

    try:
        return pwd.getpwuid(os.geteuid()).pw_dir
    except KeyError:
        return "/"


def _user_name() -> str:
    import pwd

    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def read_files(environ: Mapping[str, str], base: Mapping[str, str] | None = None) -> Iterator[str]:
    """The files of settings that there are, in the order in which they are read: the last one to say it wins."""
    base = base or base_directories(environ)
    for directory in (sysconf_path(environ), environ.get("ENROOT_CONFIG_PATH") or base["XDG_CONFIG_HOME"] + "/enroot"):
        try:
            there = os.listdir(directory)
        except PermissionError:  # it may still let us in by name
            there = ["enroot.conf", "penroot.yaml"] if os.path.isdir(directory) else []
        except OSError:
            continue
        if there:
            files.check(directory)
        for name, suffix in (("enroot.conf", ".conf"), ("penroot.yaml", ".yaml")):
            if name in there:
                yield f"{directory}/{name}"
            if name + ".d" in there:
                more = sorted(files.names(f"{directory}/{name}.d"))
                yield from (f"{directory}/{name}.d/{file}" for file in more if file.endswith(suffix))


def _read_yaml(path: str, variables: Mapping[str, str], base: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yield (key, value, origin) of each setting of a penroot.yaml."""
    from enroot_py.config import parsed

    for key, line, text in parsed.read(path, base["XDG_RUNTIME_DIR"] + "/penroot-settings"):
        try:
            yield key, expand(text, variables), f"{path}:{line}"
        except ValueError as e:
            raise ConfigError(f"{path}:{line}: {key}: {e}") from None


def _read_conf(path: str, variables: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yield (key, value, origin) of each line ``KEY VALUE`` or ``KEY=VALUE`` of enroot.conf."""
    lines = os.fsdecode(files.content(path) or b"").splitlines()
    for number, line in enumerate(lines, 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        origin = f"{path}:{number}"
        key, text = assignment(line)
        check_key(key, origin)
        try:
            yield key, expand(text, variables), origin
        except ValueError as e:
            raise ConfigError(f"{origin}: {key}: {e}") from None


def assignment(line: str) -> tuple[str, str]:
    """Key and value of ``KEY VALUE`` or ``KEY=VALUE``, without quotes and the comment behind it."""
    cut = min((i for i in (line.find(" "), line.find("\t"), line.find("=")) if i >= 0), default=len(line))
    key, text = line[:cut], line[cut:].lstrip(" \t=")
    quote = text[:1]
    if quote and quote in "\"'" and quote in text[1:]:
        return key, text[1 : text.index(quote, 1)]
    for mark in (" #", "\t#"):
        text = text.partition(mark)[0]
    return key, text.strip()


def check_key(key: str, origin: str) -> None:
    """Raises ConfigError for a key of enroot.conf that is none, or is nearly one of ours.

    Other ENROOT_* are the site's own, for its hooks.
    """
    if key in SETTINGS or key in UNUSED or key.startswith(_PASSED_ON) or key in _PROXIES:
        return
    if key in _FIXED:
        raise ConfigError(f"{origin}: {key} cannot be set in a file", hint="set it in the environment")
    if not key.startswith("ENROOT_") or not key.removeprefix("ENROOT_").replace("_", "A").isalnum():
        raise ConfigError(f"{origin}: unknown key {key!r}", hint="keys are ENROOT_*, MELLANOX_*, NVIDIA_*, proxies")
    if meant := _meant(key):
        raise ConfigError(f"{origin}: unknown key {key!r}", hint=f"did you mean {meant}?")


def slips(environ: Mapping[str, str]) -> list[str]:
    """Variables that are none of ours and look as if they should be: one line each, for people."""
    known = (*SETTINGS, *_MORE, *_FIXED)
    unknown = [key for key in environ if key.startswith(("ENROOT_", "PENROOT_")) and key not in known]
    return [f"ignoring {key}: did you mean {meant}?" for key in unknown if (meant := _meant(key))]


def _meant(key: str) -> str:
    """The variable that ``key`` may be a slip of, or ""."""
    prefix, _, word = key.partition("_")
    found = nearest(word, [name.partition("_")[2] for name in (*SETTINGS, *_MORE) if name.startswith(prefix)])
    return f"{prefix}_{found}" if found else ""


def nearest(word: str, known: Iterable[str]) -> str:
    """The known word that ``word`` may be a slip of, up to two letters apart, or one in a short word; "" for none."""
    beyond = 3 if len(word) > 4 else 2
    letters = set(word)
    # A letter that is changed makes a difference of two to the sets, and counting those costs next to nothing.
    alike = (name for name in known if abs(len(name) - len(word)) < 3 and len(letters ^ set(name)) < 5)
    best = min(((_distance(word, name), name) for name in alike), default=(3, ""))
    return best[1] if best[0] < beyond else ""


def _distance(a: str, b: str) -> int:
    """Letters to insert, remove or replace (Levenshtein)."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        previous, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (x != y))
    return row[-1]


# Of the commands that sites write in enroot.conf, what needs no shell.
COMMANDS: dict[str, Callable[[], object]] = {
    "id -u": os.geteuid,
    "id -g": os.getegid,
    "id -un": lambda: _user_name(),
    "whoami": lambda: _user_name(),
    "nproc": lambda: len(os.sched_getaffinity(0)),
    "hostname": lambda: os.uname().nodename,
    "hostname -s": lambda: os.uname().nodename.partition(".")[0],
}


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Replace ``${NAME}``, ``$NAME``, ``${NAME:-default}`` and the commands of COMMANDS; no shell is run.

    An unset variable is the empty string, as in a shell. Raises ValueError
    for any other ``$(command)``.
    """
    out = ""
    while (at := text.find("$")) >= 0:
        out, text = out + text[:at], text[at + 1 :]
        if text.startswith("("):
            command, close, text = text[1:].partition(")")
            known = COMMANDS.get(" ".join(command.split()))
            if not close or known is None:
                raise ValueError(f"$({command}) is not run: only {', '.join(f'$({c})' for c in COMMANDS)} are known")
            out += str(known())
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
