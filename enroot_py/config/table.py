"""The table of settings, from which everything else is derived.

On the start path: no typing, no re.
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

_LONGEST = 1024  # bytes of a path: what lies beneath has to fit into PATH_MAX


class Setting:
    """One row of a table: a setting with its default, its meaning and its parser.

    An ``annotated`` one is an annotation com.pyxis.NAME of environment files, too.
    """

    kind = "str"
    separator = " "  # between the words of a list in penroot.yaml

    def __init__(self, default: str, doc: str, *, annotated: bool = False) -> None:
        self.default = default
        self.doc = doc
        self.annotated = annotated

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name
        self.variable = "ENROOT_" + name.upper()

    def parse(self, text: str) -> Any:
        """Parse the text. Raises ValueError with the expected form."""
        return text

    def __set__(self, instance: Rows, value: object) -> None:
        raise AttributeError(f"the setting {self.name} does not change")


class Text(Setting):
    def __get__(self, instance: Rows, owner: type) -> str:
        return instance.text(self)


class List(Text):
    """Comma-separated words."""

    separator = ","


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
        said = tuple(filter(None, text.replace(",", " ").split()))
        if not set(said) <= set(self.words):
            raise ValueError("must be some of " + ", ".join(self.words))
        return said

    def __get__(self, instance: Rows, owner: type) -> tuple[str, ...]:
        return self.parse(instance.text(self))


class Paths(Setting):
    """Colon-separated absolute paths."""

    kind = "paths"
    separator = ":"

    def parse(self, text: str) -> tuple[str, ...]:
        said = tuple(filter(None, text.split(":")))
        if not all(path.startswith("/") for path in said):
            raise ValueError("must be absolute paths, separated by colons")
        return tuple(path.rstrip("/") or "/" for path in said)

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
    """yes or no; empty is no."""

    kind = "bool"

    def parse(self, text: str) -> bool:
        return bool(text) and truth(text)

    def __get__(self, instance: Rows, owner: type) -> bool:
        return self.parse(instance.text(self))


class Auto(Bool):
    """yes, no, or auto, for which load() decides."""

    kind = "bool|auto"

    def parse(self, text: str) -> bool:
        try:
            return text != "auto" and super().parse(text)
        except ValueError:
            raise ValueError("must be yes, no or auto") from None


class Hosts(Setting):
    """yes, no, or a list of HOST[:PORT] for which it is yes; ``*`` is every host."""

    kind = "bool|hosts"

    def parse(self, text: str) -> tuple[str, ...]:
        words = text.lower().replace(",", " ").split()
        if len(words) < 2 and (not words or words[0] in YES or words[0] in NO):
            return ("*",) if words and words[0] in YES else ()
        for word in words:
            if "/" in word or word in YES or word in NO:
                raise ValueError("must be yes, no, or HOST[:PORT] of registries, separated by commas")
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


class Size(Setting):
    """A number of bytes: 500M, 20G, 2T, powers of 1000."""

    kind = "size"

    def parse(self, text: str) -> int:
        return log.parse_size(text)

    def __get__(self, instance: Rows, owner: type) -> int:
        return self.parse(instance.text(self))


class Rows:
    """A table: the value of each row, with its origin."""

    def __init__(self, values: dict[str, tuple[str, str]]) -> None:
        self._values = values  # by name: text and origin

    def text(self, setting: Setting) -> str:
        return self._values.get(setting.name, (setting.default,))[0]

    def origin(self, setting: Setting) -> str:
        return self._values.get(setting.name, ("", "default"))[1]


class Table(Rows):
    """The settings of the core."""

    runtime_path = Path("${XDG_RUNTIME_DIR}/enroot", "directory for mounts and notes of running containers")
    config_path = Path("${XDG_CONFIG_HOME}/enroot", "directory of the user's configuration and credentials")
    cache_path = Path("${XDG_CACHE_HOME}/enroot", "directory of the store: layers and images")
    cache_limit = Size(
        "0", "size limit of the store, such as 200G: the least recently used images are removed; 0: no limit"
    )
    store_form = Choice(
        "auto",
        "form of images in the store: tree (directories), squashfs (one file), or auto (by file system)",
        *("auto", "tree", "squashfs"),
    )
    unpack = Bool("no", "start a squashfs image from an unpacked copy in the store, shared by all its containers")
    shared_blobs = Text("", "directory in which nodes share downloaded layers; empty: every node downloads for itself")
    shared_blobs_for = Choice(
        "everybody",
        "who can read shared layers: everybody (who can enter the directory), the user's group, or the user",
        *("everybody", "group", "user"),
    )
    data_path = Path("${XDG_DATA_HOME}/enroot", "directory of named containers")
    temp_path = Path("${TMPDIR}", "directory for temporary files of imports and exports")
    squash_options = Text("-comp lz4", "options for mksquashfs")
    max_processors = Int("0", "number of worker processes and mksquashfs threads; 0: one per CPU of the affinity mask")
    max_connections = Int("10", "number of parallel downloads")
    connect_timeout = Int("30", "connect timeout in seconds")
    transfer_timeout = Int("0", "timeout of one download in seconds; 0: no limit")
    transfer_retries = Int("3", "number of retries of a failed transfer")
    stall_timeout = Int("30", "timeout in seconds for a transfer with less than 1 kB per second")
    allow_http = Hosts(
        "no",
        "allow plain HTTP for registries without TLS: no, yes (all), or a list HOST[:PORT],…",
    )
    login_shell = Bool("no", "run the command in a login shell of the image")
    rootfs_writable = Bool("no", "make the root filesystem writable")
    remap_root = Bool("no", "be root inside the container")
    mount_home = Bool("no", "mount the home directory")
    image_fstab = Choice(
        "own",
        "mounts that an image's /etc/fstab may request: own (a tmpfs and its own directories), or host (anything)",
        *("own", "host"),
    )
    restrict_dev = Auto(
        "auto",
        "use a private /dev with standard and selected devices only; auto: for containers that root starts",
    )
    unshare_pid = Bool("no", "use a private PID namespace, in which the command is process 1")
    unshare_net = Bool("no", "use a private network namespace, with loopback only")
    unshare_ipc = Bool("no", "use a private IPC namespace (System V and POSIX) and a private /dev")
    unshare_uts = Bool("no", "use a private UTS namespace (host name)")
    unshare_keyring = Bool("no", "use a new session keyring, without the caller's Kerberos and AFS tokens")
    close_descriptors = Bool("no", "pass no other descriptors to the container than stdin, stdout and stderr")
    mpi = Bool(
        "yes", "pass the MPI launcher's variables and session directory to the container, so that ranks find each other"
    )
    join = Choice(
        "auto",
        "share one container among the MPI ranks of a launcher on a node; no: one container for each rank",
        *("auto", "no"),
    )
    native_overlayfs = Bool("yes", "use the kernel's overlayfs; no: use fuse-overlayfs, which is far slower")
    allow_superuser = Bool(
        "no",
        "let root keep all privileges in the containers that root starts: no user namespace, no system call filter",
    )
    force_override = Bool("no", "overwrite what exists")


class FeatureTable(Rows):
    """Base class for the settings of a feature."""

    def __init__(self, settings: Rows) -> None:
        super().__init__(settings._values)


def rows(table: type[Rows]) -> dict[str, Setting]:
    """Return the settings of a table by variable."""
    return {row.variable: row for row in vars(table).values() if isinstance(row, Setting)}


SETTINGS = rows(Table)  # of the core


def all_settings() -> dict[str, Setting]:
    """Return the settings of the core, then those of the features."""
    from enroot_py.base.features import plugged

    return {**SETTINGS, **{variable: row for each in plugged("settings") for variable, row in each.SETTINGS.items()}}


# Settings of enroot that penroot does not need. They are no error: sites' files have them.
UNUSED = {
    "ENROOT_GZIP_PROGRAM": "penroot decompresses layers itself",
    "ENROOT_ZSTD_OPTIONS": "layers are kept unpacked",
}
# Variables that no file sets.
_MORE = ("PENROOT_DEBUG", "PENROOT_HOST_ROOT", "PENROOT_NVIDIA_MODE", "PENROOT_SLURM_GPUS")
# Directories of penroot itself, which its own files cannot change.
FIXED = ("ENROOT_LIBRARY_PATH", "ENROOT_SYSCONF_PATH")
# Keys of enroot.conf that are not settings of ours but reach hooks and clients.
_PASSED_ON = ("MELLANOX_", "NVIDIA_", "SSL_CERT_", "PENROOT_")
_PROXIES = ("all_proxy", "no_proxy", "http_proxy", "https_proxy")


def check_key(key: str, origin: str) -> None:
    """Raise ConfigError for an unknown key of enroot.conf that resembles one of ours.

    Other ENROOT_* are the site's own, for its hooks.
    """
    if key in SETTINGS or key in UNUSED or key.startswith(_PASSED_ON) or key in _PROXIES or key in all_settings():
        return
    if key in FIXED:
        raise ConfigError(f"{origin}: {key} cannot be set in a file", hint="set it in the environment")
    if not key.startswith("ENROOT_") or not key.removeprefix("ENROOT_").replace("_", "A").isalnum():
        raise ConfigError(f"{origin}: unknown key {key!r}", hint="keys are ENROOT_*, MELLANOX_*, NVIDIA_*, proxies")
    if meant := _meant(key):
        raise ConfigError(f"{origin}: unknown key {key!r}", hint=f"did you mean {meant}?")


def slips(environ: Mapping[str, str]) -> list[str]:
    """Return a warning for each variable that resembles one of ours."""
    known = (*SETTINGS, *_MORE, *FIXED)
    unknown = [key for key in environ if key.startswith(("ENROOT_", "PENROOT_")) and key not in known]
    if unknown:
        of_features = all_settings()
        unknown = [key for key in unknown if key not in of_features]
    return [f"ignoring {key}: did you mean {meant}?" for key in unknown if (meant := _meant(key))]


def _meant(key: str) -> str:
    """Return the variable of which ``key`` may be a typo, or ""."""
    prefix, _, word = key.partition("_")
    known = (*all_settings(), *_MORE)
    name = nearest(word, [name.partition("_")[2] for name in known if name.startswith(prefix)])
    return f"{prefix}_{name}" if name else ""
