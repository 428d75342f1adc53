"""Find the users of the images of a store.

An image is in use while a process holds it (Image.hold), while a process on this node sees its mount, or while the
record of a container names the image. An image in use must not be removed: its lower directories would read as
empty, without an error. Sources: proc(5), /proc/PID/mountinfo; the kernel's overlayfs documentation, "Changes to
underlying filesystems".

In a store on a network file system, the mounts and locks of other nodes are invisible. Therefore each start renews a
lease: a file named after the image and the node. A lease lasts for 30 days, or as many days as --older states.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

from enroot_py.base import log, mountinfo
from enroot_py.config.settings import Settings
from enroot_py.store import container_record, layout
from enroot_py.store.store import Store

LEASE_S = 30 * 86400  # longer than a job runs
_MAX_CREATE_S = 3600  # longer than the time from the link to the complete container


def of_containers(store: Store, settings: Settings) -> dict[str, str]:
    """Map the digest of each image that a container uses to the container's directory."""
    users = {}
    for record in {*_records_in(settings.data_path), *_noted_records(store)}:
        if image := container_record.read(record).get("image"):
            users[layout.digest_of(image)] = os.path.dirname(record)
    return users


def _records_in(data_path: str) -> list[str]:
    try:
        return [f"{data_path}/{name}/{container_record.MARK}" for name in os.listdir(data_path)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _noted_records(store: Store) -> Iterator[str]:
    """Yield the paths of records to which links in the store point. Remove the links of deleted containers."""
    for link in layout.all_of(store.root, layout.USERS):
        try:
            record = os.readlink(link)
        except OSError as e:  # not a link
            log.warn(f"{link}: {e.strerror}: ignoring it")
            continue
        container = os.path.dirname(record)
        is_old = time.time() - os.lstat(link).st_mtime > _MAX_CREATE_S
        if is_old and os.path.isdir(os.path.dirname(container)) and not os.path.lexists(container):
            os.unlink(link)  # the data path is accessible, and the container is gone
        else:
            yield record


def of_mounts(store: Store) -> dict[str, str]:
    """Map the digest of each mounted image to a process of this node that sees the mount.

    Only the digest counts, not the store's path in the mount. So a process that runs the same image from another store
    counts, too. The mount source has the end of a path that is too long for the mount options: rootfs.overlay().
    """
    is_private = not os.stat(store.root).st_mode & 0o077
    users: dict[str, str] = {}
    seen: set[bytes] = set()
    for pid, text in _process_files("mountinfo", is_private=is_private):
        if text in seen:
            continue
        seen.add(text)
        for mount in mountinfo.parse(text):
            if mount.fstype == "overlay":
                for digest in layout.images_in(f"{mount.source} {mount.data}"):
                    users.setdefault(digest, f"process {pid}")
    # Find FUSE servers by their arguments, because a FUSE mount does not name its image.
    for pid, words in _process_files("cmdline", is_private=is_private):
        for word in words.split(b"\0")[1:]:
            if digest := layout.image_in(os.fsdecode(word)):
                users[digest] = f"process {pid}"
    return users


def _process_files(name: str, *, is_private: bool) -> Iterator[tuple[str, bytes]]:
    """Yield (PID, content of the file ``name``) for each /proc/PID.

    Other users cannot use a private store, so skip their processes. The option hidepid of /proc may hide them anyway.
    """
    store_users = (0, os.geteuid())
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            if is_private and os.stat(f"/proc/{pid}").st_uid not in store_users:
                continue
            with open(f"/proc/{pid}/{name}", "rb") as f:
                data = f.read()
        except OSError:
            continue
        yield pid, data


# ---------------------------------------------------------------------------
# Leases


def leased(store: Store, digest: str, lease: float) -> str:
    """Return "a start on NODE" if another node started the image within ``lease`` seconds, else ""."""
    for path, image, node in layout.leases(store.root):
        if image != digest or node == os.uname().nodename:
            continue  # this node's mounts are visible
        with contextlib.suppress(FileNotFoundError):
            if time.time() - os.stat(path).st_mtime < lease:
                return f"a start on {node}"
    return ""


def leases_are_complete(store: Store) -> bool:
    """Return whether starts have written leases for LEASE_S or longer, so that each running container has a lease.

    If the store has no directory for leases, make it.
    """
    since = layout.leases_since(store.root)
    if not os.path.isdir(os.path.dirname(since)):
        os.mkdir(os.path.dirname(since), 0o700)
        with open(since, "x"):
            return False
    try:
        return time.time() - os.stat(since).st_mtime > LEASE_S
    except FileNotFoundError:
        return True


def forget_leases(store: Store) -> None:
    """Remove the leases of removed images."""
    for path, image, _ in layout.leases(store.root):
        if not os.path.isdir(layout.image(store.root, image)):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
