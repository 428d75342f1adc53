"""Click with enroot's manners, for all verbs."""

from __future__ import annotations

import os
from typing import TypeVar

import click

from enroot_py.base.errors import UsageError
from enroot_py.config.settings import Settings, load

CONTEXT = {"help_option_names": ["-h", "--help"]}
_CHANGES = "penroot.changes"
# Sections of the help text; a verb without a section is in the last one.
RUN, IMAGES, CACHE, JOBS, SET_UP = "Run", "Images", "Cache", "Jobs", "Set up"
# Verbs of docker and podman: the line to type instead.
_ELSEWHERE = {
    "build": "import dockerd://IMAGE, after docker build",
    "commit": "export NAME",
    "container": "list",
    "cp": "start --mount DIR:/mnt NAME cp FILE /mnt",
    "image": "cache list",
    "images": "cache list",
    "kill": "list --fancy, then kill PID",
    "logs": "start NAME >FILE",
    "ls": "list",
    "ps": "list --fancy",
    "pull": "import docker://IMAGE",
    "push": "export NAME, then skopeo copy to the registry",
    "rm": "remove NAME",
    "rmi": "cache prune --older DAYS",
    "run": "start docker://IMAGE COMMAND",
    "save": "export NAME",
    "shell": "start NAME",
    "stop": "list --fancy, then kill PID",
    "tag": "create --name NAME IMAGE",
    "top": "list --fancy",
}


class Commands(click.Group):
    """Click's group with enroot's manners: no arguments is a mistake, ``help`` is a command."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if not ctx.resilient_parsing and args[0] in _ELSEWHERE:
            hint = f"use {ctx.command_path} {_ELSEWHERE[args[0]]}"
            raise UsageError(f"No such command '{args[0]}'", hint=hint, usage=usage(ctx))
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(self.commands)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands by section."""
        for section in (RUN, IMAGES, CACHE, JOBS, SET_UP):
            there = [(name, made) for name, made in sorted(self.commands.items()) if _section(made) == section]
            rows = [(name, made.get_short_help_str(64)) for name, made in there if not made.hidden]
            if rows:
                with formatter.section(section if len(self.commands) > 6 else "Commands"):
                    formatter.write_dl(rows)


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


force_option = click.option("-f", "--force", is_flag=True, help="Overwrite existing files and containers.")


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


def section(name: str, *commands: click.Command) -> None:
    """Show these commands in a section of the help text."""
    for made in commands:
        made.section = name  # type: ignore[attr-defined]


def _section(made: click.Command) -> str:
    return getattr(made, "section", SET_UP)


def synopsis(made: click.Command) -> click.Command:
    """Let the usage of a command say of its options what it has."""
    words = ("[options]", click.Option), ("[--]", click.Argument)
    made.options_metavar = " ".join(word for word, kind in words if any(isinstance(p, kind) for p in made.params))
    return made
