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
    "verbs": "add(group): verbs of the command line",
    "manual": "SECTIONS: (page, heading, paragraphs, entries) for the manual; EXAMPLES of verbs",
    "recorder": "begin(...): an event that records what is done; None if nobody wants one",
    "arguments": "ARGUMENTS: rows of the table of the plugin's arguments in plugstack.conf",
    "step": "parts of a step, each a function that pyxis_py calls if it is there: settings(step)",
}

# The sockets of each feature. The order is that of rows, verbs and calls.
FEATURES = {
    "enroot_py.features.records": "settings verbs manual recorder arguments step",
}


def calls(socket: str, function: str) -> Iterator[Callable[..., Any]]:
    """The function of that name in each module that plugs into a socket, if the module has it."""
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
