"""Keep a container's changes in a directory on disk until the container ends: ``penroot start --rw=disk``.

The directory is hidden beside the containers. The process that waits for the container locks and removes the directory.
If this process is killed, the next start with --rw=disk removes the directory: making.sweep().
"""

from __future__ import annotations

import os

from enroot_py.base import filesystems, making, trusted
from enroot_py.base.errors import ContainerError
from enroot_py.runtime import supervise
from enroot_py.runtime.rootfs import Source

TYPE_CHECKING = False
if TYPE_CHECKING:
    from enroot_py.config.settings import Settings

_MAX_NAME_CHARS = 100


def make(settings: Settings, *, sweep: bool = True) -> making.Directory:
    """Make and lock a directory for the changes of one container. Raises ContainerError."""
    data_path = settings.data_path
    try:
        trusted.place(data_path, make=True)
        if sweep:
            making.sweep(data_path)
        directory = making.Directory(f"{data_path}/rw", 0o700).__enter__()
        os.mkdir(directory.path + "/upper", 0o755)
        os.mkdir(directory.path + "/work")
    except OSError as e:
        hint = filesystems.hint_for(e, data_path, "ENROOT_DATA_PATH")
        raise ContainerError(f"cannot keep changes in {data_path}: {e.strerror}", hint=hint) from e
    return directory


def over(source: Source, directory: str) -> Source:
    """Return ``source`` with its changes in ``directory``. The container or image of ``source`` does not change."""
    lowerdirs = (source.directory,) if source.directory else source.lowerdirs
    if source.upper:
        lowerdirs = (source.upper, *lowerdirs)
    name = os.path.basename(source.name)[:_MAX_NAME_CHARS] or "overlay"
    changed = Source(name, lowerdirs=lowerdirs, image=source.image, changes=directory)
    changed.offset = source.offset
    changed.is_volatile = True
    return changed


def fork(source: Source, settings: Settings) -> Source:
    """Continue in a child, and return the source to start there. The parent waits, removes the changes, and ends.

    Raises ContainerError.
    """
    directory = make(settings)
    child = supervise.fork()
    if not child:
        return over(source, directory.path)
    status = supervise.wait(child)
    directory.__exit__()
    supervise.end(status)
