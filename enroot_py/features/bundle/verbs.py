"""``penroot bundle``."""

from __future__ import annotations

import click

from enroot_py.cli.commands import CONTEXT, IMAGES, force_option, loaded, section, synopsis, there
from enroot_py.features.bundle.settings import BundleSettings


def add(penroot: click.Group) -> None:
    """Add the verb."""
    penroot.add_command(bundle)
    section(IMAGES, bundle)


@synopsis
@click.command("bundle", context_settings=CONTEXT)
@click.option("-a", "--all", "everything", is_flag=True, help="Include the user's configuration.")
@click.option("-c", "--checksum", is_flag=True, help="Embed a checksum and verify it at every run.")
@click.option("-d", "--desc", callback=there, help="Description of the bundle.")
@click.option("-o", "--output", callback=there, help="Output file (default: IMAGE.run).")
@click.option("-t", "--target", callback=there, help="Directory for --keep and --extract (default: ./BUNDLE).")
@force_option
@click.argument("image")
def bundle(
    everything: bool, checksum: bool, desc: str | None, output: str | None, target: str | None, force: bool, image: str
) -> None:
    """Turn a squashfs image into a self-extracting executable.

    The host that runs the executable needs sh, tar, gzip and mkdir, and sha256sum for a checksum.
    """
    from enroot_py.features.bundle.bundle import Bundle

    settings = loaded(force=force)
    defaults = BundleSettings(settings)
    Bundle(
        image,
        settings,
        output,
        everything=everything or defaults.bundle_all,
        checksum=checksum or defaults.bundle_checksum,
        description=desc or "",
        target=target,
    ).write()
