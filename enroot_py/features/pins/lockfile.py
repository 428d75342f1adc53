"""Lock files: the digest of each tag, shared by a team.

Each image has its own line, so that git can merge two versions of a file, and an error can name the line. Example:

    version 1
    nvcr.io#nvidia/pytorch:24.05-py3 sha256:…

`penroot lock` adds the digest to a line that has none. A line that begins with # is a comment. Keep the import of this
module fast: each step with a lock file waits for it.
"""

from __future__ import annotations

from enroot_py.base.digests import Pin, is_digest
from enroot_py.base.errors import ConfigError, ImageReferenceError
from enroot_py.base.frozen import Frozen
from enroot_py.config import files
from enroot_py.registry import reference
from enroot_py.registry.reference import Reference

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

HEADER = "version 1"
_OWNER_HINT = (
    "in a world-writable directory, you or root must own the file, and nobody else may write to it: chmod go-w"
)
_FORMAT_HINT = "write each line as IMAGE sha256:DIGEST, or create the file with penroot lock"
_MAX_FILE_BYTES = 48 << 10  # a job carries the file in a variable, which has at most 128 KiB


class LockedImage(Frozen):
    """One line of a file: ``text`` is the reference as written. ``digest`` is "" if the line has none."""

    line: int
    text: str
    image: Reference
    digest: str


class LockFile(Frozen):
    """The images of a file, in order. ``path`` is for messages."""

    path: str
    images: tuple[LockedImage, ...]

    def digest(self, name: str) -> str:
        """Return the digest of the image with the canonical ``name``, or ""."""
        return next((locked.digest for locked in self.images if str(locked.image) == name), "")

    def pin(self, image: Reference) -> Pin | None:
        """Return the file's digest for a tag, or raise ConfigError. If ``image`` has a digest already, return None."""
        if image.digest:
            return None
        # Compare canonical names, which omit the user of USER@REGISTRY.
        locked = next((locked for locked in self.images if str(locked.image) == str(image)), None)
        if locked is None:
            hint = f"add it: penroot lock {self.path} {_as_typed(image)}"
            raise ConfigError(f"{self.path}: {image} is not in this lock file", hint=hint)
        where = f"{self.path}:{locked.line}"
        if not locked.digest:
            raise ConfigError(f"{where}: {locked.text} has no digest yet", hint=f"penroot lock {self.path}")
        hint = f"lock the current digest: penroot lock {self.path} {_as_typed(image)}"
        return Pin(locked.digest, f"{where} locks it to", hint)


def _as_typed(image: Reference) -> str:
    """Return a reference as typed on a command line."""
    if image.registry == reference.DOCKER_HUB and not image.user:
        return f"{image.repository.removeprefix('library/')}:{image.tag}"
    return image.uri().removeprefix(reference.DOCKER)


def read(path: str) -> LockFile:
    """Read the lock file at the absolute ``path``. Raises ConfigError."""
    return parse(path, content(path))


def content(path: str) -> str:
    """Return the text of a lock file. Raises ConfigError, also if another user could have written it."""
    try:
        data = files.named(path)
    except OSError as e:
        raise ConfigError(f"the lock file {path} cannot be used: {e.strerror}", hint=_OWNER_HINT) from e
    if data is None:
        path = reference.without_password(path)  # if the user forgot FILE, ``path`` is an IMAGE
        raise ConfigError(f"there is no lock file {path}", hint=f"create it: penroot lock {path} IMAGE...")
    if len(data) > _MAX_FILE_BYTES:
        hint = "a job carries the whole file: use a lock file with the job's images only"
        raise ConfigError(f"{path} is larger than {_MAX_FILE_BYTES >> 10} KiB, the limit of a lock file", hint=hint)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        line = data.count(b"\n", 0, e.start) + 1
        raise ConfigError(f"{path}:{line}: this is not UTF-8", hint=_FORMAT_HINT) from e


def parse(path: str, text: str) -> LockFile:
    """Parse the text of a lock file. Raises ConfigError, which names the line."""
    lines = [(number, line.split()) for number, line in enumerate(text.split("\n"), 1)]
    lines = [(number, words) for number, words in lines if words and not words[0].startswith("#")]
    number, header = lines[0] if lines else (1, [])
    if header[:1] != ["version"]:
        hint = f"the first line must be: {HEADER}"
        raise ConfigError(f"{path}:{number}: this is no lock file of penroot", hint=hint)
    if header != HEADER.split():
        version = " ".join(header)
        hint = f"use a newer penroot, or move the file away and recreate it: penroot lock {path} IMAGE..."
        raise ConfigError(f"{path}:{number}: unknown {version!r}", hint=hint)
    return LockFile(path, _unique(path, [parse_line(path, number, words) for number, words in lines[1:]]))


def parse_line(path: str, number: int, words: list[str]) -> LockedImage:
    """Parse the line of an image. Raises ConfigError."""
    where = f"{path}:{number}"
    if len(words) > 2:
        raise ConfigError(
            f"{where}: unexpected words after IMAGE DIGEST: {' '.join(words[2:])[:80]}", hint=_FORMAT_HINT
        )
    digest = words[1] if len(words) == 2 else ""
    if digest and not is_digest(digest):
        raise ConfigError(f"{where}: {digest[:80]} is no digest", hint=_FORMAT_HINT)
    try:
        return LockedImage(number, words[0], parse_tag(words[0]), digest)
    except ImageReferenceError as e:
        raise ConfigError(f"{where}: {e}", hint=e.hint) from e


def parse_tag(text: str) -> Reference:
    """Parse a tag that can be locked. Raises ImageReferenceError."""
    is_path = text.startswith(("/", "./", "../")) or text.endswith(".sqsh")
    image = None if is_path else reference.parse(text)
    if not isinstance(image, Reference):
        raise ImageReferenceError(
            f"{text} is no image of a registry", hint="name an image of a registry: other images have no tags"
        )
    if image.digest:
        raise ImageReferenceError(
            f"{text} already has a digest", hint="remove it: an image with a digest needs no lock"
        )
    return image


def _unique(path: str, images: Iterable[LockedImage]) -> tuple[LockedImage, ...]:
    """Return the images. Raises ConfigError for a duplicate."""
    known: dict[str, LockedImage] = {}
    for image in images:
        first = known.setdefault(str(image.image), image)
        if first is not image:
            message = f"{path}:{image.line}: {image.text} is the same image as in line {first.line}"
            raise ConfigError(message, hint="remove one of the lines")
    return tuple(known.values())
