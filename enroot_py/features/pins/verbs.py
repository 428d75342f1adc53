"""``penroot lock``, and the option --lock of the verbs that take references."""

from __future__ import annotations

import os

import click

from enroot_py.cli.commands import CONTEXT, change, synopsis, there


def add(penroot: click.Group) -> None:
    """Add the verb and the options."""
    penroot.add_command(lock)
    for verb in ("import", "create", "load"):
        penroot.commands[verb].params.insert(-1, _lock_option())


def _lock_option() -> click.Option:
    return click.Option(
        ["--lock"],
        metavar="FILE",
        expose_value=False,
        callback=_use,
        help="Lock file that says which digest a tag is.",
    )


def _use(ctx: click.Context, parameter: click.Parameter, path: str | None) -> None:
    if there(ctx, parameter, path):
        change(ctx, "--lock", lock=os.path.abspath(path or ""))


@synopsis
@click.command("lock", context_settings=CONTEXT)
@click.option("--check", is_flag=True, help="Change nothing: say which tags have moved, and fail where one has.")
@click.argument("file", callback=there)
@click.argument("images", nargs=-1, callback=there, metavar="[IMAGE...]")
def lock(check: bool, file: str, images: tuple[str, ...]) -> None:
    """Write into a lock FILE the digest that each IMAGE has now.

    Without an IMAGE that is done with all that are in it, else with these, and with those that have no digest yet.
    A lock file has a line "version 1", then a line IMAGE DIGEST for each image, or IMAGE alone for one that waits for
    its digest, and comments, which begin with #.
    """
    from enroot_py.features.pins import locks

    locks.lock(file, images, check=check)
