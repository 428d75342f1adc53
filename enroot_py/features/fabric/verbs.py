"""``penroot fabric``."""

from __future__ import annotations

import click

from enroot_py.cli.commands import CONTEXT, IMAGES, container_names, section, synopsis, there


def add(penroot: click.Group) -> None:
    """Add the verb."""
    penroot.add_command(fabric)
    section(IMAGES, fabric)


@synopsis
@click.command("fabric", context_settings=CONTEXT)
@click.option("--environment", callback=there, metavar="NAME|FILE", help="Environment file (EDF), as for start.")
@click.argument("name", required=False, metavar="[NAME|IMAGE]", shell_complete=container_names)
def fabric(environment: str | None, name: str | None) -> None:
    """Show which network libraries an image will use, and why.

    For libfabric, UCX and the NCCL plugin, show whether the image's or the host's library is used. Without an image,
    show the libraries of this machine.
    Exit with status 1 if a required library does not fit the image.
    """
    from enroot_py.cli import start
    from enroot_py.features.fabric import report

    options = start.Options()
    describing = (row for row in start.feature_flags().values() if row.describe)
    options.of_features = [(row, environment) for row in describing if environment]
    options.target = name or ""
    report.report(options)
