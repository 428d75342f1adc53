"""The digests of a job's images: from the tags at submission, and from a lock file.

sbatch or salloc resolves them once, as the user, and all steps of the job use them, after a requeue too. On the step
path of a job with pins.
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

_OF_JOB = "the job has pinned it to"
_AGAIN = "submit the job again, or give --container-pin=no to take what the tag is now"


class Pins(Frozen):
    """The pins of a job: digests by canonical names of tags, or "" if unknown, and its lock file.

    ``name`` is how that was asked for.
    """

    tags: dict[str, str]
    name: str = ""
    lock: LockFile | None = None

    def dumps(self) -> str:
        """Serialize as a variable: each line begins with a keyword."""
        lines = [f"tag {name} {digest}" for name, digest in self.tags.items()]
        if self.lock:
            lines += [f"lock {self.name}", f"path {self.lock.path}"]
            lines += [f"image {image.line} {image.text} {image.digest}" for image in self.lock.images]
        return "\n".join(lines)


def loads(text: str) -> Pins:
    """Parse the output of dumps(); ignore unknown lines, which only the user can have written. Raises ConfigError."""
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
            images.append(lockfile.locked(path, int(words[0]), words[1:]))
    return Pins(tags, name, LockFile(path, tuple(images)) if path else None)


def _carried(job: Job) -> Pins:
    """Return the pins of sbatch or salloc. Raises ConfigError."""
    return loads(job.environ.get(PINNED, ""))


def known(job: Job, request: Request, image: Reference | LocalImage) -> Pin | None:
    """Return the digest of an image for a step, from a lock file or the job's pins.

    Raises UsageError, ConfigError, and on a node ImageError for one that has to have one.
    """
    if not isinstance(image, Reference):
        return None
    if lock := _lock(job, request):
        return lock.pin(image)
    digest = _carried(job).tags.get(str(image), "") if request.value(PIN) is not False else ""
    if digest:
        return Pin(digest, _OF_JOB, _AGAIN)
    if request.value(PIN) is True and job.verb != "check":
        if job.resolved(image.uri()) == REFUSED:
            raise ImageError("")  # srun has printed why
        message = f"{request.origins['pin']}: nobody has resolved {image} for the step: srun and sbatch could not"
        raise ImageError(message, hint="use --container-pin=no to let each node resolve the tag")
    return None


def told(job: Job, request: Request, digest: str) -> Pin:
    """Return a digest that srun has resolved, with its origin. Raises ConfigError."""
    name, _ = _lock_name(job, request)
    if name:
        return Pin(digest, f"{name} locks it to", f"penroot lock {name} locks what the tag is now")
    if request.value(PIN) is not False and digest in _carried(job).tags.values():
        return Pin(digest, _OF_JOB, _AGAIN)
    return Pin(digest)


def at_submit(job: Job, request: Request, plugin: PluginSettings) -> str:
    """Return the pins of a job as a variable, or "" for none. Raises PenrootError."""
    tags = dict(_carried(job).tags)  # of another component of this job
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
    """Return the tags to pin, each with its option. Raises UsageError."""
    asked = request.value(PIN)
    named = asked if isinstance(asked, tuple) else ()
    of_step = request.image if request.image is not None and request.is_reference(job.cwd) else None
    by_site = PinArguments(plugin).pin_tags and plugin.resolve_tags and not plugin.importer
    wanted = request.value(LOCK) is not None or asked or asked is None and by_site
    texts = [(request.origins["image"], of_step)] if of_step is not None and wanted else []
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
                f"{origin}={text} is no image of a registry", hint="pin an image of a registry: only those have tags"
            )


def _resolved(job: Job, request: Request, plugin: PluginSettings, origin: str, image: Reference) -> str:
    """Resolve a tag. Raises PenrootError if the digest is required, and warns otherwise."""
    from enroot_py.registry import tags

    loaded = enroot_settings.load(job.host(), in_job=False)
    if path := LockSettings(loaded).lock:
        pin = lockfile.read(path).pin(image)
        return pin.digest if pin else ""
    hint = "use --container-pin=no to let each step resolve the tag"
    try:
        if digest := tags.soon(image, loaded, plugin.resolve_timeout, plugin.resolve_silence):
            return digest
        why = f"{image.registry} does not tell its digest"
    except PenrootError as e:
        why, hint = str(e), e.hint or hint
    if request.value(PIN):
        raise ImageError(f"{origin} cannot be pinned: {why}", hint=hint)
    log.warn(f"{origin} cannot be looked up now; each step will look it up: {why}")
    return ""


def _lock_name(job: Job, request: Request) -> tuple[str, str]:
    """Return the name of the lock file, and its option or variable."""
    if (name := request.value(LOCK)) is not None:
        return name, request.origins["lock"]
    return job.environ.get("ENROOT_LOCK", ""), "ENROOT_LOCK"


def _lock(job: Job, request: Request) -> LockFile | None:
    """Return the lock file; in a job, its content at submission. Raises UsageError, ConfigError."""
    name, origin = _lock_name(job, request)
    if not name:
        return None
    if request.value(PIN) is False:
        raise UsageError(f"{request.origins['pin']} and {origin} contradict each other", hint="give only one of them")
    path = files.path_in(job.cwd, name)
    carried = _carried(job)
    # A script may have gone to another directory; on a node the file may not be there, or be another one by now.
    if carried.lock and carried.name == name and (carried.lock.path == path or not os.path.exists(path)):
        return carried.lock
    return lockfile.read(path)
