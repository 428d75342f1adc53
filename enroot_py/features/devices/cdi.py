"""Container Device Interface: apply the device specifications that vendors write for all runtimes.

A parsed specification stays in the user's cache until the file changes. Source: Container Device
Interface Specification, "CDI JSON Specification" and containerEdits; versions 0.3 to 1.1.
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

DIRECTORIES = ("/etc/cdi", "/var/run/cdi")  # in order of increasing precedence
# Exceptions raised for values of a wrong type or form in a specification.
_DAMAGE = (KeyError, TypeError, AttributeError, ValueError)
# NVIDIA hooks that are not needed. penroot hides other devices anyway, and binds device nodes instead of creating them.
# nvidia/driver.py handles CUDA's compatibility package.
_NEEDLESS = {"chmod", "enable-cuda-compat", "disable-device-node-modification", "update-application-profile"}


class Specifications:
    """The devices in a host's CDI specifications, by kind and name."""

    def __init__(self, host: Host, cache: str = "") -> None:
        self.host = host
        self._kept_in = cache and cache + "/cdi"
        self._devices: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {}
        self._common: dict[str, list[tuple[str, dict[str, Any]]]] = {}
        self._failed: dict[str, str] = {}
        for directory in DIRECTORIES:
            loaded: dict[tuple[str, str], str] = {}
            for path in self._files(directory):
                self._load(path, loaded)

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

    def _load(self, path: str, loaded: dict[tuple[str, str], str]) -> None:
        """Load a specification. ``loaded`` has the devices of the directory so far.

        An invalid specification is only recorded: it matters only to a container that asks for its devices.
        """
        try:
            spec = parsed.read(path, self._kept_in, _parse)
            if spec is None:
                return  # deleted meanwhile
            kind = str(spec["kind"])
            devices = {str(device["name"]): device.get("containerEdits") or {} for device in spec["devices"]}
            if len(devices) < len(spec["devices"]):
                raise ValueError("a device name is used twice")
        except ConfigError as e:
            self._failed[path] = str(e)
            return
        except (OSError, RecursionError, *_DAMAGE) as e:
            self._failed[path] = f"{path}: key {e} is missing" if isinstance(e, KeyError) else f"{path}: {e}"
            return
        self._common.setdefault(kind, []).append((path, spec.get("containerEdits") or {}))
        for device, edits in devices.items():
            if (kind, device) in loaded:
                # CDI does not order the files of a directory, so use neither device.
                self._failed[path] = f"{path}: {kind}={device} is also in {loaded[kind, device]}"
                self._devices[kind].pop(device, None)
            else:
                loaded[kind, device] = path
                self._devices.setdefault(kind, {})[device] = (path, edits)

    def names(self, kind: str) -> list[str]:
        """Return the device names of a kind, such as nvidia.com/gpu."""
        return sorted(self._devices.get(kind, ()))

    def failures(self) -> list[str]:
        return list(self._failed.values())

    def missing_path(self, kind: str, names: list[str]) -> str:
        """Return the first path that the devices need but the host lacks (for example after a driver update), or "".

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
                # A missing socket or pipe only means that its daemon is not running.
                runtime_file = path.startswith(("/run/", "/var/run/", "/tmp/"))
                if runtime_file and not path.startswith("/run/nvidia/driver/"):
                    continue
                if not self.host.exists(path):
                    return path
        return ""

    def _of(self, kind: str, names: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the common edits of each file that has one of the devices, then the edits of each device."""
        devices = self._devices.get(kind, {})
        chosen = [devices[name] for name in names]
        files = {path for path, _ in chosen}
        yield from ((path, edits) for path, edits in self._common.get(kind, ()) if path in files)
        yield from chosen

    def add(self, edits: Edits, kind: str, names: list[str]) -> list[str]:
        """Add the edits of devices. Return the directories whose libraries belong in the loader cache.

        Raises HookError for a device that no specification describes.
        """
        for name in names:
            if name not in self._devices.get(kind, {}):
                known = ", ".join(self.names(kind))
                hint = f"available: {known}" if known else f"put a specification into {' or '.join(DIRECTORIES)}"
                broken = "; ".join(self.failures())
                raise HookError(
                    f"no CDI device {kind}={name} on {os.uname().nodename}",
                    hint=hint + (f"; invalid: {broken}" if broken else ""),
                )
        folders: list[str] = []
        for path, specified in self._of(kind, names):
            try:
                folders += self._edit(edits, specified)
            except _DAMAGE as e:
                raise HookError(_invalid(path, e)) from e
        return folders

    def _edit(self, edits: Edits, specified: dict[str, Any]) -> list[str]:
        for variable in specified.get("env") or ():
            name, equals, value = str(variable).partition("=")
            if not name or not equals:
                raise ValueError(f"{variable!r} is not NAME=VALUE")
            # NVIDIA sets this only to turn off its legacy hook.
            if (name, value) != ("NVIDIA_VISIBLE_DEVICES", "void"):
                edits.environ[name] = value
        for node in specified.get("deviceNodes") or ():
            source = str(node.get("hostPath") or node["path"])
            if not edits.node(self.host, source, _container_path(node["path"])):
                raise HookError(f"the CDI device node {source} does not exist on {os.uname().nodename}")
        for mount in specified.get("mounts") or ():
            target, source = _container_path(mount["containerPath"]), str(mount["hostPath"])
            if mount.get("type") == "tmpfs":
                edits.tmpfs.append(target)
            elif source.startswith("/"):
                edits.file(self.host, source, target, writable="ro" not in (mount.get("options") or ()))
            else:
                log.warn(f"CDI: cannot mount {source} on {target}: unsupported type {mount.get('type')}")
        folders: list[str] = []
        for hook in specified.get("hooks") or ():
            folders += _hook(edits, [str(word) for word in hook.get("args") or ()], str(hook.get("path")))
        for key in ("netDevices", "intelRdt"):
            if specified.get(key):
                log.warn(f"CDI: {key} is ignored: it needs root")
        return folders


def _hook(edits: Edits, arguments: list[str], path: str) -> list[str]:
    """Do the work of a known NVIDIA hook, and return its directories for the loader cache.

    Other hooks are not run, because they expect to be root on the host.
    """
    values: dict[str, list[str]] = {}
    words = iter(arguments)
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            values.setdefault(name, []).append(value if equals else next(words, ""))
    if "create-symlinks" in arguments:
        for link in values.get("--link", ()):
            target, _, path_of_link = link.partition("::")
            edits.links[_container_path(path_of_link)] = target
    elif {"update-ldcache", "create-soname-symlinks"} & set(arguments):
        return [_container_path(folder) for folders in values.get("--folder", ()) for folder in folders.split(",")]
    elif not _NEEDLESS & set(arguments):
        log.warn(f"CDI: the hook {path} is ignored: hooks need root")
    return []


def _container_path(path: str) -> str:
    """Normalize a path in the container; ``..`` stops at the container's root."""
    if not path.strip("/"):
        raise ValueError(f"{path!r} is not a container path")
    return os.path.normpath("/" + path.lstrip("/"))


def _invalid(path: str, error: Exception) -> str:
    return f"{path} is not a valid CDI specification: {error!r}"


def _parse(path: str, data: bytes) -> dict[str, Any]:
    """Parse JSON or YAML. Raises ValueError with the line."""
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
    """Parse YAML. Keep scalars as strings: a name may be ``0``, ``0:1`` or ``on``. Raises ValueError with the line."""
    import yaml

    base = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the slow loader if libyaml is missing
    resolvers = {
        first: [(tag, pattern) for tag, pattern in pairs if tag.endswith((":null", ":merge"))]
        for first, pairs in base.yaml_implicit_resolvers.items()
    }
    try:
        return yaml.load(text, Loader=type("Loader", (base,), {"yaml_implicit_resolvers": resolvers}))
    except yaml.YAMLError as e:
        raise ValueError(" ".join(str(e).split())) from None


def split_name(name: str) -> tuple[str, str]:
    """Split ``vendor.com/class=device`` into kind and device. Raises HookError."""
    kind, equals, device = name.partition("=")
    if not equals or not device or kind.count("/") != 1:
        raise HookError(f"{name!r} is not a CDI device", hint="write vendor.com/class=name, such as nvidia.com/gpu=0")
    return kind, device
