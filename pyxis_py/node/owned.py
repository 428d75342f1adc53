"""Containers that go with the steps that run them: a file in each says which boot of which node has made it."""

from __future__ import annotations

from enroot_py.base import linux
from enroot_py.store import containers, records

TYPE_CHECKING = False
if TYPE_CHECKING:
    from enroot_py.config.settings import Settings

_MARK = ".step"


def mark(directory: str, node: str) -> None:
    """Let the container in a directory go with its steps. Raises OSError."""
    with open(f"{directory}/{_MARK}", "w") as f:
        f.write(f"{node} {linux.boot_id()}\n")


def maker(name: str, settings: Settings) -> list[str]:
    """The node and the boot that made a container which goes with its steps; of another one nothing. Raises OSError."""
    container = f"{settings.data_path}/{name}"
    if records.of(container) is None:
        return []  # its root may hold a file of that name
    return records.text(f"{container}/{_MARK}").split()


def sweep(settings: Settings, node: str) -> None:
    """Remove what steps of this node have left that a reboot ended: nothing else knows of them then."""
    for name in containers.names(settings):
        jobid, _, stepid = name.removeprefix("pyxis_").partition("@")[0].rpartition("_")[2].partition(".")
        if not (name.startswith("pyxis_") and jobid.isdecimal() and stepid.isdecimal()):
            continue
        try:
            of, boot = maker(name, settings)
        except (OSError, ValueError):
            continue  # another user's idea of a name, or removed in this moment
        if of == node and boot != linux.boot_id():
            containers.remove_if_there(name, settings)


def remove(name: str, settings: Settings) -> None:
    """Delete a container of a step, and what was killed while it made or deleted one. Raises PenrootError."""
    containers.remove_if_there(name, settings)
    containers.sweep(settings)
