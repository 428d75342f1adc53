"""``penroot lock``, and the option --lock of other verbs."""

from __future__ import annotations

import os

import click

from enroot_py.cli.commands import CONTEXT, IMAGES, change, section, synopsis, there


def add(penroot: click.Group) -> None:
    """Add the verb and the options."""
    penroot.add_command(lock)
    section(IMAGES, lock)
    for verb in ("import", "create", "load"):
        penroot.commands[verb].params.insert(-1, _lock_option())


def _lock_option() -> click.Option:
    return click.Option(
        ["--lock"],
        metavar="FILE",
        expose_value=False,
        callback=_use,
        help="Use the digests in this lock file.",
    )


def _use(ctx: click.Context, parameter: click.Parameter, path: str | None) -> None:
    if there(ctx, parameter, path):
        change(ctx, "--lock", lock=os.path.abspath(path or ""))


@synopsis
@click.command("lock", context_settings=CONTEXT)
@click.option("--check", is_flag=True, help="Report tags that moved; exit 1 if any did. Changes nothing.")
@click.argument("file", callback=there)
@click.argument("images", nargs=-1, callback=there, metavar="[IMAGE...]")
def lock(check: bool, file: str, images: tuple[str, ...]) -> None:
    """Record the current digests of images in a lock file.

    Without IMAGE, refresh every line. With IMAGE, refresh only these images and the lines that have no digest. A lock
    file has a line "version 1", then a line IMAGE DIGEST for each image. A line with only IMAGE has no digest yet.
    Comments begin with #.
    """
    from enroot_py.features.pins import locks

    locks.lock(file, images, check=check)
