"""The table of settings. Variables, penroot.yaml, the manual and `penroot info` derive from it.

Every start imports this module, so it imports neither typing nor re.
"""

from __future__ import annotations

import os
from _collections_abc import Mapping

from enroot_py.base import log
from enroot_py.base.errors import ConfigError
from enroot_py.config.words import NO, YES, nearest, truth

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_MAX_PATH_BYTES = 1024  # leaves room within PATH_MAX for paths beneath the directory


class Setting:
    """One row of a table: the name, default, help text and parser of a setting.

    An environment file (features/environments) can set an ``annotated`` setting with the annotation com.pyxis.NAME.
    """

    kind = "str"
    separator = " "  # joins the words of a list in penroot.yaml

    def __init__(self, default: str, doc: str, *, annotated: bool = False) -> None:
        self.default = default
        self.doc = doc
        self.annotated = annotated

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name
        self.variable = "ENROOT_" + name.upper()

    def parse(self, text: str) -> Any:
        """Parse the text. Raises ValueError with the form that the text must have."""
        return text

    def __set__(self, instance: Rows, value: object) -> None:
        raise AttributeError(f"the setting {self.name} is read-only")


class Text(Setting):
    def __get__(self, instance: Rows, owner: type) -> str:
        return instance.text(self)


class List(Text):
    """Comma-separated words."""

    separator = ","


class Path(Text):
    """An absolute path."""

    kind = "path"

    def parse(self, text: str) -> str:
        if not text.startswith("/"):
            raise ValueError("must be an absolute path")
        if len(os.fsencode(text)) > _MAX_PATH_BYTES:
            raise ValueError(f"is longer than {_MAX_PATH_BYTES} bytes")
        return text.rstrip("/") or "/"


class Choice(Text):
    """One of several words."""

    def __init__(self, default: str, doc: str, *words: str) -> None:
        super().__init__(default, doc)
        self.words = words
        self.kind = "|".join(words)

    def parse(self, text: str) -> str:
        if text not in self.words:
            raise ValueError("must be one of " + ", ".join(self.words))
        return text


class Words(Setting):
    """Comma-separated words from a fixed set."""

    def __init__(self, default: str, doc: str, *words: str) -> None:
        super().__init__(default, doc)
        self.words = words
        self.kind = ",".join(words)

    def parse(self, text: str) -> tuple[str, ...]:
        words = tuple(filter(None, text.replace(",", " ").split()))
        if not set(words) <= set(self.words):
            raise ValueError("must be a comma-separated list of " + ", ".join(self.words))
        return words

    def __get__(self, instance: Rows, owner: type) -> tuple[str, ...]:
        return self.parse(instance.text(self))


class Paths(Setting):
    """Colon-separated absolute paths."""

    kind = "paths"
    separator = ":"

    def parse(self, text: str) -> tuple[str, ...]:
        paths = tuple(filter(None, text.split(":")))
        if not all(path.startswith("/") for path in paths):
            raise ValueError("must be absolute paths, separated by colons")
        return tuple(path.rstrip("/") or "/" for path in paths)

    def __get__(self, instance: Rows, owner: type) -> tuple[str, ...]:
        return self.parse(instance.text(self))


class Place(Path):
    """An absolute path, one of several words, or empty."""

    def __init__(self, default: str, doc: str, *words: str) -> None:
        super().__init__(default, doc)
        self.words = words
        self.kind = "|".join(("path", *words))

    def parse(self, text: str) -> str:
        if not text or text in self.words:
            return text
        if not text.startswith("/"):
            raise ValueError(" or ".join(("must be an absolute path", *self.words)))
        return super().parse(text)


class Bool(Setting):
    """yes or no; an empty value means no."""

    kind = "bool"

    def parse(self, text: str) -> bool:
        return bool(text) and truth(text)

    def __get__(self, instance: Rows, owner: type) -> bool:
        return self.parse(instance.text(self))


class Auto(Bool):
    """yes, no or auto. load() of settings.py replaces auto by yes or no."""

    kind = "bool|auto"

    def parse(self, text: str) -> bool:
        try:
            return text != "auto" and super().parse(text)
        except ValueError:
            raise ValueError("must be yes, no or auto") from None


class Hosts(Setting):
    """yes (every host, ``*``), no, or a list of HOST[:PORT]."""

    kind = "bool|hosts"

    def parse(self, text: str) -> tuple[str, ...]:
        words = text.lower().replace(",", " ").split()
        if len(words) < 2 and (not words or words[0] in YES or words[0] in NO):
            return ("*",) if words and words[0] in YES else ()
        for word in words:
            if "/" in word or word in YES or word in NO:
                raise ValueError("must be yes, no, or a comma-separated list of HOST[:PORT]")
        return tuple(words)

    def __get__(self, instance: Rows, owner: type) -> tuple[str, ...]:
        return self.parse(instance.text(self))


class Int(Setting):
    kind = "int"

    def parse(self, text: str) -> int:
        if not text.isdecimal():
            raise ValueError("must be a whole number")
        return int(text)

    def __get__(self, instance: Rows, owner: type) -> int:
        return self.parse(instance.text(self))


class Float(Setting):
    """Base class of settings that are a float. A subclass defines parse(), with the form and range of the number."""

    def __get__(self, instance: Rows, owner: type) -> float:
        number: float = self.parse(instance.text(self))
        return number


class Size(Setting):
    """A number of bytes: 500M, 20G, 2T, powers of 1000."""

    kind = "size"

    def parse(self, text: str) -> int:
        return log.parse_size(text)

    def __get__(self, instance: Rows, owner: type) -> int:
        return self.parse(instance.text(self))


class Rows:
    """The values of the settings of a table, with their origins."""

    def __init__(self, values: dict[str, tuple[str, str]]) -> None:
        self._values = values  # name: (text, origin)

    def text(self, setting: Setting) -> str:
        return self._values.get(setting.name, (setting.default,))[0]

    def origin(self, setting: Setting) -> str:
        return self._values.get(setting.name, ("", "default"))[1]


class Table(Rows):
    """The settings of penroot's core. Settings of optional features are in a FeatureTable."""

    runtime_path = Path("${XDG_RUNTIME_DIR}/enroot", "directory for mount points and state files of running containers")
    config_path = Path("${XDG_CONFIG_HOME}/enroot", "directory of the user's configuration and credentials")
    cache_path = Path("${XDG_CACHE_HOME}/enroot", "directory of the store: layers and images")
    cache_limit = Size(
        "0", "size limit of the store, such as 200G; beyond it the least recently used images are removed; 0: no limit"
    )
    store_form = Choice(
        "auto",
        "form of images in the store: tree (directories), squashfs (one file), or auto (depends on the file system)",
        *("auto", "tree", "squashfs"),
    )
    unpack = Bool("no", "start a squashfs image from an unpacked copy in the store, shared by all its containers")
    shared_blobs = Text("", "directory in which nodes share downloaded layers; empty: each node downloads all layers")
    shared_blobs_for = Choice(
        "everybody",
        "access to shared layers: user (only their owner), group (also the owner's group), or everybody",
        *("everybody", "group", "user"),
    )
    data_path = Path("${XDG_DATA_HOME}/enroot", "directory of named containers")
    temp_path = Path("${TMPDIR}", "directory for temporary files of import and export")
    squash_options = Text("-comp lz4", "options for mksquashfs")
    max_processors = Int("0", "number of worker processes and of mksquashfs threads; 0: one for each available CPU")
    max_connections = Int("10", "maximum number of parallel downloads")
    connect_timeout = Int("30", "connect timeout in seconds")
    transfer_timeout = Int("0", "timeout of each download in seconds; 0: no limit")
    transfer_retries = Int("3", "number of times to retry a failed transfer")
    stall_timeout = Int("30", "timeout in seconds for a transfer that is slower than 1 kB/s")
    allow_http = Hosts("no", "use plain HTTP for registries without TLS: no, yes (all registries), or HOST[:PORT],…")
    login_shell = Bool("no", "run the command in a login shell of the image")
    rootfs_writable = Bool("no", "make the root filesystem writable")
    remap_root = Bool("no", "be root inside the container")
    mount_home = Bool("no", "mount the home directory")
    image_fstab = Choice(
        "own",
        "mounts that an image's /etc/fstab may request: own (tmpfs and directories of the image), or host (any mount)",
        *("own", "host"),
    )
    restrict_dev = Auto(
        "auto",
        "use a private /dev with only standard and selected devices; auto: yes for root without allow_superuser",
    )
    unshare_pid = Bool("no", "use a private PID namespace; the command is process 1")
    unshare_net = Bool("no", "use a private network namespace with only a loopback interface")
    unshare_ipc = Bool("no", "use a private IPC namespace (System V and POSIX) and a private /dev")
    unshare_uts = Bool("no", "use a private UTS namespace (host name)")
    unshare_keyring = Bool("no", "use a new session keyring, without the caller's Kerberos and AFS tokens")
    close_descriptors = Bool("no", "close all file descriptors except stdin, stdout and stderr")
    mpi = Bool("yes", "pass the variables and the session directory of an MPI launcher to the container")
    join = Choice(
        "auto",
        "auto: the MPI ranks of a launcher on a node share one container; no: each rank has a separate container",
        *("auto", "no"),
    )
    native_overlayfs = Bool("yes", "yes: use the kernel's overlayfs; no: use fuse-overlayfs (much slower)")
    allow_superuser = Bool(
        "no",
        "let root keep all privileges in the containers that root starts: no user namespace, no system call filter",
    )
    force_override = Bool("no", "overwrite existing files and containers, and remove containers without a prompt")


class FeatureTable(Rows):
    """Base class for the settings of a feature."""

    def __init__(self, settings: Rows) -> None:
        super().__init__(settings._values)


def rows(table: type[Rows]) -> dict[str, Setting]:
    """Return the rows of a table: environment variable -> row."""
    return {row.variable: row for row in vars(table).values() if isinstance(row, Setting)}


SETTINGS = rows(Table)  # the core's settings only


def all_settings() -> dict[str, Setting]:
    """Return the settings of the core, then the settings of the features."""
    from enroot_py.base.features import plugged

    return {**SETTINGS, **{variable: row for each in plugged("settings") for variable, row in each.SETTINGS.items()}}


# Settings of enroot without an effect in penroot. Existing files of sites may contain them.
UNUSED = {
    "ENROOT_GZIP_PROGRAM": "penroot decompresses layers itself",
    "ENROOT_ZSTD_OPTIONS": "layers are kept unpacked",
}
# Other variables of penroot. They are not settings: a file sets them only for hooks.
_MORE = ("PENROOT_DEBUG", "PENROOT_HOST_ROOT", "PENROOT_NVIDIA_MODE", "PENROOT_SLURM_GPUS")
# Directories of penroot, which settings files cannot change.
FIXED = ("ENROOT_LIBRARY_PATH", "ENROOT_SYSCONF_PATH")
# Prefixes of keys that enroot.conf passes on to hooks and to connections with registries.
_PASSED_ON = ("MELLANOX_", "NVIDIA_", "SSL_CERT_", "PENROOT_")
_PROXIES = ("all_proxy", "no_proxy", "http_proxy", "https_proxy")


def check_key(key: str, origin: str) -> None:
    """Raise ConfigError for a key of enroot.conf that is invalid, or looks like a typo of a setting.

    Any other ENROOT_* variable is valid: sites define them for their hooks.
    """
    if key in SETTINGS or key in UNUSED or key.startswith(_PASSED_ON) or key in _PROXIES or key in all_settings():
        return
    if key in FIXED:
        raise ConfigError(f"{origin}: {key} cannot be set in a file", hint="set it in the environment")
    if not key.startswith("ENROOT_") or not key.removeprefix("ENROOT_").replace("_", "A").isalnum():
        raise ConfigError(
            f"{origin}: unknown key {key!r}", hint="use ENROOT_*, MELLANOX_*, NVIDIA_* or a proxy variable"
        )
    if suggestion := _similar(key):
        raise ConfigError(f"{origin}: unknown key {key!r}", hint=f"did you mean {suggestion}?")


def slips(environ: Mapping[str, str]) -> list[str]:
    """Return a warning for each unknown variable that looks like a typo of a setting."""
    known = (*SETTINGS, *_MORE, *FIXED)
    unknown = [key for key in environ if key.startswith(("ENROOT_", "PENROOT_")) and key not in known]
    if unknown:
        of_features = all_settings()
        unknown = [key for key in unknown if key not in of_features]
    return [f"ignoring {key}: did you mean {suggestion}?" for key in unknown if (suggestion := _similar(key))]


def _similar(key: str) -> str:
    """Return the known variable that is most similar to ``key``, or "" if none is similar."""
    prefix, _, word = key.partition("_")
    known = (*all_settings(), *_MORE)
    name = nearest(word, [name.partition("_")[2] for name in known if name.startswith(prefix)])
    return f"{prefix}_{name}" if name else ""
