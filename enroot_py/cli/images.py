"""What can be done with an image that is not in a container: import it to a file, ask for its digest, look at it."""

from __future__ import annotations

import json
import os
from typing import Any

from enroot_py.base import digests, log, paths
from enroot_py.base.errors import ImageError
from enroot_py.base.fds import Fd
from enroot_py.config.settings import Settings
from enroot_py.registry.reference import is_uri, of_command_line
from enroot_py.registry.sources import open_source
from enroot_py.runtime import etc
from enroot_py.store import containers, layout, mksquashfs, pull, unsquashfs
from enroot_py.store.imageconfig import ImageConfig


def import_(uri: str, output: str | None, settings: Settings, arch: str | None = None) -> None:
    """Pull an image and write it to a squashfs file. Raises PenrootError."""
    reference = of_command_line(uri, os.getcwd())
    path = output or reference.filename()
    mksquashfs.check_writing(path, settings)  # before minutes of work, not after
    image = pull.pull(reference, settings, arch=arch)
    size = mksquashfs.write(image.lowerdirs, path, settings, image=image.file)
    name = "stdout" if path == mksquashfs.STDOUT else os.path.abspath(path)
    log.info(f"{name}: {log.size(size)}, {image.digest}")


def digest(uri: str, settings: Settings, arch: str | None = None) -> str:
    """The digest of an image's manifest for an architecture, as its registry has it now. Raises PenrootError."""
    if uri.endswith((".sqsh", ".squashfs")) and not is_uri(uri):
        raise ImageError(f"{uri} is a file, and no registry has its digest", hint=f"penroot inspect {uri}")
    return open_source(of_command_line(uri), settings).manifest(arch).digest


def inspect(image: str, settings: Settings, arch: str | None = None) -> dict[str, Any]:
    """What is known of an image that a URI, a container or a squashfs file names. Raises PenrootError.

    Of a URI without unpacking it; of the others what their files in /etc say.
    """
    if is_uri(image):
        reference = of_command_line(image)
        source = open_source(reference, settings)
        manifest = source.manifest(arch)
        config = source.config(manifest)
        ImageConfig(config, reference).diff_ids(manifest)
        return _described(str(reference), manifest.data, config, manifest.named)
    root = containers.find(image, settings)
    if root.lowerdirs:
        stored = layout.image_over(root.lowerdirs)
        try:
            with open(f"{stored}/{layout.MANIFEST}", "rb") as f, open(f"{stored}/{layout.CONFIG}", "rb") as g:
                return _described(image, f.read(), g.read())
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as e:
            message = f"the stored image of {image} is damaged: {stored}"
            raise ImageError(message, hint="penroot cache verify --repair") from e
    if root.image:
        texts = {name: unsquashfs.read(root.image, f"etc/{name}") for name in ("rc", "rc.local", "environment")}
    else:
        texts = {name: _text(root.directory, f"/etc/{name}") for name in ("rc", "rc.local", "environment")}
    run = etc.read_rc(texts["rc"], texts["rc.local"])
    return {
        "name": image,
        "provenance": etc.provenance(texts["rc"]),
        "config": {
            "Env": [f"{key}={value}" for key, value in etc.read_environment(texts["environment"]).items()],
            "Entrypoint": list(run.entrypoint) if run else None,
            "Cmd": list(run.command) if run else None,
            "WorkingDir": run.workdir if run else None,
        },
    }


def _described(name: str, manifest: bytes, config: bytes, named: str = "") -> dict[str, Any]:
    document, its_config = json.loads(manifest), json.loads(config)
    digest = digests.of(manifest)
    layers = [
        {"digest": layer["digest"], "size": layer["size"], "diff_id": diff_id, "mediaType": layer.get("mediaType")}
        for layer, diff_id in zip(document["layers"], its_config["rootfs"]["diff_ids"], strict=True)
    ]
    return {
        "name": name,
        "digest": digest,
        **({"index": named} if named not in ("", digest) else {}),
        "platform": "/".join(str(its_config[key]) for key in ("os", "architecture", "variant") if its_config.get(key)),
        "created": its_config.get("created"),
        "size": sum(layer["size"] for layer in document["layers"]),
        "layers": layers,
        "config": its_config.get("config") or {},
    }


def _text(directory: str, path: str) -> str:
    """A file in a container's directory, whose links lead nowhere else; "" where it has none. Raises ImageError."""
    try:
        with Fd(os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as root:
            return os.fsdecode(paths.read(root, path))
    except FileNotFoundError:
        return ""
    except OSError as e:
        raise ImageError(f"cannot read {path} of the container in {directory}: {e.strerror}") from e
