"""Pull and write images in a child of the launcher. Only such a child loads this module, because loading takes long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from enroot_py.cli import images
from enroot_py.config.settings import Settings
from enroot_py.registry.reference import of_command_line
from enroot_py.store import mksquashfs
from enroot_py.store.pull import pull as pull_image


def pull(settings: Settings, uri: str, arch: str | None) -> dict[str, Any]:
    """Pull an image and return the fields of api/container.py's Image. Raises PenrootError."""
    reference = of_command_line(uri)
    image = pull_image(reference, settings, arch=arch)
    described = images.stored(image.path, str(reference))
    return {"reference": str(reference), **{name: described[name] for name in ("digest", "config", "layers", "size")}}


def export(
    settings: Settings, directories: Sequence[str], image: str, output: str, *, overwrite: bool
) -> dict[str, Any]:
    """Write a root file system to a squashfs image. Raises ImageError."""
    settings = settings.replace("overwrite", force_override=overwrite)
    size = mksquashfs.write(directories, output, settings, image=image, used=directories[0] if directories else "")
    return {"size": size}
