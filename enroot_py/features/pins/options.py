"""The options of srun, sbatch and salloc that pin tags to digests."""

from __future__ import annotations

from enroot_py.config.words import truth
from pyxis_py.request.options import Option, file_name, image_text


def _pin(text: str) -> bool | tuple[str, ...]:
    try:
        return truth(text)
    except ValueError:  # a list of images
        pass
    images = text.split(",")
    if not all(images):
        raise ValueError("an image is empty", "separate images with one comma each")
    return tuple(dict.fromkeys(image_text(image) for image in images))


PIN = Option(
    "container-pin",
    "pin",
    "no: each step of a job resolves the tag; yes: sbatch or salloc fails, instead of warning, if it cannot resolve "
    "the tag for all steps; IMAGE[,IMAGE...]: pin these images for the steps of the job",
    parse=_pin,
    arginfo="no|yes|IMAGE[,IMAGE...]",
    example="no",
    of_job=True,
)
LOCK = Option(
    "container-lock",
    "lock",
    "lock file from penroot lock, with the digest of each tag; fails if a tag is not in the file",
    parse=file_name,
    arginfo="FILE",
    example="./images.lock",
    of_job=True,
)
OPTIONS = (PIN, LOCK)
