"""Who uses the images of a store.

An image is in use while somebody holds it (Image.hold), while a process on this node sees
a mount of it, or while the record of a container names it. Sources: proc(5),
/proc/PID/mountinfo; the kernel's overlayfs documentation, "Changes to underlying
filesystems": a lower directory that is removed beneath a mount does not fail, it reads as
empty, so nothing that is in use may go.

In a store on a network file system other nodes have mounts and locks that cannot be seen.
There each start renews a file that names its node: a lease, which holds for thirty days, or
for as long as --older says.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

from enroot_py.base import log, mountinfo
from enroot_py.config.settings import Settings
from enroot_py.store import layout, records
from enroot_py.store.store import Store

LEASE = 30 * 86400  # seconds: no job runs as long
_SETTLED = 3600  # seconds after which a container whose record was announced has been made


def of_containers(store: Store, settings: Settings) -> dict[str, str]:
    """Digest of each image that the record of a container names -> the container's directory."""
    users = {}
    for record in {*_records_in(settings.data_path), *_noted_records(store)}:
        if image := records.read(record).get("image"):
            users[layout.digest_of(image)] = os.path.dirname(record)
    return users


def _records_in(data_path: str) -> list[str]:
    try:
        return [f"{data_path}/{name}/{records.MARK}" for name in os.listdir(data_path)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _noted_records(store: Store) -> Iterator[str]:
    """Records of containers in any data path; the links to those of removed containers are removed."""
    for link in layout.all_of(store.root, layout.USERS):
        try:
            record = os.readlink(link)
        except OSError as e:  # whatever it is, no record of ours
            log.warn(f"{link}: {e.strerror}: ignoring it")
            continue
        container = os.path.dirname(record)
        old = time.time() - os.lstat(link).st_mtime > _SETTLED
        if old and os.path.isdir(os.path.dirname(container)) and not os.path.lexists(container):
            os.unlink(link)  # the place is there, the container is not
        else:
            yield record


def of_mounts(store: Store) -> dict[str, str]:
    """Digest of each image in an overlay that a process of this node sees -> the process.

    Digests are unique, so it does not matter by which path a process mounted the store. A path that is too long for
    the options of the mount is in its source (rootfs.overlay()). Other users may run the same image, of their store.
    """
    private = not os.stat(store.root).st_mode & 0o077
    users: dict[str, str] = {}
    seen: set[bytes] = set()
    for pid, text in _of_processes("mountinfo", private):
        if text in seen:
            continue
        seen.add(text)
        for mount in mountinfo.parse(text):
            if mount.fstype == "overlay":
                for digest in layout.images_in(f"{mount.source} {mount.data}"):
                    users.setdefault(digest, f"process {pid}")
    for pid, words in _of_processes("cmdline", private):  # who serves a squashfs file: a FUSE mount does not name it
        for word in words.split(b"\0")[1:]:
            if digest := layout.image_in(os.fsdecode(word)):
                users[digest] = f"process {pid}"
    return users


def _of_processes(name: str, private: bool) -> Iterator[tuple[str, bytes]]:
    """The file ``name`` of each /proc/PID; if ``private`` of this user's and root's, who alone come to the store.

    Processes that hidepid hides are not our user's, and use nothing of ours.
    """
    ours = (0, os.geteuid())
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            if private and os.stat(f"/proc/{pid}").st_uid not in ours:
                continue
            with open(f"/proc/{pid}/{name}", "rb") as f:
                data = f.read()
        except OSError:
            continue
        yield pid, data


# ---------------------------------------------------------------------------
# Leases


def leased(store: Store, digest: str, lease: float) -> str:
    """Another node that has started an image of a shared store within ``lease`` seconds, in words; or ""."""
    for path, image, node in layout.leases(store.root):
        if image != digest or node == os.uname().nodename:
            continue  # of our own we see the mounts
        with contextlib.suppress(FileNotFoundError):
            if time.time() - os.stat(path).st_mtime < lease:
                return f"a start on {node}"
    return ""


def has_leases(store: Store) -> bool:
    """Whether all that may run has a lease; a store that is older than leases has them from now on."""
    since = layout.leases_since(store.root)
    if not os.path.isdir(os.path.dirname(since)):
        os.mkdir(os.path.dirname(since), 0o700)
        with open(since, "x"):
            return False
    try:
        return time.time() - os.stat(since).st_mtime > LEASE
    except FileNotFoundError:
        return True


def forget_leases(store: Store) -> None:
    """Remove the leases of images that are gone."""
    for path, image, _ in layout.leases(store.root):
        if not os.path.isdir(layout.image(store.root, image)):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
