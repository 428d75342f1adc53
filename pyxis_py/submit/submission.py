"""Check a submission of srun, sbatch or salloc before it is queued.

The user waits for this module, so functions import the modules that only some submissions need.
"""

from __future__ import annotations

import os

from enroot_py.base import log
from enroot_py.base.errors import UsageError
from enroot_py.base.features import parts
from pyxis_py.request import options, settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Protocol

    from enroot_py.base.digests import Pin
    from enroot_py.registry.reference import LocalImage, Reference
    from pyxis_py.request.channel import Channel
    from pyxis_py.request.job import Job
    from pyxis_py.request.options import Request

    class Serving(Protocol):
        """A server for the nodes, which runs as long as srun."""

        def serve(self, channel: Channel) -> None: ...


# Directories of a site's policy, which no variable of a job changes. The second directory is for Slurm in a container.
_SITES = ("/etc/enroot", "/run/penroot/slurm/etc/enroot")
_OPTIONS = "PYXIS_CONTAINER_"  # prefix of the variables for options


def check(job: Job) -> tuple[Request, Wish | Serving | None]:
    """Return the request, as far as it is known at submit, and the work that srun does for all nodes, or None.

    Raises UsageError, ConfigError, ImageError.
    """
    plugin = settings.load(job.arguments)
    request = options.parse(job.options, job.environ, read=job.describe)
    if job.context != "srun" and not plugin.sbatch_support:
        # Only the options of sbatch and salloc are switched off. Steps in the job still use the variables.
        options.refuse_all(job.options, job.context)
        return request, None
    for line in (*options.ignored(request), *slips(job.environ)):
        log.warn(line)
    request.fstab()  # raises ConfigError for an unknown flag of a mount
    if request.wants_container and (job.options or job.context == "srun"):
        _check_words(job)
    image = _image(job, request)
    pin = job.pin(request, image) if image else None
    if request.image is not None and _has_policy(job):
        _check_policy(job, request, image, pin, by_importer=bool(plugin.importer))
    if request.sent:
        for send in parts("send"):
            file = send(job, request, plugin, learns_later=learns_later(job))
            return request, file if job.context == "srun" else None
        raise UsageError(f"{request.origins['image']}={request.image}: this installation of penroot sends no files")
    if job.context != "srun" or image is None:
        return request, None
    from enroot_py.registry.reference import LocalImage

    if isinstance(image, LocalImage):
        return request, None
    wish = Wish(image, pin)
    if not plugin.importer:
        must_resolve = any(wanted(request) for wanted in parts("must_resolve"))
        wish.resolve = (plugin.resolve_tags or must_resolve) and not (wish.digest or job.resolved(image.uri()))
        wish.shares = any(shares(plugin) for shares in parts("shares"))
        wish.waits = wish.resolve and request.name is not None and not must_resolve and learns_later(job)
    return request, wish if wish.resolve or wish.shares or pin else None


def _image(job: Job, request: Request) -> Reference | LocalImage | None:
    """Return the image of --container-image, or None for a file. Raises UsageError."""
    if request.image is None or request.sent or request.is_file(job.cwd):
        return None
    from enroot_py.base.errors import ImageReferenceError
    from enroot_py.registry import reference

    try:
        return reference.parse(request.image, job.cwd)
    except ImageReferenceError as e:
        raise UsageError(f"{request.origins['image']}={e}", hint=e.hint) from None


def _has_policy(job: Job) -> bool:
    """Return whether the site or the user seems to have a policy. srun waits for this, so import nothing."""
    own = job.environ.get("XDG_CONFIG_HOME") or (job.environ.get("HOME") or os.path.expanduser("~")) + "/.config"
    return any(os.path.lexists(f"{place}/policy.json") for place in (*_SITES, f"{own}/enroot"))


def _check_policy(
    job: Job, request: Request, image: Reference | LocalImage | None, pin: Pin | None, *, by_importer: bool
) -> None:
    """Raise PolicyError if the policies do not admit the image, as far as the host of submission knows the image."""
    from enroot_py.base.errors import PolicyError
    from enroot_py.config import settings as enroot_settings
    from enroot_py.registry import tags
    from enroot_py.store import policies

    assert request.image is not None
    loaded = enroot_settings.load(job.host(), in_job=False)
    if not loaded.policies:
        return
    admission = policies.admission(loaded)
    path = os.path.join(job.cwd, request.image)
    try:
        if request.sent:
            admission.check_file(request.image, loaded)
        elif image is not None:
            admission.check_name(image, loaded, tags.pin(image, loaded, pin), by_importer=by_importer)
        elif os.path.exists(path):  # otherwise only the nodes can check the file
            admission.check_file(os.path.realpath(path), loaded)
    except PolicyError as e:
        raise PolicyError(f"{request.origins['image']}={request.image}: {e}", hint=e.hint) from None


class Wish:
    """A registry image for which srun may resolve the tag and run the tracker of the swarm.

    ``digest`` is the digest for the step, if it is known already. With ``waits``, srun asks the registry only when a
    node asks srun, because the nodes may already have the container of --container-name.
    """

    resolve = shares = waits = False

    def __init__(self, image: Reference, pin: Pin | None) -> None:
        self.image = image
        self.digest = pin.digest if pin else image.digest


def slips(environ: Mapping[str, str]) -> list[str]:
    """Return a warning for each unknown variable whose name is similar to a variable of penroot."""
    known = [option.variable for option in options.OPTIONS if option.variable]
    unknown = [name for name in environ if name.startswith(_OPTIONS) and name not in known]
    if not unknown and not any(name.startswith(("ENROOT_", "PENROOT_")) for name in environ):
        return []
    from enroot_py.config import table, words

    known = [option.variable for option in options.all_options() if option.variable]
    unknown = [name for name in unknown if name not in known]
    # Compare without the common prefix, which makes all names similar.
    ends = [variable.removeprefix(_OPTIONS) for variable in known if variable.startswith(_OPTIONS)]
    meant = ((name, words.nearest(name.removeprefix(_OPTIONS), ends)) for name in unknown)
    lines = [f"ignoring {name}: did you mean {_OPTIONS}{end}?" for name, end in meant if end]
    return lines + table.slips(environ)


def resolve(job: Job, tag: Reference) -> str:
    """Return the digest of a tag, or "" if the registry cannot be asked.

    Ends the process if the registry takes too long: the plugin then continues without a digest. Raises RefusedError if
    the registry refuses. Even then the nodes ask the registry, because they may have another login or mirror.
    """
    from enroot_py.base.errors import PenrootError, RefusedError
    from enroot_py.config import settings as enroot_settings
    from enroot_py.registry import tags

    plugin = settings.load(job.arguments)
    heard = tags.hurry(plugin.resolve_timeout, plugin.resolve_silence)
    try:
        return tags.resolve(tag, enroot_settings.load(job.host(), in_job=False), heard)
    except RefusedError:
        raise
    except PenrootError as e:
        log.debug(str(e))
        return ""


def learns_later(job: Job) -> bool:
    """Return whether the step gets variables that srun sets after the allocation.

    In a heterogeneous job only the first component gets them (pre_launch_srun_job of Slurm's srun_job.c). A step of
    --async does not get them: since 26.05, srun sends it earlier (_create_job_step_create_request of launch.c).
    """
    words = _words(job)
    several = ":" in words or any(word.startswith(("--het-group", "--pack-group")) for word in words)
    return not several and not _is_given("--as|ync", words)


def is_verbose(job: Job) -> bool:
    """Return whether srun has -v, and so prints how long containers take."""
    words = _words(job) if job.context == "srun" else []
    return _is_given("--v|erbose", words) or any(word.startswith("-v") and not word.strip("-v") for word in words)


def _check_words(job: Job) -> None:
    """Raise UsageError for options of the command line that do not work with a container."""
    words = _words(job)
    if job.context == "srun" and _is_given("--wait-|for-children", words):
        raise UsageError(
            "--wait-for-children: srun and the process with the container would wait for each other",
            hint="let a shell wait for the children: sh -c 'program; wait'",
        )
    if job.context == "salloc" and _is_given("--no-s|hell", words):
        raise UsageError(
            "--no-shell: salloc passes container options to steps by its command's environment, but has no command",
            hint="use the options with each srun --jobid",
        )


def _is_given(option: str, words: list[str]) -> bool:
    """Return whether a command line has a flag or an abbreviation. ``|`` marks the end of the shortest abbreviation."""
    own, _, rest = option.partition("|")
    return any(word.startswith(own) and (own + rest).startswith(word) for word in words)


def _words(job: Job) -> list[str]:
    """Return the command line of srun, sbatch or salloc, up to the program if getopt(3) has found it.

    For a heterogeneous job, return all words: getopt(3) has found only the program of the last component.
    """
    with open(f"/proc/{os.getppid()}/cmdline", encoding="utf-8", errors="surrogateescape") as f:
        words = f.read().split("\0")
    program = job.numbers.get("optind", 0)
    return words[:program] if program > 1 and ":" not in words else words
