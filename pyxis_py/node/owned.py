"""Containers that are removed after their last step. A file in each container records the node and its boot ID."""

from __future__ import annotations

from enroot_py.base import linux
from enroot_py.store import container_record, containers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from enroot_py.config.settings import Settings

_MARK = ".step"


def mark(directory: str, node: str) -> None:
    """Mark the container in a directory for removal after its last step. Raises OSError."""
    with open(f"{directory}/{_MARK}", "w") as f:
        f.write(f"{node} {linux.boot_id()}\n")


def maker(name: str, settings: Settings) -> list[str]:
    """Return the node and the boot ID of a marked container, or [] for other containers. Raises OSError."""
    container = f"{settings.data_path}/{name}"
    if container_record.of(container) is None:
        return []  # a container in a plain directory: a file _MARK would belong to the image
    return container_record.text(f"{container}/{_MARK}").split()


def sweep(settings: Settings, node: str) -> None:
    """Remove containers of steps that a reboot of this node ended: the reboot removed the notes of the steps."""
    for name in containers.names(settings):
        jobid, _, stepid = name.removeprefix("pyxis_").partition("@")[0].rpartition("_")[2].partition(".")
        if not (name.startswith("pyxis_") and jobid.isdecimal() and stepid.isdecimal()):
            continue
        try:
            owner, boot = maker(name, settings)
        except (OSError, ValueError):
            continue  # not readable, or just removed
        if owner == node and boot != linux.boot_id():
            containers.remove_if_there(name, settings)


def remove(name: str, settings: Settings) -> None:
    """Delete a container of a step, and leftovers of killed helpers. Raises PenrootError."""
    containers.remove_if_there(name, settings)
    containers.sweep(settings)
