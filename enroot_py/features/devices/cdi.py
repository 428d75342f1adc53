"""The Container Device Interface: what vendors write about their devices for any runtime.

Source: Container Device Interface Specification, "CDI JSON Specification" and
containerEdits; versions 0.3 to 1.1. A specification is parsed once: its plain
form is kept in the user's cache and used while the file stays as it is.
"""

from __future__ import annotations

import os

from enroot_py.base import log
from enroot_py.base.errors import ConfigError, HookError
from enroot_py.config import parsed
from enroot_py.runtime.edits import Edits, Host

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

DIRECTORIES = ("/etc/cdi", "/var/run/cdi")  # a device of the second replaces one of the first
# What values of a wrong type or form in a specification raise.
_DAMAGE = (KeyError, TypeError, AttributeError, ValueError)
# Hooks of NVIDIA's with nothing to do here: others' devices are hidden, nodes are not made anew, nor modes changed;
# for CUDA's compatibility package see nvidia/driver.py.
_NEEDLESS = {"chmod", "enable-cuda-compat", "disable-device-node-modification", "update-application-profile"}


class Specifications:
    """The devices that the specifications of a host describe, by kind and name."""

    def __init__(self, host: Host, cache: str = "") -> None:
        self.host = host
        self._kept_in = cache and cache + "/cdi"
        self._devices: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {}
        self._common: dict[str, list[tuple[str, dict[str, Any]]]] = {}
        self._failed: dict[str, str] = {}
        for directory in DIRECTORIES:
            here: dict[tuple[str, str], str] = {}
            for path in self._files(directory):
                self._load(path, here)

    def _files(self, directory: str) -> list[str]:
        directory = self.host.path(self.host.real(directory) or directory)
        try:
            names = sorted(os.listdir(directory))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as e:
            self._failed[directory] = f"{directory}: {e.strerror}"
            return []
        return [f"{directory}/{name}" for name in names if name.endswith((".json", ".yaml", ".yml"))]

    def _load(self, path: str, here: dict[tuple[str, str], str]) -> None:
        """Take in a specification; ``here`` is what others of its directory describe.

        A broken one matters only to who asks for its devices.
        """
        try:
            spec = parsed.read(path, self._kept_in, _parse)
            if spec is None:
                return  # it has gone
            kind = str(spec["kind"])
            devices = {str(device["name"]): device.get("containerEdits") or {} for device in spec["devices"]}
            if len(devices) < len(spec["devices"]):
                raise ValueError("a name comes twice")
        except ConfigError as e:
            self._failed[path] = str(e)
            return
        except (OSError, RecursionError, *_DAMAGE) as e:
            self._failed[path] = f"{path}: it has no {e}" if isinstance(e, KeyError) else f"{path}: {e}"
            return
        self._common.setdefault(kind, []).append((path, spec.get("containerEdits") or {}))
        for device, edits in devices.items():
            if (kind, device) in here:
                # Which is meant nobody can say, so neither is.
                self._failed[path] = f"{path}: {kind}={device} is described in {here[kind, device]} too"
                self._devices[kind].pop(device, None)
            else:
                here[kind, device] = path
                self._devices.setdefault(kind, {})[device] = (path, edits)

    def names(self, kind: str) -> list[str]:
        """The devices of a kind, such as nvidia.com/gpu."""
        return sorted(self._devices.get(kind, ()))

    def failures(self) -> list[str]:
        return list(self._failed.values())

    def stale(self, kind: str, names: list[str]) -> str:
        """The first path of the devices that is not on the host: a driver was changed since. Empty if all are.

        Raises HookError for an invalid specification.
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
                raise ValueError(f"{variable!r} is not NAME=VALUE")
            # By this NVIDIA keeps its own hook from doing the work again.
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


def _parse(path: str, data: bytes) -> dict[str, Any]:
    """Raises ValueError with the line."""
    text = data.decode()
    if path.endswith(".json") or text.lstrip().startswith("{"):
        import json

        spec = json.loads(text)
    else:
        spec = _parse_yaml(text)
    if not isinstance(spec, dict):
        raise ValueError("not a mapping")
    return spec


def _parse_yaml(text: str) -> Any:
    """YAML whose scalars are words, for a name may be ``0``, ``0:1`` or ``on``. Raises ValueError with the line."""
    import yaml

    base = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # without libyaml there is but the slow one
    resolvers = {
        first: [(tag, pattern) for tag, pattern in pairs if tag.endswith((":null", ":merge"))]
        for first, pairs in base.yaml_implicit_resolvers.items()
    }
    try:
        return yaml.load(text, Loader=type("Loader", (base,), {"yaml_implicit_resolvers": resolvers}))
    except yaml.YAMLError as e:
        raise ValueError(" ".join(str(e).split())) from None


def split_name(name: str) -> tuple[str, str]:
    """``vendor.com/class=device`` in two. Raises HookError."""
    kind, equals, device = name.partition("=")
    if not equals or not device or kind.count("/") != 1:
        raise HookError(f"{name!r} is no CDI device", hint="write vendor.com/class=name, for example nvidia.com/gpu=0")
    return kind, device
