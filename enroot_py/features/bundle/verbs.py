"""``penroot bundle``."""

from __future__ import annotations

import click

from enroot_py.cli.commands import CONTEXT, force_option, loaded, synopsis, there
from enroot_py.features.bundle.settings import BundleSettings


def add(penroot: click.Group) -> None:
    """Add the verb."""
    penroot.add_command(bundle)


@synopsis
@click.command("bundle", context_settings=CONTEXT)
@click.option("-a", "--all", "everything", is_flag=True, help="Take the user's configuration along.")
@click.option("-c", "--checksum", is_flag=True, help="Embed a checksum, which every run verifies.")
@click.option("-d", "--desc", callback=there, help="What the bundle is.")
@click.option("-o", "--output", callback=there, help="Name of the bundle, if not IMAGE.run.")
@click.option("-t", "--target", callback=there, help="Where --keep unpacks it, if not ./BUNDLE.")
@force_option
@click.argument("image")
def bundle(
    everything: bool, checksum: bool, desc: str | None, output: str | None, target: str | None, force: bool, image: str
) -> None:
    """Make one self-extracting file of a squashfs IMAGE, to run where nothing is installed.

    Its host needs sh, tar, gzip and mkdir, and sha256sum for a checksum.
    """
    from enroot_py.features.bundle.bundle import Bundle

    settings = loaded(force=force)
    own = BundleSettings(settings)
    Bundle(
        image,
        settings,
        output,
        everything=everything or own.bundle_all,
        checksum=checksum or own.bundle_checksum,
        description=desc or "",
        target=target,
    ).write()
