"""``penroot lock``: create, refresh and check lock files."""

from __future__ import annotations

import os

import click

from enroot_py.base import log, making, waits
from enroot_py.base.errors import ConfigError, PenrootError
from enroot_py.config import settings
from enroot_py.config.settings import Settings
from enroot_py.features.pins import lockfile
from enroot_py.features.pins.lockfile import LockFile
from enroot_py.registry.reference import Reference

_Digests = dict[str, tuple[str, str]]  # canonical name: (image as written, current digest)


def lock(file: str, images: tuple[str, ...], *, check: bool) -> None:
    """Record the current digests in a lock file, or check that no tag has moved. Raises PenrootError."""
    path = os.path.realpath(file)  # replace the target of a symbolic link, not the link
    locked = _read(path, makes=bool(images) and not check)[1]
    requested = {str(lockfile.parse_tag(text)): text for text in images}
    if check:
        for text in images:
            locked.pin(lockfile.parse_tag(text))
        _check(locked, _resolve(locked, requested))
        return
    current = _resolve(locked, requested)
    try:
        with waits.changing(path):
            text, locked = _read(path, makes=True)  # another process may have changed the file meanwhile
            _write(path, text, _changed(text, locked, current))
    except OSError as e:
        raise ConfigError(f"cannot write {path}: {e.strerror}", hint="check the permissions of its directory") from e
    for name, (image, digest) in current.items():
        old = locked.digest(name)
        if old != digest:
            click.echo(f"{image} {digest}" + (f", was {old}" if old else ""))


def _read(path: str, *, makes: bool) -> tuple[str, LockFile]:
    """Return text and images of a lock file. With ``makes``, a missing file has only the header. Raises ConfigError."""
    text = lockfile.content(path) if os.path.lexists(path) or not makes else lockfile.HEADER + "\n"
    return text, lockfile.parse(path, text)


def _resolve(locked: LockFile, requested: dict[str, str]) -> _Digests:
    """Look up the current digests of the ``requested`` images and of images in the file that have no digest yet.

    If no image is requested, look up all images in the file. Raises PenrootError.
    """
    options = settings.load()
    texts = {
        str(image.image): image.text
        for image in locked.images
        if not requested or not image.digest or str(image.image) in requested
    }
    return {name: (text, _digest(lockfile.parse_tag(text), options)) for name, text in {**requested, **texts}.items()}


def _digest(image: Reference, options: Settings) -> str:
    """Return the digest of a tag's index. If the tag has no index, return its manifest's. Raises PenrootError."""
    from enroot_py.registry.sources import open_source

    source = open_source(image, options)
    return source.digest() or source.manifest().named


def _changed(text: str, locked: LockFile, current: _Digests) -> str:
    """Return the text with the new digests. Comments and the order stay unchanged."""
    lines = text.removesuffix("\n").split("\n")
    rest = dict(current)
    for image in locked.images:
        if now := rest.pop(str(image.image), None):
            lines[image.line - 1] = f"{image.text} {now[1]}"
    return "\n".join((*lines, *map(" ".join, rest.values()))) + "\n"


def _write(path: str, before: str, text: str) -> None:
    """Replace the content of a file atomically. Raises ConfigError, OSError."""
    lockfile.parse(path, text)
    exists = os.path.exists(path)
    if text == before and exists:
        log.info(f"{path} is up to date")
        return
    with making.File(path) as file:
        if exists:
            os.fchmod(file.fd, os.stat(path).st_mode & 0o777)
        file.write(text.encode())
        file.publish(replace=True)


def _check(locked: LockFile, current: _Digests) -> None:
    """Print the tags that have moved or have no digest in the file. Raises PenrootError if there are any."""
    moved = [(text, digest, old) for name, (text, digest) in current.items() if (old := locked.digest(name)) != digest]
    for text, digest, old in moved:
        click.echo(f"{text} is {digest}, " + (f"but locked to {old}" if old else "but has no digest in the file"))
    if moved:
        what = f"{len(moved)} of {log.many(len(current), 'tag')} moved or not locked"
        raise PenrootError(f"{locked.path}: {what}", hint=f"lock the current digests: penroot lock {locked.path}")
    log.info(f"{locked.path}: no tag has moved")
