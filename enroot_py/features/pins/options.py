"""The options of srun, sbatch and salloc that pin tags to digests."""

from __future__ import annotations

from pyxis_py.options import NO, YES, Option, file_name, image_text

# What tags were where the job was submitted, and its lock file: Pins.dumps().
PINNED = "PYXIS_PINNED"


def _pin(text: str) -> bool | tuple[str, ...]:
    if text.lower() in YES + NO:
        return text.lower() in YES
    images = text.split(",")
    if not all(images):
        raise ValueError("an image is empty", "separate images with one comma each")
    return tuple(dict.fromkeys(image_text(image) for image in images))


PIN = Option(
    "container-pin",
    "pin",
    "no: each step of a job resolves the tag; yes: where sbatch or salloc cannot resolve it for all steps, it "
    "fails instead of warning; images: the same of these, which steps of the job name",
    parse=_pin,
    arginfo="no|yes|IMAGE[,IMAGE...]",
    example="no",
    of_job=True,
)
LOCK = Option(
    "container-lock",
    "lock",
    "lock file, made by penroot lock, that says which digest each tag is; one that it does not name is an error",
    parse=file_name,
    arginfo="FILE",
    example="./images.lock",
    of_job=True,
)
OPTIONS = (PIN, LOCK)
