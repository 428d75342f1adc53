"""Lock files: the digest of each tag, shared by a team.

Lines of text, so that two branches of a repository merge and a slip has a line:

    version 1
    nvcr.io#nvidia/pytorch:24.05-py3 sha256:…

A line without a digest waits for `penroot lock`; what begins with # is a comment. On the path of steps with a lock
file.
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
_OWN = "in a world-writable directory, you or root must own the file, and nobody else may write to it: chmod go-w"
_FORM = "a line is IMAGE sha256:DIGEST, and a lock file is made by penroot lock"
_MAX_FILE_BYTES = 48 << 10  # a variable of a job carries the file, and has at most 128 KiB


class LockedImage(Frozen):
    """One line: a reference as written, and its digest, or ""."""

    line: int
    text: str
    image: Reference
    digest: str


class LockFile(Frozen):
    """The images of a file, in order. ``path`` is for messages."""

    path: str
    images: tuple[LockedImage, ...]

    def digest(self, name: str) -> str:
        """Return the digest of a canonical name, or ""."""
        return next((locked.digest for locked in self.images if str(locked.image) == name), "")

    def pin(self, image: Reference) -> Pin | None:
        """Return the digest of an image, or None if it has its own. Raises ConfigError if it is not in the file."""
        if image.digest:
            return None
        # Whoever asks for it: the name that a Reference has is without the user.
        locked = next((locked for locked in self.images if str(locked.image) == str(image)), None)
        if locked is None:
            hint = f"add it: penroot lock {self.path} {_word(image)}"
            raise ConfigError(f"{self.path}: {image} is not in this lock file", hint=hint)
        where = f"{self.path}:{locked.line}"
        if not locked.digest:
            raise ConfigError(f"{where}: {locked.text} has no digest yet", hint=f"penroot lock {self.path}")
        hint = f"lock the current digest: penroot lock {self.path} {_word(image)}"
        return Pin(locked.digest, f"{where} locks it to", hint)


def _word(image: Reference) -> str:
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
        raise ConfigError(f"the lock file {path} cannot be used: {e.strerror}", hint=_OWN) from e
    if data is None:
        path = reference.without_password(path)  # the FILE may have been forgotten before an image
        raise ConfigError(f"there is no lock file {path}", hint=f"create it: penroot lock {path} IMAGE...")
    if len(data) > _MAX_FILE_BYTES:
        hint = "a job carries the whole file: use a lock file with the job's images only"
        raise ConfigError(
            f"{path} is larger than the {_MAX_FILE_BYTES >> 10} KiB that a lock file has at most", hint=hint
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        line = data.count(b"\n", 0, e.start) + 1
        raise ConfigError(f"{path}:{line}: this is not UTF-8", hint=_FORM) from e


def parse(path: str, text: str) -> LockFile:
    """Parse the text. Raises ConfigError with the line."""
    lines = [(number, line.split()) for number, line in enumerate(text.split("\n"), 1)]
    lines = [(number, words) for number, words in lines if words and not words[0].startswith("#")]
    number, header = lines[0] if lines else (1, [])
    if header[:1] != ["version"]:
        hint = f"the first line must be: {HEADER}"
        raise ConfigError(f"{path}:{number}: this is no lock file of penroot", hint=hint)
    if header != HEADER.split():
        said = " ".join(header)
        hint = f"use a newer penroot, or move the file away and recreate it: penroot lock {path} IMAGE..."
        raise ConfigError(f"{path}:{number}: unknown {said!r}", hint=hint)
    return LockFile(path, _unique(path, [locked(path, number, words) for number, words in lines[1:]]))


def locked(path: str, number: int, words: list[str]) -> LockedImage:
    """Parse the line of an image. Raises ConfigError."""
    where = f"{path}:{number}"
    if len(words) > 2:
        raise ConfigError(f"{where}: unexpected words after IMAGE DIGEST: {' '.join(words[2:])[:80]}", hint=_FORM)
    digest = words[1] if len(words) == 2 else ""
    if digest and not is_digest(digest):
        raise ConfigError(f"{where}: {digest[:80]} is no digest", hint=_FORM)
    try:
        return LockedImage(number, words[0], tag(words[0]), digest)
    except ImageReferenceError as e:
        raise ConfigError(f"{where}: {e}", hint=e.hint) from e


def tag(text: str) -> Reference:
    """Parse a tag that can be locked. Raises ImageReferenceError."""
    is_path = text.startswith(("/", "./", "../")) or text.endswith(".sqsh")
    image = None if is_path else reference.parse(text)
    if not isinstance(image, Reference):
        raise ImageReferenceError(
            f"{text} is no image of a registry", hint="lock an image of a registry: only those have tags"
        )
    if image.digest:
        raise ImageReferenceError(f"{text} is a digest already", hint="remove it: an image with a digest needs no lock")
    return image


def _unique(path: str, images: Iterable[LockedImage]) -> tuple[LockedImage, ...]:
    """Return the images; a duplicate raises ConfigError."""
    known: dict[str, LockedImage] = {}
    for image in images:
        first = known.setdefault(str(image.image), image)
        if first is not image:
            message = f"{path}:{image.line}: {image.text} is the image of line {first.line}"
            raise ConfigError(message, hint="remove one of the lines")
    return tuple(known.values())
