"""``penroot import``, ``digest`` and ``inspect``."""

from __future__ import annotations

import json
import os
import time
from typing import Any

from enroot_py.base import digests, log, paths, proc, turns
from enroot_py.base.errors import ImageError, Unreachable, UsageError
from enroot_py.base.fds import Fd
from enroot_py.base.turns import Turn
from enroot_py.config.settings import Settings
from enroot_py.registry.reference import LocalImage, Reference, is_uri, of_command_line
from enroot_py.registry.sources import open_source
from enroot_py.runtime import etc
from enroot_py.store import containers, imported, layout, mksquashfs, pull, unsquashfs
from enroot_py.store.imageconfig import ImageConfig


def import_(uri: str, output: str | None, settings: Settings, arch: str | None = None, *, ensure: bool = False) -> None:
    """Pull an image and write it to a squashfs file. Raises PenrootError.

    If several processes import to one file, one process does the work and the others wait. With ``ensure``, keep a file
    that already holds the image, and replace any other file.
    """
    reference = of_command_line(uri, os.getcwd())
    path = output or reference.filename()
    if path == mksquashfs.STDOUT:
        if ensure:
            raise UsageError("--ensure needs a file, not stdout", hint="name the file: --output FILE")
        mksquashfs.check_writing(path, settings)
        image = pull.pull(reference, settings, arch=arch)
        _report("stdout", mksquashfs.write_image(image, path, settings), image.digest)
        return
    path = mksquashfs.destination(path)
    if ensure:
        settings = settings.replace("--ensure", force_override=True)
    turns.sweep(os.path.dirname(path))
    state = _state(path)
    # A file newer than this process probably comes from another import that started at the same time.
    must_verify = ensure or state is not None and state[1] >= _start_time()
    while True:
        if must_verify and _is_up_to_date(path, reference, settings, arch, reports=ensure):
            return
        mksquashfs.check_writing(path, settings)  # fail now, not after minutes of work
        with Turn(path):
            if (new_state := _state(path)) != state:
                state, must_verify = new_state, True  # release the turn, because the check takes long
                continue
            image = pull.pull(reference, settings, arch=arch)
            try:
                _report(path, mksquashfs.write_image(image, path, settings), image.digest)
            except ImageError:
                # While this process was suspended, another process may have given up waiting and imported the image.
                if _state(path) == state or imported.check(path) != (image.digest, ""):
                    raise
                log.info(f"{path}: imported by another process, {image.digest}")
            return


def _report(name: str, size: int, digest: str) -> None:
    log.info(f"{name}: {log.size(size)}, {digest}")


def _state(path: str) -> tuple[int, float] | None:
    """Return inode and ctime of a file, or None if it does not exist."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_ino, status.st_ctime


def _start_time() -> float:
    """Return the start time of this process in seconds since the epoch."""
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - proc.Stat(os.getpid()).started / os.sysconf("SC_CLK_TCK")
    return time.time() - age


def _is_up_to_date(
    path: str, reference: Reference | LocalImage, settings: Settings, arch: str | None, *, reports: bool
) -> bool:
    """Return whether a file is undamaged and, if the registry answers, holds the image of ``reference``.

    Raises PenrootError.
    """
    digest, reason = imported.check(path)
    if not reason:
        try:
            expected = pull.digest(reference, settings, arch)
        except Unreachable as e:
            log.warn(f"{e}; keeping {path}")
            return True
        if digest == expected:
            log.info(f"{path}: {'up to date' if reports else 'imported by another process'}, {expected}")
            return True
        reason = f"is {digest}, not {expected}"
    if reports:
        log.info(f"{path} {reason}: importing {reference}")
    return False


def digest(uri: str, settings: Settings, arch: str | None = None) -> str:
    """Return the manifest digest of a reference in its registry, for an architecture. Raises PenrootError."""
    if uri.endswith((".sqsh", ".squashfs")) and not is_uri(uri):
        raise ImageError(f"{uri} is a file, not a reference to a registry", hint=f"penroot inspect {uri}")
    return open_source(of_command_line(uri), settings).manifest(arch).digest


def inspect(image: str, settings: Settings, arch: str | None = None) -> dict[str, Any]:
    """Describe the image of a URI, a container or a squashfs file. Raises PenrootError.

    The image of a URI is not unpacked. Squashfs files, and containers that are plain directories, are described from
    the files in their /etc.
    """
    if containers.is_reference(image, settings):
        reference = of_command_line(image)
        source = open_source(reference, settings)
        manifest = source.manifest(arch)
        config = source.config(manifest)
        ImageConfig(config, reference).diff_ids(manifest)
        return _described(str(reference), manifest.data, config, manifest.named)
    root = containers.find(image, settings)
    if root.lowerdirs:
        return stored(layout.image_over(root.lowerdirs), image)
    if root.image:
        texts = {name: unsquashfs.read(root.image, f"etc/{name}") for name in ("rc", "rc.local", "environment")}
    else:
        texts = {name: _text(root.directory, f"/etc/{name}") for name in ("rc", "rc.local", "environment")}
    run = etc.read_rc(texts["rc"], texts["rc.local"])
    if root.image:
        digest = layout.image_in(root.image) or imported.digest_of(root.image)
    else:
        digest = etc.image_digest(texts["rc.local"])
    return {
        "name": image,
        **({"digest": digest} if digest else {}),
        "provenance": etc.provenance(texts["rc"]),
        "config": {
            "Env": [f"{key}={value}" for key, value in etc.read_environment(texts["environment"]).items()],
            "Entrypoint": list(run.entrypoint) if run else None,
            "Cmd": list(run.command) if run else None,
            "WorkingDir": run.workdir if run else None,
        },
    }


def stored(directory: str, name: str) -> dict[str, Any]:
    """Describe an image in the store. Raises ImageError."""
    try:
        with open(f"{directory}/{layout.MANIFEST}", "rb") as f, open(f"{directory}/{layout.CONFIG}", "rb") as g:
            return _described(name, f.read(), g.read())
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as e:
        message = f"the stored image of {name} is damaged: {directory}"
        raise ImageError(message, hint="penroot cache verify --repair") from e


def _described(name: str, manifest: bytes, config: bytes, named: str = "") -> dict[str, Any]:
    document, image = json.loads(manifest), json.loads(config)
    digest = digests.of(manifest)
    layers = [
        {"digest": layer["digest"], "size": layer["size"], "diff_id": diff_id, "mediaType": layer.get("mediaType")}
        for layer, diff_id in zip(document["layers"], image["rootfs"]["diff_ids"], strict=True)
    ]
    return {
        "name": name,
        "digest": digest,
        **({"index": named} if named not in ("", digest) else {}),
        "platform": "/".join(str(image[key]) for key in ("os", "architecture", "variant") if image.get(key)),
        "created": image.get("created"),
        "size": sum(layer["size"] for layer in document["layers"]),
        "layers": layers,
        "config": image.get("config") or {},
    }


def _text(directory: str, path: str) -> str:
    """Return the text of a file in a container's directory, or "" if it is missing. Raises ImageError.

    Links cannot lead out of the directory.
    """
    try:
        with Fd(os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as root:
            return os.fsdecode(paths.read(root, path))
    except FileNotFoundError:
        return ""
    except OSError as e:
        raise ImageError(f"cannot read {path} of the container in {directory}: {e.strerror}") from e
