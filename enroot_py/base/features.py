"""List the features of penroot, and the sockets that each feature plugs into.

A feature is one folder. A socket is an extension point of the core. A module in the folder plugs the feature into the
socket that has the module's name. The core imports no feature by name, but calls plugged() for the modules of a socket.
So the core works without a feature's folder.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType
    from typing import Any

# Maximum size of the data that a feature puts into one variable of a job. c_shims/spank/options.c has the other limits.
CARRIED_BYTES = 64 << 10

SOCKETS = {
    "hooks": "a folder with hooks: see hooks/README.md",
    "outside": "looks_outside(settings, host): whether to load a hook before entering a namespace",
    "settings": "SETTINGS: rows of the table of settings",
    "process": "prepare(settings): before a start, change this process or execute its command again elsewhere",
    "beside": "begin(settings): start processes that stay in the network namespace of the container's caller; returns "
    "the namespaces in which root of the container has no capabilities",
    "start": "finish(context): the last setup of a container; returns the origin of the setting that requests it",
    "flags": "FLAGS: options of penroot start that change settings",
    "pin": "pin(reference, settings): the digest that the settings pin a tag to, or None",
    "admission": "checks of an image before its use, if there are policies: see store/policies.py",
    "doctor": "findings(settings): for penroot doctor and pyxis-py check",
    "verbs": "add(group): verbs of penroot",
    "admin": "add(group): verbs of pyxis-py",
    "manual": "for the manual: SECTIONS, (page, heading, paragraphs, entries) each, and EXAMPLES of verbs",
    "recorder": "begin(...): an event that records an operation, or None if the settings ask for none",
    "arguments": "ARGUMENTS: rows of the table of the plugin's arguments in plugstack.conf",
    "options": "OPTIONS: rows of the table of options of srun, sbatch and salloc",
    "reach": "libraries(plugin), findings(nodes, plugin, slurm): for pyxis-py check and check --nodes",
    "step": "functions of a step: see PARTS",
}

# Functions that the step module of a feature may have. All are optional.
PARTS = {
    "settings": "(step): changed settings",
    "at_submit": "(job, request): data for the nodes, as pairs for the plugin",
    "describe": "(job, name, origin): the description of a container that an option names",
    "must_resolve": "(request): whether srun must resolve a tag, even if the site's configuration forbids it",
    "pin": "(job, request, image, resolved): the digest of a tag, or None",
    "shares": "(plugin): whether srun may offer images to nodes",
    "offer": "(job, image, digest, allocation): a server in srun for its nodes, with ``invitation`` and serve(channel)",
    "peers": "(job, plugin): the other nodes of a step: Peers of registry/sources.py, or None",
    "send": "(job, request, plugin, learns_later=): a file that srun sends to its nodes, with serve(channel)",
    "receive": "(job, request, plugin, settings): the file that srun has sent, in the store of this node",
    "attach": "(step, held): additions to a running container when a step joins it: see pyxis_py/node/attached.py",
    "clean_up": "(job, notes): removes the feature's leftovers at the end of a job",
}

# The sockets into which each feature plugs; step.PART names one of PARTS. Rows, verbs and calls keep this order.
FEATURES = {
    "enroot_py.features.devices": "hooks settings flags",
    "enroot_py.features.fabric": "hooks outside settings verbs manual",
    "enroot_py.features.bundle": "settings verbs manual",
    "enroot_py.features.environments": "flags verbs manual options step.describe step.at_submit",
    "enroot_py.features.pins": "settings flags pin verbs manual arguments options "
    "step.at_submit step.must_resolve step.pin",
    "enroot_py.features.records": "settings verbs manual recorder arguments step.settings",
    "enroot_py.features.swarm": "arguments reach step.shares step.offer step.peers step.send step.receive",
    "enroot_py.features.trust": "admission doctor verbs manual",
    "enroot_py.features.slurm_inside": "settings flags start manual options step.settings step.attach",
    "enroot_py.features.limits": "settings flags process",
    "enroot_py.features.networks": "settings flags beside start",
    "pyxis_py.features.ssh": "verbs admin step.clean_up",
}


def parts(name: str) -> Iterator[Any]:
    """Yield the function ``name`` of PARTS from each feature that has it. Imports only these features."""
    assert name in PARTS
    for module in plugged(f"step.{name}"):
        yield getattr(module, name)


def folders(name: str) -> Iterator[str]:
    """Yield the path of each feature that has a folder named after the socket ``name``."""
    return (package.replace(".", "/") for package, sockets in FEATURES.items() if name in sockets.split())


def plugged(socket: str) -> Iterator[ModuleType]:
    """Import and yield the module of each feature that plugs into ``socket``, such as ``verbs`` or ``step.PART``."""
    assert socket.partition(".")[0] in SOCKETS
    for package, sockets in FEATURES.items():
        if socket in sockets.split():
            name = f"{package}.{socket.partition('.')[0]}"
            try:
                __import__(name)
            except ModuleNotFoundError as e:
                if e.name != package and getattr(sys.modules.get(package), "__file__", None):
                    raise
                continue  # the feature was removed
            yield sys.modules[name]
