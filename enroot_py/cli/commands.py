"""Click with enroot's manners, for all verbs."""

from __future__ import annotations

import os
from typing import TypeVar

import click

from enroot_py.base.errors import UsageError
from enroot_py.config.settings import Settings, load

CONTEXT = {"help_option_names": ["-h", "--help"]}
_CHANGES = "penroot.changes"
# What verbs of docker and podman are called here.
_ELSEWHERE = {
    "images": "cache list",
    "ls": "list",
    "ps": "list --fancy",
    "pull": "import",
    "rm": "remove",
    "rmi": "cache prune",
    "run": "start",
}


class Commands(click.Group):
    """Click's group with enroot's manners: no arguments is a mistake, ``help`` is a command."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if not ctx.resilient_parsing and args[0] in _ELSEWHERE:
            hint = f"it is {ctx.command_path} {_ELSEWHERE[args[0]]}"
            raise UsageError(f"No such command '{args[0]}'", hint=hint, usage=usage(ctx))
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(self.commands)


T = TypeVar("T", str | None, tuple[str, ...])


def there(_ctx: click.Context, _parameter: click.Parameter, value: T) -> T:
    """A value that is not empty: else it is a variable of a script that was not set."""
    if value == "" or isinstance(value, tuple) and "" in value:
        raise click.BadParameter("it is empty")
    return value


def change(ctx: click.Context, origin: str, **changes: object) -> None:
    """Let a feature's option of a verb change the settings with which the verb runs."""
    ctx.meta.setdefault(_CHANGES, []).append((origin, changes))


def loaded(*, force: bool = False) -> Settings:
    """The settings of this run. Over them are what options of features change, and --force."""
    settings = load()
    ctx = click.get_current_context(silent=True)
    for origin, changes in ctx.meta.get(_CHANGES, ()) if ctx else ():
        settings = settings.replace(origin, **changes)
    return settings.replace("--force", force_override=True) if force else settings


def container_names(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Containers for completion, and images in the working directory where one may be started."""
    from enroot_py.store import containers

    names = containers.names(load())
    if parameter.name == "name" and ctx.command.name == "start":
        names += sorted(name for name in os.listdir(".") if name.endswith(".sqsh"))
    return [name for name in names if name.startswith(incomplete)]


force_option = click.option("-f", "--force", is_flag=True, help="Overwrite what exists.")


def shown_json(value: object) -> bytes:
    """JSON to be read: only what could steer a terminal is escaped, and what is no UTF-8."""
    import json

    text = json.dumps(value, indent=2, ensure_ascii=False)
    text = "".join(c if c.isprintable() or c == "\n" else _escaped(c) for c in text)
    return text.encode(errors="backslashreplace")  # which is JSON's own way


def _escaped(character: str) -> str:
    """In units of UTF-16, as JSON has it."""
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at] << 8 | units[at + 1]:04x}" for at in range(0, len(units), 2))


def usage(ctx: click.Context) -> str:
    """The help text of a command, which goes to stdout."""
    return ctx.get_help() + "\n"


def synopsis(made: click.Command) -> click.Command:
    """Let the usage of a command say of its options what it has."""
    words = ("[options]", click.Option), ("[--]", click.Argument)
    made.options_metavar = " ".join(word for word, kind in words if any(isinstance(p, kind) for p in made.params))
    return made
