"""Paths and file names of the store. No other module defines such paths.

Paths beneath the directory of the store. Only its owner can enter the directory; root may open it to all users::

    layers/DIFF-ID/fs,index,sums    a layer's tree, its index and its checksums: index.py
    images/DIGEST/manifest,config   unchanged from the registry
    images/DIGEST/head/…            fs, index and sums of the topmost tree, which adds the files of enroot: compose.py
    images/DIGEST/stack             lower directories, relative to the root, top first, one a line
    images/DIGEST/image.sqsh,sum    the image as one file, and its SHA-256; replaces head and stack: onefile.py
    images/DIGEST/signatures/HASH   the signatures that verified the image for one repository: features/trust
    images/DIGEST/file              the path of the squashfs file that was copied: filecopy.py, features/swarm
    */DIGEST/boot                   boot ID and checksums; renamed ``checked`` when the files are on the disk: crash.py
    refs/NAME+ARCH                  the last known digest of a name: store.Name
    leases/DIGEST.NODE              the file's time is the last start of the image on NODE; network file systems only
    swarms/DIGEST                   on srun's host: the nodes of a step that all have the image DIGEST. If DIGEST is the
                                    identity of a file (inode, times): the digest of its content. features/swarm
    blobs/DIGEST                    a complete compressed blob, for other nodes: features/swarm
    users/HASH                      a symbolic link to the record of a container over one of the images
    format                          a symbolic link to a number: format.py
    tmp/KIND-DIGEST                 a layer or an image in the making; the process that makes it holds flock(2) on it

Digests in paths are hex digits only. Container starts import this module.
"""

from __future__ import annotations

import os

from enroot_py.base import digests

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

LAYERS, IMAGES, TMP, FORMAT = "layers", "images", "tmp", "format"
FORMATS = ("1",)  # readable formats: format.py
REFS, USERS, LEASES, SWARMS, BLOBS = "refs", "users", "leases", "swarms", "blobs"
# In a layer, and in the head of an image.
TREE, INDEX, SUMS = "fs", "index", "sums"
# In an image.
MANIFEST, CONFIG, HEAD, STACK, SQUASHFS, SUM, FILE = "manifest", "config", "head", "stack", "image.sqsh", "sum", "file"
SIGNATURES = "signatures"
# In a layer, and in an image.
BOOT, CHECKED = "boot", "checked"

MAX_DIRECTORY_DEPTH = 256  # real images stay below 30
_SINCE = ".since"  # see leases_since()
_SAFE = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
_MAX_NAME_CHARS = 200


# ---------------------------------------------------------------------------
# Layers and images


def is_readable(root: str) -> bool:
    """Return whether this version can read a store. If not, format.check() raises the error that says why.

    Stores of versions before 1.0 have no format.
    """
    try:
        return os.readlink(f"{root}/{FORMAT}") in FORMATS
    except FileNotFoundError:
        return True
    except OSError:
        return False  # penroot writes a symbolic link, so another program wrote this file


def layer(root: str, diff_id: str) -> str:
    """Return the directory of a layer. Raises ImageError for an invalid digest."""
    return f"{root}/{LAYERS}/{digests.encoded(diff_id)}"


def image(root: str, digest: str) -> str:
    """Return the directory of an image. Raises ImageError for an invalid digest."""
    return f"{root}/{IMAGES}/{digests.encoded(digest)}"


def signatures(image: str, repository: str) -> str:
    """Return the file with the signatures that verified an image for a repository."""
    return f"{image}/{SIGNATURES}/{_hash(repository.encode())}"


def swarm(root: str, digest: str) -> str:
    """Return the file in which srun's host records the nodes of an image. Raises ImageError for an invalid digest."""
    return f"{root}/{SWARMS}/{digests.encoded(digest)}"


def blobs(root: str) -> str:
    """Return the directory of the compressed blobs for other nodes."""
    return f"{root}/{BLOBS}"


def all_of(root: str, kind: str) -> list[str]:
    """Return the paths of all LAYERS, IMAGES or USERS."""
    try:
        names = sorted(os.listdir(f"{root}/{kind}"))
    except FileNotFoundError:
        return []
    return [f"{root}/{kind}/{name}" for name in names if len(name) == 64]  # skip files such as .nfs0000…


def digest_of(directory: str) -> str:
    """Return the digest of the layer or image in a directory."""
    return digests.of_encoded(os.path.basename(directory))


def root_of(directory: str) -> str:
    """Return the root of the store that holds a layer or an image."""
    return os.path.dirname(os.path.dirname(directory))


def name_of(directory: str) -> str:
    """Return KIND/NAME of a layer or an image, for messages."""
    return directory.removeprefix(root_of(directory) + "/")


def making(directory: str) -> str:
    """Return the temporary directory in which a layer or an image is made."""
    return f"{root_of(directory)}/{TMP}/{name_of(directory).replace('/', '-')}"


def making_alone(directory: str) -> str:
    """Return another temporary directory, for use if the process that fills making(directory) makes no progress."""
    return f"{making(directory)}.{os.getpid()}-{os.urandom(4).hex()}"


def trash(directory: str) -> str:
    """Return the path of a layer or an image that is being deleted."""
    return f"{root_of(directory)}/{TMP}/trash-{name_of(directory).replace('/', '-')}"


# ---------------------------------------------------------------------------
# The trees of an image


def stack(digest: str, diff_ids: Iterable[str]) -> bytes:
    """Return the content of an image's file ``stack``: a line for the head, then one for each layer from the top."""
    lines = [f"{IMAGES}/{digests.encoded(digest)}/{HEAD}/{TREE}"]
    lines += [f"{LAYERS}/{digests.encoded(diff_id)}/{TREE}" for diff_id in diff_ids]
    return "".join(f"{line}\n" for line in lines).encode()


def lowerdirs(image: str) -> tuple[str, ...]:
    """Return the lower directories of an image, or () if its file ``stack`` is damaged. Raises OSError."""
    with open(f"{image}/{STACK}", "rb") as f:
        lines = os.fsdecode(f.read()).splitlines()
    root = root_of(image)
    return tuple(f"{root}/{line}" for line in lines) if all(map(_is_lower, lines)) else ()


def _is_lower(line: str) -> bool:
    kind, _, rest = line.partition("/")
    name, _, tree = rest.partition("/")
    return (kind, tree) in ((LAYERS, TREE), (IMAGES, f"{HEAD}/{TREE}")) and digests.is_digest(digests.of_encoded(name))


def layers_of(image: str) -> list[str]:
    """Return the directories of an image's layers, or [] if it is one squashfs file. Raises OSError."""
    if os.path.exists(f"{image}/{SQUASHFS}"):
        return []
    directories = map(os.path.dirname, lowerdirs(image))
    return [path for path in directories if os.path.basename(os.path.dirname(path)) == LAYERS]


def image_over(lowerdirs: Sequence[str]) -> str:
    """Return the directory of the image that consists of ``lowerdirs``."""
    return os.path.dirname(os.path.dirname(lowerdirs[0]))


def images_in(options: str) -> Iterator[str]:
    """Yield the digests of the images in the mount options of an overlay."""
    marker = f"/{IMAGES}/"
    at = options.find(marker)
    while at >= 0:
        name, _, tree = options[at + len(marker) :].partition("/")
        if len(name) == 64 and tree.startswith(f"{HEAD}/{TREE}"):
            yield digests.of_encoded(name)
        at = options.find(marker, at + 1)  # the store's own path may contain this text


def image_in(path: str) -> str:
    """Return the digest of the stored image whose squashfs file is at ``path``, or ""."""
    directory, _, name = path.rpartition("/")
    is_image = name == SQUASHFS and os.path.basename(os.path.dirname(directory)) == IMAGES
    return digest_of(directory) if is_image else ""


# ---------------------------------------------------------------------------
# Names, users and leases


def ref(root: str, text: str) -> str:
    """Return the file with the last known digest of a name."""
    return f"{root}/{REFS}/{_file_name(text)}"


def refs(root: str) -> list[str]:
    """Return the files of all names, without temporary files (which earlier versions named NAME~)."""
    try:
        names = sorted(os.listdir(f"{root}/{REFS}"))
        return [f"{root}/{REFS}/{name}" for name in names if not name.startswith(".") and not name.endswith("~")]
    except FileNotFoundError:
        return []


def _file_name(text: str) -> str:
    escaped = "".join(c if c in _SAFE else f"%{ord(c):02X}" for c in text)
    return escaped if len(escaped) <= _MAX_NAME_CHARS else _hash(text.encode())


def user(root: str, record: str) -> str:
    """Return the link to the record of a container."""
    return f"{root}/{USERS}/{_hash(os.fsencode(record))}"


def _hash(data: bytes) -> str:
    return digests.encoded(digests.of(data))


def lease(image: str, node: str) -> str:
    """Return the file whose time is the last start of an image on a node."""
    return f"{root_of(image)}/{LEASES}/{os.path.basename(image)}.{node}"


def leases(root: str) -> list[tuple[str, str, str]]:
    """Return all leases as (path, digest of the image, node)."""
    try:
        files = os.listdir(f"{root}/{LEASES}")
    except FileNotFoundError:
        return []
    parts = [(name, digests.of_encoded(name.partition(".")[0]), name.partition(".")[2]) for name in files]
    return [(f"{root}/{LEASES}/{name}", digest, node) for name, digest, node in parts if digests.is_digest(digest)]


def leases_since(root: str) -> str:
    """Return the file whose time is when the store got its directory for leases.

    A store that was made with this directory has no such file.
    """
    return f"{root}/{LEASES}/{_SINCE}"
