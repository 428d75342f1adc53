"""Where everything of the store lies: no other module knows a path or a name of it.

Beneath its root, which only its owner can enter::

    layers/DIFF-ID/fs,index,sums    a layer's tree, what the tree cannot hold, and its checksums: index.py
    images/DIGEST/manifest,config   as the registry sent them
    images/DIGEST/head/fs,…         topmost tree: the files that make it an enroot image; index and sums beside it
    images/DIGEST/stack             lower directories, relative to the root, top first, one a line
    images/DIGEST/image.sqsh,sum    instead of head and stack, where images are one file, and its SHA-256: onefile.py
    images/DIGEST/signatures/HASH   what an image of a repository was verified by, to do so again: features/trust
    images/DIGEST/file              of the copy of a squashfs file: where that is; see unpacked.py, received.py
    */DIGEST/boot                   while it may not be on the disk yet, then ``checked``: crash.py
    refs/NAME+ARCH                  what a name meant last: store.Name
    leases/DIGEST.NODE              in a store that nodes share: its time is that of the last start there
    swarms/DIGEST                   on srun's host: the nodes of a step that all have an image (features/swarm),
                                    or the digest of a file that is known by this one
    blobs/DIGEST                    compressed, for other nodes; without names those on their way: swarm/blob_cache.py
    users/HASH                      a symbolic link to the record of a container over one of the images
    format                          a symbolic link to a number: format.py
    tmp/KIND-DIGEST                 being made, by whoever holds the flock(2) on it

A digest in a path is its hex digits. On the start path.
"""

from __future__ import annotations

import os

from enroot_py.base import digests

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

LAYERS, IMAGES, TMP, FORMAT = "layers", "images", "tmp", "format"
FORMATS = ("1",)  # which this version reads: format.py
REFS, USERS, LEASES, SWARMS, BLOBS = "refs", "users", "leases", "swarms", "blobs"
# Of a layer, and of the head of an image.
TREE, INDEX, SUMS = "fs", "index", "sums"
# Of an image.
MANIFEST, CONFIG, HEAD, STACK, SQUASHFS, SUM, FILE = "manifest", "config", "head", "stack", "image.sqsh", "sum", "file"
SIGNATURES = "signatures"
# Of both.
BOOT, CHECKED = "boot", "checked"

MAX_DEPTH = 256  # directories in one path of a tree: real images stay below 30
_SINCE = ".since"  # among the leases: since when there are any
_SAFE = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
_LONGEST = 200  # characters of a name


# ---------------------------------------------------------------------------
# Layers and images


def is_readable(root: str) -> bool:
    """Whether this version reads a store; format.check() says why not. One that has no mark is from before 1.0."""
    try:
        return os.readlink(f"{root}/{FORMAT}") in FORMATS
    except FileNotFoundError:
        return True
    except OSError:
        return False  # no link: it is not ours


def layer(root: str, diff_id: str) -> str:
    """The directory of a layer. Raises ImageError for what is no digest."""
    return f"{root}/{LAYERS}/{digests.encoded(diff_id)}"


def image(root: str, digest: str) -> str:
    """The directory of an image. Raises ImageError for what is no digest."""
    return f"{root}/{IMAGES}/{digests.encoded(digest)}"


def signatures(image: str, repository: str) -> str:
    """The file with signatures of an image as one of a repository."""
    return f"{image}/{SIGNATURES}/{_hash(repository.encode())}"


def swarm(root: str, digest: str) -> str:
    """The file of what srun's host remembers of an image. Raises ImageError for what is no digest."""
    return f"{root}/{SWARMS}/{digests.encoded(digest)}"


def blobs(root: str) -> str:
    """Where compressed blobs are kept for other nodes."""
    return f"{root}/{BLOBS}"


def all_of(root: str, kind: str) -> list[str]:
    """All LAYERS, IMAGES or USERS."""
    try:
        names = sorted(os.listdir(f"{root}/{kind}"))
    except FileNotFoundError:
        return []
    return [f"{root}/{kind}/{name}" for name in names if len(name) == 64]  # not .nfs0000…


def digest_of(directory: str) -> str:
    """The digest of the layer or image in a directory."""
    return digests.of_encoded(os.path.basename(directory))


def root_of(directory: str) -> str:
    """The root of the store that has a layer or an image."""
    return os.path.dirname(os.path.dirname(directory))


def name_of(directory: str) -> str:
    """What people are told of a layer or an image: KIND/NAME."""
    return directory.removeprefix(root_of(directory) + "/")


def making(directory: str) -> str:
    """Where a layer or an image is made."""
    return f"{root_of(directory)}/{TMP}/{name_of(directory).replace('/', '-')}"


def making_alone(directory: str) -> str:
    """Where a process makes a layer or an image when the maker at making() does not go on."""
    return f"{making(directory)}.{os.getpid()}-{os.urandom(4).hex()}"


def trash(directory: str) -> str:
    """Where a layer or an image lies until it is deleted."""
    return f"{root_of(directory)}/{TMP}/trash-{name_of(directory).replace('/', '-')}"


# ---------------------------------------------------------------------------
# The trees of an image


def stack(digest: str, diff_ids: Iterable[str]) -> bytes:
    """The record of an image's lower directories: its head, and its layers from the top."""
    lines = [f"{IMAGES}/{digests.encoded(digest)}/{HEAD}/{TREE}"]
    lines += [f"{LAYERS}/{digests.encoded(diff_id)}/{TREE}" for diff_id in diff_ids]
    return "".join(f"{line}\n" for line in lines).encode()


def lowerdirs(image: str) -> tuple[str, ...]:
    """The lower directories of an image; none where the record of them is damaged. Raises OSError."""
    with open(f"{image}/{STACK}", "rb") as f:
        lines = os.fsdecode(f.read()).splitlines()
    root = root_of(image)
    return tuple(f"{root}/{line}" for line in lines) if all(map(_is_lower, lines)) else ()


def _is_lower(line: str) -> bool:
    kind, _, rest = line.partition("/")
    name, _, tree = rest.partition("/")
    return (kind, tree) in ((LAYERS, TREE), (IMAGES, f"{HEAD}/{TREE}")) and digests.is_digest(digests.of_encoded(name))


def layers_of(image: str) -> list[str]:
    """The directories of an image's layers; none where it is one squashfs file. Raises OSError."""
    if os.path.exists(f"{image}/{SQUASHFS}"):
        return []
    directories = map(os.path.dirname, lowerdirs(image))
    return [path for path in directories if os.path.basename(os.path.dirname(path)) == LAYERS]


def image_over(lowerdirs: Sequence[str]) -> str:
    """The directory of the image whose root filesystem an overlay of ``lowerdirs`` is."""
    return os.path.dirname(os.path.dirname(lowerdirs[0]))


def images_in(options: str) -> Iterator[str]:
    """The digests of images that the options of an overlay name."""
    above = f"/{IMAGES}/"
    at = options.find(above)
    while at >= 0:
        name, _, tree = options[at + len(above) :].partition("/")
        if len(name) == 64 and tree.startswith(f"{HEAD}/{TREE}"):
            yield digests.of_encoded(name)
        at = options.find(above, at + 1)  # the store may lie in a directory of this name


def image_in(path: str) -> str:
    """The digest of the image that is the squashfs file at ``path``; "" of any other path."""
    directory, _, name = path.rpartition("/")
    is_image = name == SQUASHFS and os.path.basename(os.path.dirname(directory)) == IMAGES
    return digest_of(directory) if is_image else ""


# ---------------------------------------------------------------------------
# Names, users and leases


def ref(root: str, text: str) -> str:
    """The file that says what a name meant last."""
    return f"{root}/{REFS}/{_file_name(text)}"


def refs(root: str) -> list[str]:
    """The files of all names, without those that are being written; earlier versions named such NAME~."""
    try:
        names = sorted(os.listdir(f"{root}/{REFS}"))
        return [f"{root}/{REFS}/{name}" for name in names if not name.startswith(".") and not name.endswith("~")]
    except FileNotFoundError:
        return []


def _file_name(text: str) -> str:
    escaped = "".join(c if c in _SAFE else f"%{ord(c):02X}" for c in text)
    return escaped if len(escaped) <= _LONGEST else _hash(text.encode())


def user(root: str, record: str) -> str:
    """The link to the record of a container."""
    return f"{root}/{USERS}/{_hash(os.fsencode(record))}"


def _hash(data: bytes) -> str:
    return digests.encoded(digests.of(data))


def lease(image: str, node: str) -> str:
    """The file whose time is that of the last start of an image on a node."""
    return f"{root_of(image)}/{LEASES}/{os.path.basename(image)}.{node}"


def leases(root: str) -> list[tuple[str, str, str]]:
    """All leases: (path, digest of the image, node)."""
    try:
        files = os.listdir(f"{root}/{LEASES}")
    except FileNotFoundError:
        return []
    parts = [(name, digests.of_encoded(name.partition(".")[0]), name.partition(".")[2]) for name in files]
    return [(f"{root}/{LEASES}/{name}", digest, node) for name, digest, node in parts if digests.is_digest(digest)]


def leases_since(root: str) -> str:
    """The file that was made with the directory of leases where the store is older than that."""
    return f"{root}/{LEASES}/{_SINCE}"
