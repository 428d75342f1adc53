"""The Container Device Interface: what vendors write about their devices for any runtime.

Source: Container Device Interface Specification, "CDI JSON Specification" and
containerEdits; versions 0.3 to 1.1. A specification is parsed once: its plain
form is kept in the user's cache and used while the file stays as it is.
"""

from __future__ import annotations

import marshal
import os
import stat

from enroot_py.base import log
from enroot_py.base.errors import HookError
from enroot_py.devices.edits import Edits, Host

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

DIRECTORIES = ("/etc/cdi", "/var/run/cdi")  # a device of the second replaces one of the first
_CACHE_VERSION = 1
_LARGEST = 16 << 20
# What the values of a specification may raise that are not what they should be.
_DAMAGE = (KeyError, TypeError, AttributeError, ValueError)
# Hooks of NVIDIA's with nothing to do here: others' devices are hidden, nodes are not made anew, nor modes changed;
# for CUDA's compatibility package see nvidia.add_compat.
_NEEDLESS = {"chmod", "enable-cuda-compat", "disable-device-node-modification", "update-application-profile"}
_SPECIAL = "&*!|>%@`[{?,"  # what begins more of YAML than is read here


class Registry:
    """The devices that the specifications of a host describe, by kind and name."""

    def __init__(self, host: Host, cache: str = "") -> None:
        self.host = host
        self.cache = cache
        self.paths: dict[str, str] = {}
        self._devices: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {}
        self._common: dict[str, list[tuple[str, dict[str, Any]]]] = {}
        self._failed: dict[str, str] = {}
        for directory in DIRECTORIES:
            self._load(directory)

    def _load(self, directory: str) -> None:
        here: dict[tuple[str, str], str] = {}
        directory = self.host.real(directory) or directory
        try:
            names = sorted(os.listdir(self.host.path(directory)))
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as e:
            self._failed[self.host.path(directory)] = str(e.strerror)
            return
        for name in names:
            if not name.endswith((".json", ".yaml", ".yml")):
                continue
            path = self.host.path(f"{directory}/{name}")
            try:
                spec = self._read(path)
                kind = str(spec["kind"])
                devices = {str(device["name"]): device.get("containerEdits") or {} for device in spec["devices"]}
                if len(devices) < len(spec["devices"]):
                    raise ValueError("a name comes twice")
            except (OSError, RecursionError, *_DAMAGE) as e:
                # Fatal only for who asks for what it would describe.
                self._failed[path] = f"it has no {e}" if isinstance(e, KeyError) else str(e)
                continue
            self._common.setdefault(kind, []).append((path, spec.get("containerEdits") or {}))
            for device, edits in devices.items():
                if (kind, device) in here:
                    # Which is meant nobody can say, so neither is.
                    self._failed[path] = f"{kind}={device} is described in {here[kind, device]} too"
                    self._devices[kind].pop(device, None)
                    continue
                here[kind, device] = path
                self._devices.setdefault(kind, {})[device] = (path, edits)

    def _read(self, path: str) -> dict[str, Any]:
        """Raises OSError, ValueError."""
        info = os.stat(path)
        if not stat.S_ISREG(info.st_mode) or info.st_size > _LARGEST:
            raise ValueError(f"it is no file of at most {_LARGEST >> 20} MiB")
        key = (_CACHE_VERSION, path, info.st_mtime_ns, info.st_size, info.st_ino)
        kept = self._kept(path)
        if kept is not None and kept[0] == key:
            return kept[1]
        with open(path, "rb") as f:
            text = f.read().decode()
        spec = _parse(text, path)
        if not isinstance(spec, dict):
            raise ValueError("it is no mapping")
        self._keep(path, key, spec)
        return spec

    def _cached(self, path: str) -> str:
        return f"{self.cache}/cdi/{path.strip('/').replace('/', '_')}"

    def _kept(self, path: str) -> tuple[tuple[object, ...], dict[str, Any]] | None:
        if not self.cache:
            return None
        try:
            with open(self._cached(path), "rb") as f:
                if os.fstat(f.fileno()).st_uid != os.geteuid():
                    return None
                kept = marshal.load(f)
        except (OSError, ValueError, EOFError, TypeError):
            return None
        return kept if isinstance(kept, tuple) and len(kept) == 2 else None

    def _keep(self, path: str, key: tuple[int | str, ...], spec: dict[str, Any]) -> None:
        if not self.cache:
            return
        target = self._cached(path)
        temporary = f"{target}.{os.getpid()}"
        try:
            os.makedirs(os.path.dirname(target), 0o700, exist_ok=True)
            with open(temporary, "wb") as f:
                marshal.dump((key, spec), f)
            os.rename(temporary, target)
        except (OSError, ValueError) as e:  # a date, say, is for YAML alone
            log.debug(f"{target} is not kept: {e}")

    def names(self, kind: str) -> list[str]:
        """The devices of a kind, such as nvidia.com/gpu."""
        return sorted(self._devices.get(kind, ()))

    def failures(self) -> list[str]:
        return [f"{path}: {reason}" for path, reason in self._failed.items()]

    def stale(self, kind: str, names: list[str]) -> str:
        """The first path of the devices that is not on the host: a driver was changed since. Empty if all are.

        Raises HookError for a specification that is none.
        """
        for path, edits in self._of(kind, names):
            try:
                if missing := self._missing(edits):
                    return missing
            except _DAMAGE as e:
                raise HookError(_invalid(path, e)) from e
        return ""

    def _missing(self, edits: dict[str, Any]) -> str:
        for node in edits.get("deviceNodes") or ():
            path = str(node.get("hostPath") or node["path"])
            if not self.host.exists(path):
                return path
        for mount in edits.get("mounts") or ():
            path = str(mount["hostPath"])
            if mount.get("type") != "tmpfs" and path.startswith("/"):
                # Sockets and pipes come and go with their daemons; the files of a driver container do not.
                passing = path.startswith(("/run/", "/var/run/", "/tmp/")) and not path.startswith(
                    "/run/nvidia/driver/"
                )
                if not passing and not self.host.exists(path):
                    return path
        return ""

    def _of(self, kind: str, names: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        """The edits of devices, those of their files first, each file's once."""
        devices = self._devices.get(kind, {})
        chosen = [devices[name] for name in names]
        files = {path for path, _ in chosen}
        yield from ((path, edits) for path, edits in self._common.get(kind, ()) if path in files)
        yield from chosen

    def add(self, edits: Edits, kind: str, names: list[str]) -> list[str]:
        """Add what devices of a kind ask for; the directories whose libraries they want in the loader's cache.

        Raises HookError for a device that no specification describes.
        """
        for name in names:
            if name not in self._devices.get(kind, {}):
                known = ", ".join(self.names(kind))
                hint = (
                    f"there are {known}" if known else f"specifications are looked for in {' and '.join(DIRECTORIES)}"
                )
                broken = "; ".join(self.failures())
                raise HookError(
                    f"no CDI device {kind}={name} on {os.uname().nodename}",
                    hint=hint + (f"; not understood: {broken}" if broken else ""),
                )
        folders: list[str] = []
        for path, wanted in self._of(kind, names):
            try:
                folders += self._edit(edits, wanted)
            except _DAMAGE as e:
                raise HookError(_invalid(path, e)) from e
        return folders

    def _edit(self, edits: Edits, wanted: dict[str, Any]) -> list[str]:
        for variable in wanted.get("env") or ():
            name, equals, value = str(variable).partition("=")
            if not name or not equals:
                raise ValueError(f"{variable!r} is no variable with its value")
            # Written for NVIDIA's own hook, that it does not do the work twice.
            if (name, value) != ("NVIDIA_VISIBLE_DEVICES", "void"):
                edits.environ[name] = value
        for node in wanted.get("deviceNodes") or ():
            source = str(node.get("hostPath") or node["path"])
            if not edits.node(self.host, source, _place(node["path"])):
                raise HookError(f"the CDI device node {source} does not exist on {os.uname().nodename}")
        for mount in wanted.get("mounts") or ():
            target, source = _place(mount["containerPath"]), str(mount["hostPath"])
            if mount.get("type") == "tmpfs":
                edits.tmpfs.append(target)
            elif source.startswith("/"):
                edits.file(self.host, source, target, writable="ro" not in (mount.get("options") or ()))
            else:
                log.warn(f"CDI: {source} is not mounted on {target}: it is of type {mount.get('type')}")
        folders: list[str] = []
        for hook in wanted.get("hooks") or ():
            folders += _hook(edits, [str(word) for word in hook.get("args") or ()], str(hook.get("path")))
        for key in ("netDevices", "intelRdt"):
            if wanted.get(key):
                log.warn(f"CDI: {key} needs root and is left out")
        return folders


def _hook(edits: Edits, arguments: list[str], path: str) -> list[str]:
    """Do what a hook of NVIDIA's would; other programs are not run, for they expect to be root outside."""
    values: dict[str, list[str]] = {}
    words = iter(arguments)
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            values.setdefault(name, []).append(value if equals else next(words, ""))
    if "create-symlinks" in arguments:
        for link in values.get("--link", ()):
            target, _, at = link.partition("::")
            edits.links[_place(at)] = target
    elif {"update-ldcache", "create-soname-symlinks"} & set(arguments):
        return [_place(folder) for folders in values.get("--folder", ()) for folder in folders.split(",")]
    elif not _NEEDLESS & set(arguments):
        log.warn(f"CDI: the hook {path} is not run")
    return []


def _place(path: str) -> str:
    """A path of the container, for which its root is the end of all ``..``."""
    if not path.strip("/"):
        raise ValueError(f"{path!r} is no path in a container")
    return os.path.normpath("/" + path.lstrip("/"))


def _invalid(path: str, error: Exception) -> str:
    return f"{path} is no valid CDI specification: {error!r}"


def _parse(text: str, path: str) -> Any:
    """Raises ValueError with the line."""
    if path.endswith(".json") or text.lstrip().startswith("{"):
        import json

        return json.loads(text)
    try:
        return parse_yaml(text)
    except ValueError:
        # Written by hand, say. Once for every change of the file, so that it may take its time.
        import yaml

        try:
            return yaml.safe_load(text)
        except yaml.YAMLError as e:
            raise ValueError(" ".join(str(e).split())) from None


def parse_yaml(text: str) -> Any:
    """YAML as generators of specifications write it: block mappings and sequences of scalars, ``[]`` and ``{}``.

    Raises ValueError with the line for anything else, which is left to a parser that costs more than a start.
    """
    lines: list[tuple[int, str, int]] = []
    for number, line in enumerate(text.splitlines(), 1):
        bare = line.strip()
        if bare and not bare.startswith("#") and bare not in ("---", "..."):
            if line[: len(line) - len(line.lstrip())].count("\t"):
                raise ValueError(f"line {number}: a tab indents it")
            lines.append((len(line) - len(line.lstrip(" ")), bare, number))
    if not lines:
        return None
    value, at = _block(lines, 0, lines[0][0])
    if at < len(lines):
        raise ValueError(f"line {lines[at][2]}: its indentation fits nothing")
    return value


def _block(lines: list[tuple[int, str, int]], at: int, indent: int) -> tuple[Any, int]:
    """The mapping, sequence or scalar that begins at a line, and the line after it."""
    text = lines[at][1]
    if text == "-" or text.startswith("- "):
        items = []
        while at < len(lines) and lines[at][0] == indent and (lines[at][1] == "-" or lines[at][1].startswith("- ")):
            rest = lines[at][1][1:].lstrip()
            if not rest or rest.startswith("#"):
                value, at = _nested(lines, at + 1, indent + 1)
            else:
                # What follows the dash is a block of its own, as if the dash were space.
                inner = indent + len(lines[at][1]) - len(rest)
                lines[at] = (inner, rest, lines[at][2])
                value, at = _block(lines, at, inner)
            items.append(value)
        return items, at
    if _split(text, lines[at][2]) is None:
        return _scalar(text, lines[at][2]), at + 1
    mapping: dict[str, Any] = {}
    while at < len(lines) and lines[at][0] == indent:
        pair = _split(lines[at][1], lines[at][2])
        if pair is None or lines[at][1].startswith("- "):
            raise ValueError(f"line {lines[at][2]}: it is no 'key: value'")
        key, rest = pair
        if rest:
            mapping[key], at = _scalar(rest, lines[at][2]), at + 1
        else:
            following = lines[at + 1] if at + 1 < len(lines) else None
            # A sequence may stand at the indentation of its key.
            deeper = following is not None and (
                following[0] > indent or (following[0] == indent and (following[1] + " ").startswith("- "))
            )
            mapping[key], at = _block(lines, at + 1, lines[at + 1][0]) if deeper else (None, at + 1)
    return mapping, at


def _nested(lines: list[tuple[int, str, int]], at: int, least: int) -> tuple[Any, int]:
    return _block(lines, at, lines[at][0]) if at < len(lines) and lines[at][0] >= least else (None, at)


def _split(text: str, number: int) -> tuple[str, str] | None:
    """``key: value``, or None for what is a scalar alone."""
    if text[0] in "\"'":
        key, rest = _quoted(text, number)
        return (key, _uncommented(rest[1:])) if rest.startswith(":") else None
    key, colon, rest = text.partition(": ")
    if not colon and not text.endswith(":"):
        return None
    if text[0] in _SPECIAL:
        raise ValueError(f"line {number}: {text[0]!r} begins more than is read here")
    return (key.rstrip(), _uncommented(rest)) if colon else (text[:-1].rstrip(), "")


def _uncommented(text: str) -> str:
    text = text.strip()
    if text.startswith("#"):
        return ""
    return text if text[:1] in ("'", '"') else text.partition(" #")[0].rstrip()


def _scalar(text: str, number: int) -> Any:
    text = _uncommented(text)
    if not text:
        return None
    if text[0] in "\"'":
        value, rest = _quoted(text, number)
        if _uncommented(rest):
            raise ValueError(f"line {number}: {rest.strip()!r} follows a string")
        return value
    if text in ("[]", "{}"):
        return [] if text == "[]" else {}
    if text[0] in _SPECIAL:
        raise ValueError(f"line {number}: {text[0]!r} begins more than is read here")
    if text in ("null", "~"):
        return None
    if text in ("true", "false"):
        return text == "true"
    return int(text) if text.removeprefix("-").isdecimal() and str(int(text)) == text else text


def _quoted(text: str, number: int) -> tuple[str, str]:
    """The string that ``text`` begins with, and what follows it."""
    if text[0] == '"':
        import json

        try:
            value, end = json.JSONDecoder().raw_decode(text)
        except ValueError as e:
            raise ValueError(f"line {number}: {e}") from None
        return value, text[end:]
    end = 1
    while (end := text.find("'", end)) >= 0:
        if text[end + 1 : end + 2] != "'":
            return text[1:end].replace("''", "'"), text[end + 1 :]
        end += 2
    raise ValueError(f"line {number}: a string does not end")


def split_name(name: str) -> tuple[str, str]:
    """``vendor.com/class=device`` in two. Raises HookError."""
    kind, equals, device = name.partition("=")
    if not equals or not device or kind.count("/") != 1:
        raise HookError(f"{name!r} is no CDI device", hint="it is written vendor.com/class=name, as nvidia.com/gpu=0")
    return kind, device
