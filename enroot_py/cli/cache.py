"""``penroot cache``: list, check and clean the store of images."""

from __future__ import annotations

import contextlib
import time

import click

from enroot_py.base import log
from enroot_py.base.errors import PenrootError, UsageError
from enroot_py.cli.commands import CONTEXT, shown_json, synopsis
from enroot_py.config import settings
from enroot_py.config.table import Size

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from enroot_py.store.inventory import Stored
    from enroot_py.store.store import Store


_SHORT_DIGEST_CHARS = 12  # as in the output of `docker images`


class Days(click.FloatRange):
    """A time in days."""

    name = "number of days, such as 30"  # for click's message: 'x' is not a valid NAME


@click.group(context_settings=CONTEXT, no_args_is_help=False, options_metavar="")
def cache() -> None:
    """List, check and clean the store of images."""


def _store() -> Store:
    from enroot_py.store.store import Store

    return Store(settings.load().cache_path)


@synopsis
@cache.command("list", context_settings=CONTEXT)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with whole digests.")
def cache_list(as_json: bool) -> None:
    """List the images with names, digest, size and last use.

    Digests are shortened. An image with several names has a line for each name.
    """
    from enroot_py.cli import listing
    from enroot_py.store import inventory

    images = inventory.images(_store())
    if as_json:
        fields = ("names", "digest", "size", "used")
        click.echo(shown_json([{field: getattr(image, field) for field in fields} for image in images]))
        return
    rows = [
        (
            name,
            image.digest.partition(":")[2][:_SHORT_DIGEST_CHARS],
            log.size(image.size),
            time.strftime("%Y-%m-%d %H:%M", time.localtime(image.used)),
        )
        for image in images
        for name in image.names or ("-",)
    ]
    listing.write(listing.table(("NAME", "DIGEST", "SIZE", "LAST USED"), rows))


@synopsis
@cache.command("prune", context_settings=CONTEXT)
@click.option(
    "--keep", metavar="SIZE", default="0", help="Stop when the store is down to SIZE, such as 20G (default: 0)."
)
@click.option("--older", metavar="DAYS", type=Days(0), default=0, help="Keep images used within the last DAYS days.")
@click.option("-n", "--dry-run", is_flag=True, help="Print the images to remove, and remove nothing.")
@click.argument("images", nargs=-1, metavar="[IMAGE...]")
def cache_prune(images: tuple[str, ...], keep: str, older: float, dry_run: bool) -> None:
    """Remove unused images, least recently used first.

    With IMAGE, remove only these images. IMAGE is a name or digest that penroot cache list shows.
    """
    from enroot_py.store import inventory, prune

    try:
        limit = Size("0", "").parse(keep)
    except ValueError as e:
        raise UsageError(f"--keep {keep}: the value {e}", hint="penroot cache prune --keep 20G") from None
    store = _store()
    stored = inventory.images(store) if images else []
    only = frozenset(_digest(image, stored) for image in images)
    pruned = prune.prune(store, settings.load(), prune.Bounds(limit, older * 86400, only), dry=dry_run)
    for digest, user in pruned.kept:
        log.info(f"kept {digest}: used by {user}")
    for image in pruned.images:
        click.echo(f"{image.digest}  {' '.join(image.names) or '-'}")
    log.info(f"{'would free' if dry_run else 'freed'} {log.size(pruned.size)}, {log.many(pruned.layers, 'layer')}")
    if only and pruned.kept:
        raise PenrootError("not every image was removed", hint="end or remove the containers that use the kept images")


def _digest(text: str, images: Iterable[Stored]) -> str:
    """Return the digest of the one stored image that ``text`` selects: a name, a URI or the beginning of a digest."""
    from enroot_py.base.errors import ImageReferenceError
    from enroot_py.registry.reference import of_command_line

    names = {text}
    with contextlib.suppress(ImageReferenceError):
        names.add(str(of_command_line(text)))
    digests = [
        image.digest
        for image in images
        if names.intersection(image.names) or _is_short(text.removeprefix("sha256:"), image.digest.partition(":")[2])
    ]
    if len(digests) != 1:
        why = "several stored images have digests like" if digests else "the store has no image"
        raise UsageError(f"{why} {text}", hint="penroot cache list shows names and digests")
    return digests[0]


def _is_short(text: str, digest: str) -> bool:
    return len(text) >= _SHORT_DIGEST_CHARS and digest.startswith(text)


@synopsis
@cache.command("verify", context_settings=CONTEXT)
@click.option("--repair", is_flag=True, help="Download damaged layers again.")
def cache_verify(repair: bool) -> None:
    """Check every stored file against its checksum."""
    from enroot_py.registry.reference import parse
    from enroot_py.store import inventory, layout, pull, verify

    store = _store()
    count, layers, size = inventory.total(store)
    damaged = set()
    for directory, reason in verify.damage(store):
        log.error(f"{layout.name_of(directory)}: {reason}")
        damaged.add(directory)
    checked = f"{log.many(count, 'image')} and {log.many(layers, 'layer')}, {log.size(size)}"
    log.info(f"checked {checked}: {len(damaged) or 'none'} damaged")
    if damaged and not repair:
        raise PenrootError(
            f"{len(damaged)} of the stored images and layers are damaged", hint="penroot cache verify --repair"
        )
    failed = 0
    # Repair the stored image, even if a lock file pins the tag to another image.
    options = settings.load().replace("cache verify", lock="")
    for reference in verify.repair(store, damaged) if damaged else ():
        try:
            pull.pull(parse(reference), options)
        except PenrootError as e:
            log.error(f"{reference}: {e}")
            failed += 1
    if failed:
        raise PenrootError(
            f"cannot repair {log.many(failed, 'damaged image')}", hint="import them again: penroot import URI"
        )
