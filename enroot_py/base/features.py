"""The features of this installation, and the sockets that each plugs into.

A feature is one folder, and plugs into a socket of the core by a module that has the socket's name. The core asks here
for the modules of a socket and imports no feature by name. Without the folder of a feature the core works all the same.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType
    from typing import Any

# What a feature takes along with a job, in one variable: c_shims/spank/options.c has the limits of all of them.
CARRIED_BYTES = 64 << 10

SOCKETS = {
    "hooks": "a folder with hooks, as hooks/README.md has them",
    "outside": "looks_outside(settings, host): whether a hook has to be loaded before a namespace is entered",
    "settings": "SETTINGS: rows of the table of settings",
    "start": "finish(context): what a container gets last; returns who asks for it. If a setting of a feature is set",
    "flags": "FLAGS: options of penroot start that change settings",
    "pin": "pin(reference, settings): the digest that the settings pin a tag to, or None",
    "admission": "checks of an image before it is used, if there are policies: see store/policies.py",
    "doctor": "findings(settings): for penroot doctor and pyxis-py check",
    "verbs": "add(group): verbs of penroot",
    "admin": "add(group): verbs of pyxis-py",
    "manual": "for the manual: SECTIONS, (page, heading, paragraphs, entries) each, and EXAMPLES of verbs",
    "recorder": "begin(...): an event that records what is done; None if nobody wants one",
    "arguments": "ARGUMENTS: rows of the table of the plugin's arguments in plugstack.conf",
    "options": "OPTIONS: rows of the table of options of srun, sbatch and salloc",
    "reach": "libraries(plugin), findings(nodes, plugin, slurm): for pyxis-py check and check --nodes",
    "step": "a part of a step, of PARTS",
}

# What a part of a step may have. Everything is optional.
PARTS = {
    "settings": "(step): settings that it changes",
    "at_submit": "(job, request): what a job or a step takes along, as pairs for the plugin",
    "describe": "(job, name, origin): the description of a container for which an option asks",
    "must_resolve": "(request): whether srun resolves a tag, whatever the site says",
    "pin": "(job, request, image, resolved): the digest of a tag, or None",
    "shares": "(plugin): whether srun may offer images to nodes",
    "offer": "(job, image, digest, allocation): with an invitation and serve(channel), what srun does for its nodes",
    "peers": "(job, plugin): the other nodes of a step: Peers of registry/sources.py, or None",
    "send": "(job, request, plugin, learns_later=): with serve(channel), a file that srun sends to its nodes",
    "receive": "(job, request, plugin, settings): that file in the store of a node",
    "attach": "(step, held): what a running container gets when a step joins it: see pyxis_py/node/attached.py",
    "clean_up": "(job, notes): removes what the feature has left, at the end of a job",
}

# The sockets of each feature, and its parts of a step. The order is that of rows, verbs and calls.
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
    "pyxis_py.features.ssh": "verbs admin step.clean_up",
}


def parts(name: str) -> Iterator[Any]:
    """A part of a step, of each feature that has it; no other feature is imported."""
    assert name in PARTS
    for module in plugged(f"step.{name}"):
        yield getattr(module, name)


def folders(name: str) -> Iterator[str]:
    """The path of each feature that has a folder in a socket."""
    return (package.replace(".", "/") for package, sockets in FEATURES.items() if name in sockets.split())


def plugged(socket: str) -> Iterator[ModuleType]:
    """Import the module of each feature that plugs into a socket; ``step.PART`` is one part of a step."""
    assert socket.partition(".")[0] in SOCKETS
    for package, sockets in FEATURES.items():
        if socket in sockets.split():
            name = f"{package}.{socket.partition('.')[0]}"
            try:
                __import__(name)
            except ModuleNotFoundError as e:
                if e.name != package and getattr(sys.modules.get(package), "__file__", None):
                    raise
                continue  # the folder was removed, or its modules
            yield sys.modules[name]
