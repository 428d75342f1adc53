"""The features of this installation, and the sockets that each plugs into.

A feature is one folder, and plugs into a socket of the core by a module that has the socket's name. The core asks here
for the modules of a socket and imports no feature by name. Without the folder of a feature the core works all the same.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType
    from typing import Any

SOCKETS = {
    "settings": "SETTINGS: rows of the table of settings",
    "start": "finish(context): what a container gets last; returns who asks for it. If a setting of a feature is set",
    "flags": "FLAGS: options of penroot start that change settings",
    "pin": "pin(reference, settings): the digest that the settings pin a tag to, or None",
    "admission": "checks of an image before it is used, if there are policies: see store/policies.py",
    "doctor": "findings(settings): for penroot doctor and pyxis-py check",
    "verbs": "add(group): verbs of penroot; add_admin(group): of pyxis-py",
    "manual": "SECTIONS: (page, heading, paragraphs, entries) for the manual; EXAMPLES of verbs",
    "recorder": "begin(...): an event that records what is done; None if nobody wants one",
    "arguments": "ARGUMENTS: rows of the table of the plugin's arguments in plugstack.conf",
    "options": "OPTIONS: rows of the table of options of srun, sbatch and salloc",
    "step": "a part of a step, of PARTS",
}

# What a part of a step may have. Everything is optional.
PARTS = {
    "settings": "(step): settings that it changes",
    "at_submit": "(job, request): what a job or a step takes along, as pairs for the plugin",
    "CARRIED": "the variables in which the plugin carries that",
    "must_resolve": "(request): whether srun resolves a tag, whatever the site says",
    "pin": "(job, request, image, resolved): the digest of a tag, or None",
    "attach": "(step, container): what a running container gets when a step joins it: see pyxis_py/attached.py",
    "clean_up": "(job, notes): removes what the feature has left, at the end of a job",
    "uri": "(job, request, image): the same for an importer, in the URI of the image",
}

# The sockets of each feature. The order is that of rows, verbs and calls.
FEATURES = {
    "enroot_py.features.pins": "settings flags pin verbs manual arguments options step",
    "enroot_py.features.records": "settings verbs manual recorder arguments step",
    "enroot_py.features.trust": "admission doctor verbs manual",
    "enroot_py.features.slurm_inside": "settings flags start manual options step",
    "pyxis_py.features.ssh": "verbs step",
}


def calls(socket: str, function: str) -> Iterator[Callable[..., Any]]:
    """The function of that name in each module that plugs into a socket, if the module has it."""
    assert socket != "step" or function in PARTS
    for module in plugged(socket):
        if found := getattr(module, function, None):
            yield found


def plugged(socket: str) -> Iterator[ModuleType]:
    """Import the module of each feature that plugs into a socket."""
    assert socket in SOCKETS
    for package, sockets in FEATURES.items():
        if socket in sockets.split():
            name = f"{package}.{socket}"
            try:
                __import__(name)
            except ModuleNotFoundError as e:
                if e.name != package:
                    raise
                continue  # the folder was removed
            yield sys.modules[name]
