"""Adapt click to enroot's conventions, for all verbs."""

from __future__ import annotations

import os
from typing import TypeVar

import click

from enroot_py.base.errors import UsageError
from enroot_py.cli import docker
from enroot_py.config.settings import Settings, load

CONTEXT = {"help_option_names": ["-h", "--help"]}
_CHANGES = "penroot.changes"
# Sections of the help text. A verb without a section is in SET_UP.
RUN, IMAGES, CACHE, JOBS, SET_UP = "Run", "Images", "Cache", "Jobs", "Set up"
# A verb of docker, podman or apptainer -> the line to type instead. {} stands for penroot.
_INSTEAD = {
    "build": "docker build -t IMAGE . && {} import dockerd://IMAGE",
    "commit": "{} export --output FILE.sqsh NAME",
    "container": "{} list",
    "image": "{} cache list",
    "images": "{} cache list",
    "kill": "{} stop --signal KILL NAME; to send another signal: kill -SIGNAL PID, with a PID from {} ps NAME",
    "ls": "{} list",
    "pull": "{} import docker://IMAGE",
    "push": "podman push IMAGE ({} only downloads images)",
    "rm": "{} remove NAME",
    "rmi": "{} cache prune IMAGE",
    "run": "{} start docker://IMAGE COMMAND",
    "save": "{} import --output FILE.sqsh docker://IMAGE",
    "shell": "{} start NAME sh",
    "system": "{} cache prune --dry-run",
    "tag": "{} create --name NAME docker://IMAGE",
    "top": "{} ps NAME",
}


class Commands(click.Group):
    """A click group that lists commands by section, and translates verbs of other engines in a hint."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if not ctx.resilient_parsing and args[0] in _INSTEAD:
            line = docker.translate(args[0], args[1:])
            hint = f"{ctx.command_path} {line}" if line else _INSTEAD[args[0]].replace("{}", ctx.command_path)
            raise UsageError(f"No such command '{args[0]}'", hint=hint, usage=usage(ctx))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        visible = [(name, command) for name, command in sorted(self.commands.items()) if not command.hidden]
        for title in (RUN, IMAGES, CACHE, JOBS, SET_UP):
            commands = [(name, command) for name, command in visible if getattr(command, "section", SET_UP) == title]
            if rows := [(name, command.get_short_help_str(64)) for name, command in commands]:
                with formatter.section(title):
                    formatter.write_dl(rows)


T = TypeVar("T", str | None, tuple[str, ...])


def there(_ctx: click.Context, _parameter: click.Parameter, value: T) -> T:
    """Return the value of a parameter. Refuse an empty value: usually it comes from an unset variable of a script."""
    if value == "" or isinstance(value, tuple) and "" in value:
        raise click.BadParameter("the value is empty")
    return value


def change(ctx: click.Context, origin: str, **changes: object) -> None:
    """Change settings for this run. Callbacks of options that an optional feature adds to a verb call this function."""
    ctx.meta.setdefault(_CHANGES, []).append((origin, changes))


def loaded(*, force: bool = False) -> Settings:
    """Load the settings of this run. Values from change() and --force take precedence over files and variables."""
    settings = load()
    ctx = click.get_current_context(silent=True)
    for origin, changes in ctx.meta.get(_CHANGES, ()) if ctx else ():
        settings = settings.replace(origin, **changes)
    return settings.replace("--force", force_override=True) if force else settings


def container_names(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Shell completion: return matching container names; for ``start``, also image files in the working directory."""
    from enroot_py.store import containers

    names = containers.names(load())
    if parameter.name == "name" and ctx.command.name == "start":
        names += sorted(name for name in os.listdir(".") if name.endswith(".sqsh"))
    return [name for name in names if name.startswith(incomplete)]


force_option = click.option("-f", "--force", is_flag=True, help="Overwrite existing files and containers.")


def shown_json(value: object) -> bytes:
    """Return readable JSON: escape only control characters and bytes that are not UTF-8."""
    import json

    text = json.dumps(value, indent=2, ensure_ascii=False)
    text = "".join(c if c.isprintable() or c == "\n" else _escaped(c) for c in text)
    return text.encode(errors="backslashreplace")  # writes surrogates as JSON does: \ud800


def _escaped(character: str) -> str:
    """Escape a character in UTF-16 units: RFC 8259, section 7."""
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at] << 8 | units[at + 1]:04x}" for at in range(0, len(units), 2))


def usage(ctx: click.Context) -> str:
    """Return the help text of a command."""
    return ctx.get_help() + "\n"


def section(name: str, *commands: click.Command) -> None:
    """Show these commands in a section of the help text."""
    for command in commands:
        command.section = name  # type: ignore[attr-defined]


def synopsis(command: click.Command) -> click.Command:
    """Show ``[options]`` and ``[--]`` in the usage line of a command that has options and arguments."""
    words = ("[options]", click.Option), ("[--]", click.Argument)
    command.options_metavar = " ".join(word for word, kind in words if any(isinstance(p, kind) for p in command.params))
    return command
