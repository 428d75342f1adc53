"""Pin the images of a job: to digests from a lock file, or to digests that the tags had at submission.

sbatch or salloc resolves the tags once, as the user. Each step of the job uses these digests, also after a requeue,
unless the step has --container-pin=no or a lock file. Keep the import of this module fast: each step of a job with pins
waits for it.
"""

from __future__ import annotations

import os

from enroot_py.base import log
from enroot_py.base.digests import Pin, is_digest
from enroot_py.base.errors import ImageError, ImageReferenceError, PenrootError, UsageError
from enroot_py.base.features import CARRIED_BYTES
from enroot_py.base.frozen import Frozen
from enroot_py.config import files
from enroot_py.config import settings as enroot_settings
from enroot_py.features.pins import lockfile
from enroot_py.features.pins.arguments import PinArguments
from enroot_py.features.pins.lockfile import LockFile
from enroot_py.features.pins.options import LOCK, PIN
from enroot_py.features.pins.settings import LockSettings
from enroot_py.registry import reference
from enroot_py.registry.reference import Reference
from pyxis_py.request.job import PINNED, REFUSED

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from enroot_py.registry.reference import LocalImage
    from pyxis_py.request.job import Job
    from pyxis_py.request.options import Request
    from pyxis_py.request.settings import PluginSettings

_JOB_ORIGIN = "the job has pinned it to"
_JOB_HINT = "submit the job again, or use the current image of the tag: --container-pin=no"


class Pins(Frozen):
    """The pins of a job. ``tags`` maps the canonical name of each tag to its digest, or to "" if it is unknown.

    ``lock`` is the content of a lock file, and ``name`` is the path of this file as the user wrote it.
    """

    tags: dict[str, str]
    name: str = ""
    lock: LockFile | None = None

    def dumps(self) -> str:
        """Return the pins as text for a variable of the job. Each line begins with a keyword."""
        lines = [f"tag {name} {digest}" for name, digest in self.tags.items()]
        if self.lock:
            lines += [f"lock {self.name}", f"path {self.lock.path}"]
            lines += [f"image {image.line} {image.text} {image.digest}" for image in self.lock.images]
        return "\n".join(lines)


def loads(text: str) -> Pins:
    """Parse the output of dumps(). Ignore unknown lines: only the user can have added them. Raises ConfigError."""
    tags: dict[str, str] = {}
    name = path = ""
    images = []
    for line in text.split("\n"):
        kind, _, rest = line.partition(" ")
        words = rest.split()
        if kind == "tag" and words:
            tags[words[0]] = words[1] if len(words) == 2 and is_digest(words[1]) else ""
        elif kind == "lock":
            name = rest
        elif kind == "path":
            path = rest
        elif kind == "image" and len(words) > 1 and words[0].isdecimal() and len(words[0]) < 10:
            images.append(lockfile.parse_line(path, int(words[0]), words[1:]))
    return Pins(tags, name, LockFile(path, tuple(images)) if path else None)


def _carried(job: Job) -> Pins:
    """Return the pins that sbatch or salloc has put into the environment of the job. Raises ConfigError."""
    return loads(job.environ.get(PINNED, ""))


def find_pin(job: Job, request: Request, image: Reference | LocalImage) -> Pin | None:
    """Return the digest of an image for a step, from a lock file or the job's pins, or None.

    Raises UsageError, ConfigError. On a node, raises ImageError if the digest is required but unknown.
    """
    if not isinstance(image, Reference):
        return None
    if lock := _lock(job, request):
        return lock.pin(image)
    digest = _carried(job).tags.get(str(image), "") if request.value(PIN) is not False else ""
    if digest:
        return Pin(digest, _JOB_ORIGIN, _JOB_HINT)
    if request.value(PIN) is True and job.verb != "check":
        if job.resolved(image.uri()) == REFUSED:
            raise ImageError("")  # srun has printed the reason
        message = f"{request.origins['pin']}: neither sbatch nor srun has resolved {image}"
        raise ImageError(message, hint="use --container-pin=no to let each node resolve the tag")
    return None


def resolved_pin(job: Job, request: Request, digest: str) -> Pin:
    """Return a digest that srun has resolved, with its origin. Raises ConfigError."""
    name, _ = _lock_name(job, request)
    if name:
        return Pin(digest, f"{name} locks it to", f"lock the current digest: penroot lock {name}")
    if request.value(PIN) is not False and digest in _carried(job).tags.values():
        return Pin(digest, _JOB_ORIGIN, _JOB_HINT)
    return Pin(digest)


def at_submit(job: Job, request: Request, plugin: PluginSettings) -> str:
    """Resolve the tags of a job. Return the job's pins as text for a variable, or "". Raises PenrootError."""
    tags = dict(_carried(job).tags)  # pins of another component of a heterogeneous job
    lock = _lock(job, request)
    for origin, image in _images(job, request, plugin):
        if lock:
            lock.pin(image)
        elif str(image) not in tags:
            tags[str(image)] = _resolved(job, request, plugin, origin, image)
    pins = Pins(tags, _lock_name(job, request)[0], lock).dumps()
    if len(pins) > CARRIED_BYTES:
        raise UsageError(
            f"the pinned images need more than the {CARRIED_BYTES >> 10} KiB that fit into the environment of a job",
            hint="pin fewer images",
        )
    return pins


def _images(job: Job, request: Request, plugin: PluginSettings) -> Iterator[tuple[str, Reference]]:
    """Yield the tags to pin, each after the option that names it. Raises UsageError."""
    requested = request.value(PIN)
    named = requested if isinstance(requested, tuple) else ()
    step_image = request.image if request.image is not None and request.is_reference(job.cwd) else None
    site_pins = PinArguments(plugin).pin_tags and plugin.resolve_tags and not plugin.importer
    pins_step = request.value(LOCK) is not None or requested or requested is None and site_pins
    texts = [(request.origins["image"], step_image)] if step_image is not None and pins_step else []
    texts += [(request.origins["pin"], text) for text in named]
    for origin, text in texts:
        try:
            image = reference.parse(text, job.cwd)
        except ImageReferenceError as e:
            raise UsageError(f"{origin}={e}", hint=e.hint) from None
        if isinstance(image, Reference) and not image.digest:
            yield f"{origin}={text}", image
        elif text in named and not image.digest:
            raise UsageError(
                f"{origin}={text} is no image of a registry",
                hint="name an image of a registry: other images have no tags",
            )


def _resolved(job: Job, request: Request, plugin: PluginSettings, origin: str, image: Reference) -> str:
    """Return the digest of a tag. On failure, raise PenrootError if --container-pin needs it; else warn, return ""."""
    from enroot_py.registry import tags

    loaded = enroot_settings.load(job.host(), in_job=False)
    if path := LockSettings(loaded).lock:
        pin = lockfile.read(path).pin(image)
        return pin.digest if pin else ""
    hint = "use --container-pin=no to let each step resolve the tag"
    try:
        if digest := tags.soon(image, loaded, plugin.resolve_timeout, plugin.resolve_silence):
            return digest
        why = f"{image.registry} does not return the digest"
    except PenrootError as e:
        why, hint = str(e), e.hint or hint
    if request.value(PIN):
        raise ImageError(f"{origin} cannot be pinned: {why}", hint=hint)
    log.warn(f"{origin} cannot be looked up now: {why}; each step will look it up")
    return ""


def _lock_name(job: Job, request: Request) -> tuple[str, str]:
    """Return the name of the lock file, or "", and the option or variable that sets it."""
    if (name := request.value(LOCK)) is not None:
        return name, request.origins["lock"]
    return job.environ.get("ENROOT_LOCK", ""), "ENROOT_LOCK"


def _lock(job: Job, request: Request) -> LockFile | None:
    """Return the lock file. Raises UsageError, ConfigError.

    In a job, use the content that the same file had at submission.
    """
    name, origin = _lock_name(job, request)
    if not name:
        return None
    if request.value(PIN) is False:
        raise UsageError(f"{request.origins['pin']} and {origin} contradict each other", hint="give only one of them")
    path = files.path_in(job.cwd, name)
    carried = _carried(job)
    # In a script that has changed its directory, the name can mean another file. On a node, the file can be missing.
    if carried.lock and carried.name == name and (carried.lock.path == path or not os.path.exists(path)):
        return carried.lock
    return lockfile.read(path)
