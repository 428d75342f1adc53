"""``penroot env``: show and check environment files."""

from __future__ import annotations

import click

from enroot_py.base import log
from enroot_py.base.errors import PenrootError
from enroot_py.cli.commands import CONTEXT, IMAGES, section, synopsis


def add(penroot: click.Group) -> None:
    """Add the verb."""
    penroot.add_command(env)
    section(IMAGES, env)


@click.group("env", context_settings=CONTEXT, no_args_is_help=False, options_metavar="")
def env() -> None:
    """Show and check environment files."""


@synopsis
@env.command("render", context_settings=CONTEXT)
@click.option("--format", "form", type=click.Choice(["toml", "json"]), default="toml", help="Output format.")
@click.argument("name", metavar="NAME|FILE")
def render(form: str, name: str) -> None:
    """Show a file merged with its bases, with the origin of each value."""
    from enroot_py.features.environments import shown, startfile

    click.echo(shown.shown(startfile.read(name), form))


@synopsis
@env.command("validate", context_settings=CONTEXT)
@click.argument("files", nargs=-1, required=True, metavar="NAME|FILE...")
def validate(files: tuple[str, ...]) -> None:
    """Check keys, values, variables, mounts and the image of files."""
    from enroot_py.features.environments import startfile

    failed = False
    for name in files:
        try:
            file = startfile.read(name)
            target = startfile.StartFile(file, job=None).target
        except PenrootError as e:
            failed = True
            log.error(str(e))
            log.hint(e.hint)
        else:
            click.echo(f"{file.path} is valid" + ("" if target else ", but names no image"))
    if failed:
        raise PenrootError("not every file is valid", hint="to see the values of a file, run: penroot env render FILE")
