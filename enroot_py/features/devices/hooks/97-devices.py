"""Add the devices in ENROOT_DEVICES: CDI names, or nodes such as /dev/kfd and /dev/dri.

98-nvidia handles NVIDIA GPUs: it needs no CDI specification, and follows the image's variables and Slurm's allocation.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from enroot_py.runtime.edits import Edits, Host
    from enroot_py.runtime.hooks import Context


def run(context: Context) -> None:
    if not context.settings.is_extended:
        return
    from enroot_py.features.devices.settings import named

    if named(context.settings):
        plan(context).execute(context)


def plan(context: Context) -> Edits:
    """Return the container's edits for the devices. Raises HookError if this node lacks a device."""
    from enroot_py.base.errors import HookError
    from enroot_py.features.devices import cdi
    from enroot_py.features.devices.settings import named
    from enroot_py.runtime.edits import Edits, Host

    host = Host.of(context.host)
    edits = Edits("97-devices")
    kinds: dict[str, list[str]] = {}
    for word in named(context.settings):
        if word.startswith("/dev/") and ".." not in word:
            if not add_nodes(host, edits, word):
                raise HookError(f"the device {word} does not exist on {os.uname().nodename}")
        else:
            kind, name = cdi.split_name(word)
            if kind != "nvidia.com/gpu":
                kinds.setdefault(kind, []).append(name)
    specifications = cdi.Specifications(host, context.settings.cache_path) if kinds else None
    for kind, names in kinds.items():
        assert specifications is not None
        known = specifications.names(kind)
        selected = known if "all" in names and "all" not in known else names
        folders = specifications.add(edits, kind, selected or names)
        if missing := specifications.missing_path(kind, selected):
            from enroot_py.base import log

            log.warn(f"the CDI specification of {kind} is outdated: {missing} does not exist")
        if folders:
            from enroot_py.features.devices.nvidia.driver import Driver

            Driver.of(host, context.host).link(edits, folders)
    return edits


def add_nodes(host: Host, edits: Edits, path: str) -> bool:
    """Add a node, or the nodes in a directory. Return False if there are none."""
    if not os.path.isdir(host.path(path)):
        return edits.node(host, path)
    names = [name for name in host.list(path) if name != "by-path"]
    added = [add_nodes(host, edits, f"{path}/{name}") for name in names]
    return any(added)
