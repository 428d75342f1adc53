"""The command line of penroot, parsed by click. main.py runs start, batch and the verbs of quick.py without click."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import click

import enroot_py
from enroot_py import ENROOT_VERSION, __version__, called_as
from enroot_py.base import log
from enroot_py.base.errors import ContainerError, PenrootError, UsageError
from enroot_py.base.features import plugged
from enroot_py.cli import quick
from enroot_py.cli.cache import cache
from enroot_py.cli.commands import (
    CACHE,
    CONTEXT,
    IMAGES,
    RUN,
    Commands,
    container_names,
    force_option,
    loaded,
    section,
    shown_json,
    synopsis,
    there,
    usage,
)
from enroot_py.cli.logins import login, logout
from enroot_py.config import settings
from enroot_py.config.settings import Settings
from enroot_py.config.table import all_settings, slips
from enroot_py.registry import site
from enroot_py.runtime import detached, hooks
from enroot_py.store import containers

_PASSWORD = re.compile("//[^/@]*@")  # in the URL of a proxy


def _version(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    """Print the version. If called as enroot, print only the number, because scripts compare it."""
    if value:
        from enroot_py.base import build

        click.echo(ENROOT_VERSION if called_as() == "enroot" else build.line())
        ctx.exit()


@click.group(
    cls=Commands,
    context_settings=CONTEXT,
    no_args_is_help=False,
    invoke_without_command=True,
    options_metavar="",
    subcommand_metavar="COMMAND [ARG...]",
)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Show the version and exit."
)
@click.pass_context
def penroot(ctx: click.Context) -> None:
    """Containers without root or daemon: squashfs and overlay root filesystems from Docker images."""
    for line in slips(os.environ):
        log.warn(line)
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help(), err=called_as() != "enroot")
        ctx.exit(1)


def _program() -> str:
    return os.path.basename(sys.argv[0])


def main(arguments: Sequence[str]) -> int:
    """Run a command line and return its exit status. Raises UsageError for a wrong option, or another PenrootError."""
    try:
        # click returns the status of Context.exit().
        return penroot.main(list(arguments), prog_name=_program(), standalone_mode=False) or 0
    except click.exceptions.Exit as e:
        return e.exit_code
    except click.Abort:
        return 130
    except click.UsageError as e:
        verb = arguments[:1] if arguments[0] in penroot.commands else ()
        hint = f"{e.ctx.command_path if e.ctx else ' '.join((_program(), *verb))} --help"
        message = " ".join(e.format_message().split()).rstrip(".")
        raise UsageError(message, hint=hint, usage=usage(e.ctx) if e.ctx else "") from e


def help_text() -> str:
    """Return the text of ``penroot --help`` for a terminal of 80 columns or more."""
    return usage(penroot.make_context("penroot", [], terminal_width=78))


def command(function: Callable[..., None]) -> click.Command:
    """Make a function a verb of penroot with the function's name."""
    return synopsis(penroot.command(function.__name__.strip("_"), context_settings=CONTEXT)(function))


_arch = click.option("-a", "--arch", callback=there, metavar="ARCH", help="Architecture (default: this machine's).")
_name = click.option("-n", "--name", callback=there, metavar="NAME", help="Container name (default: the image's).")


@command
@_arch
@click.option("-o", "--output", callback=there, metavar="FILE", help="Image file; - is stdout (default: IMAGE.sqsh).")
@click.option("--ensure", is_flag=True, help="Import only if the file is missing, is damaged or has another image.")
@force_option
@click.argument("uri")
def import_(arch: str | None, output: str | None, ensure: bool, force: bool, uri: str) -> None:
    """Import an image into a squashfs file.

    URI is docker://[USER[:PASSWORD]@][REGISTRY#]IMAGE[:TAG][@DIGEST], oci:DIR[:TAG],
    oci-archive:FILE[:TAG], docker-archive:FILE[:NAME], dockerd://IMAGE or podman://IMAGE.
    """
    from enroot_py.cli import images

    images.import_(uri, output, loaded(force=force), arch, ensure=ensure)


@command
@_name
@force_option
@click.argument("image")
def create(name: str | None, force: bool, image: str) -> None:
    """Create a container from an image.

    IMAGE is a squashfs file, or a reference such as docker://ubuntu.
    """
    options = loaded(force=force)
    if containers.is_reference(image, options):
        _create_from(image, name, options, None)
        return
    if not os.path.isfile(image):
        problem = "not an image file" if os.path.exists(image) else "no such image"
        raise ContainerError(f"{problem}: {containers.shown(image)}", hint="give a squashfs file, or docker://IMAGE")
    name = name or os.path.basename(os.path.realpath(image)).removesuffix(".sqsh")
    containers.unpack(name, image, options, force=options.force_override)
    _report(name)


@command
@_arch
@_name
@force_option
@click.argument("uri")
def load(arch: str | None, name: str | None, force: bool, uri: str) -> None:
    """Create a container from a registry, an archive or an engine.

    URI has the same forms as for import.
    """
    _create_from(uri, name, loaded(force=force), arch)


def _create_from(uri: str, name: str | None, options: Settings, arch: str | None) -> None:
    from enroot_py.registry import reference
    from enroot_py.store import pull

    ref = reference.of_command_line(uri)
    name = name or ref.filename().removesuffix(".sqsh")
    force = options.force_override
    containers.refuse_taken(name, options, force=force)  # check before the pull
    containers.create(name, pull.pull(ref, options, arch=arch).path, options, str(ref), force=force)
    _report(name)


def _report(name: str) -> None:
    log.info(f"created the container {name}: {called_as()} start {name}")


@command
@_arch
@click.argument("uri")
def digest(arch: str | None, uri: str) -> None:
    """Print the current digest of an image in its registry."""
    from enroot_py.cli import images

    click.echo(images.digest(uri, loaded(), arch))


@command
@_arch
@click.argument("image")
def inspect(arch: str | None, image: str) -> None:
    """Show digests, layers and config of an image as JSON.

    IMAGE is a URI as for import, the name of a container, or a squashfs file.
    """
    from enroot_py.cli import images

    click.echo(shown_json(images.inspect(image, loaded(), arch)))


def _confirmed(question: str) -> bool:
    """Ask the user. Raises UsageError if stdin is closed, or has no answer and is not a terminal."""
    if sys.stdin is None:
        raise UsageError("cannot prompt: stdin is closed", hint="use --force to skip the prompt")
    try:
        return click.confirm(question, err=True)
    except click.Abort:
        sys.stderr.write("\n")  # ends the line of the question
        if sys.stdin.isatty():
            raise
        raise UsageError("cannot prompt: stdin is not a terminal", hint="use --force to skip the prompt") from None


@command
@click.option("-f", "--force", is_flag=True, help="Remove without a prompt.")
@click.argument("names", nargs=-1, required=True, metavar="NAME...", shell_complete=container_names)
def remove(force: bool, names: tuple[str, ...]) -> None:
    """Delete containers with all their files.

    Also deletes the log of a container that ran in the background.
    """
    options = loaded(force=force)
    failed = False
    for name in names:
        exists = containers.check_name(name) in containers.names(options)
        record = detached.find(name, options)
        if not exists and record is None:
            log.error(f"no such container: {containers.shown(name)}")
            failed = True
        elif options.force_override or _confirmed(f"Do you really want to delete {name}?"):
            try:
                if record is not None:
                    record.remove()
                if exists:
                    containers.remove(name, options)
            except ContainerError as e:
                log.error(str(e))
                log.hint(e.hint)
                failed = True
    if failed:
        raise PenrootError("not every container was removed", hint="penroot list shows your containers")


@command
@click.option("-o", "--output", callback=there, metavar="FILE", help="Image file; - is stdout (default: NAME.sqsh).")
@force_option
@click.argument("name", shell_complete=container_names)
def export(output: str | None, force: bool, name: str) -> None:
    """Write a container to a squashfs file."""
    containers.export(name, output or f"{name}.sqsh", loaded(force=force))


def _command_of_start(name: str, text: str, argument: click.Argument) -> click.Command:
    """Return a click command that prints help and completes words, for a verb that main.py runs without click."""
    from enroot_py.cli import start

    def never() -> None:
        raise AssertionError(f"main.py runs {name} without click")

    spellings: dict[str, list[str]] = {}
    for option, attribute in {**start.FLAGS, **start.VALUES, **start.SWITCHES}.items():
        spellings.setdefault(attribute, []).append(option)
    flags = {*start.FLAGS.values(), *start.SWITCHES.values()}
    options: list[click.Parameter] = [
        click.Option([*names, attribute], is_flag=attribute in flags) for attribute, names in spellings.items()
    ]
    options += [click.Option([row.name], is_flag=not row.metavar) for row in start.feature_flags().values()]
    command_words = click.Argument(["words"], nargs=-1)
    return click.Command(name, callback=never, params=[*options, argument, command_words], help=text)


def _command_of_table(verb: quick.Verb) -> click.Command:
    """Return a click command that prints help, completes words and reports mistakes, for a verb of quick.py."""
    parameters: list[click.Parameter] = [
        click.Option(
            [*option.names, option.attribute],
            is_flag=not option.metavar,
            multiple=option.multiple,
            type=click.Choice(option.choices) if option.choices else None,
            metavar=option.metavar or None,
            callback=there,
            help=option.help,
        )
        for option in verb.options
    ]
    for argument in verb.arguments:
        parameters.append(
            click.Argument(
                [argument.name],
                metavar=argument.metavar,
                nargs=-1 if argument.many else 1,
                required=argument.required,
                type=click.UNPROCESSED if argument.many and not verb.mixed else None,
                shell_complete=container_names if argument.kind else None,
            )
        )

    def callback(**values: Any) -> None:
        sys.exit(quick.run(verb, values))

    context = {**CONTEXT, "allow_interspersed_args": verb.mixed}
    return synopsis(click.Command(verb.name, context, callback, parameters, help=verb.help))


for row in quick.VERBS.values():
    penroot.add_command(_command_of_table(row))

_target = click.Argument(["name"], shell_complete=container_names)
_config = click.Argument(["config"], type=click.Path())
for verb in (
    _command_of_start("start", "Start a container.", _target),
    _command_of_start("batch", "Start a container from a configuration script.", _config),
    *(cache, login, logout),
):
    penroot.add_command(verb)


@command
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print a completion script for SHELL.

    To load it in bash: source <(penroot completion bash)
    """
    from click import shell_completion

    kind = shell_completion.get_completion_class(shell)
    assert kind is not None
    name = _program()
    click.echo(kind(penroot, {}, name, f"_{name.upper()}_COMPLETE").source())


@penroot.command("manual", hidden=True)
@click.argument("directory", type=click.Path())
def manual_(directory: str) -> None:
    """Write the manual pages to DIRECTORY/man1 and DIRECTORY/man5, and print an example of penroot.yaml."""
    from enroot_py.cli import manual

    manual.write(manual.pages(penroot), directory)
    click.echo(manual.example(), nl=False)


@command
def info() -> None:
    """Show the version, and every setting with its origin."""
    options = settings.load()
    if called_as() == "enroot":
        _info_of_enroot(options)
        return
    click.echo(f"penroot version: {__version__}")
    files = [*settings.read_files(os.environ), *options.policies] or [
        f"none in {settings.sysconf_path()} and {options.config_path}"
    ]
    click.echo("Config files: " + " ".join(files))
    click.echo("\nEnvironment variables:")
    for variable, text, origin in sorted(options.everything()):
        click.echo(f"  {variable}={_PASSWORD.sub('//…@', text)}  ({origin})")
    if registries := list(site.origins(options)):
        click.echo("\nRegistries:")
        for line in registries:
            click.echo(f"  {line}")
    click.echo("\nHooks:")
    for hook in hooks.arrange(options, os.environ):
        click.echo(f"  {hook.describe()}")


def _info_of_enroot(options: Settings) -> None:
    """Print the settings in enroot's form, because scripts read it. Omit booleans that are off."""
    sysconf, known = settings.sysconf_path(), all_settings()
    variables = {
        **{variable: text for variable, text, _ in options.everything() if variable.startswith("ENROOT_")},
        **{key: text for key, text in os.environ.items() if key.startswith("ENROOT_") and key not in known},
        "ENROOT_LIBRARY_PATH": hooks.STANDARD,
        "ENROOT_SYSCONF_PATH": sysconf,
        "ENROOT_VERSION": ENROOT_VERSION,
    }
    click.echo(f"Enroot version: {ENROOT_VERSION}")
    click.echo(f"Config file: {sysconf}/enroot.conf")
    click.echo("\nEnvironment variables:")
    for variable, text in sorted(variables.items()):
        setting = known.get(variable)
        if setting is None or not setting.kind.startswith("bool") or setting.parse(text):
            click.echo(f"  {variable}={text}")


@command
@click.option("--json", "as_json", is_flag=True, help="Print each result as a JSON object in one line.")
@click.option("--user", metavar="NAME", help="Run the checks as this user (root only).")
def doctor(as_json: bool, user: str | None) -> None:
    """Check whether this machine can run containers.

    Prints a fix for each problem, and exits with 1 if a result is bad. On a node of a Slurm cluster run pyxis-py check.
    """
    from enroot_py.cli import asuser
    from enroot_py.cli import doctor as checks
    from enroot_py.cli.findings import report

    results = checks.findings(loaded) if user is None else asuser.findings(user)
    if not report(results, as_json=as_json):
        click.get_current_context().exit(1)


@command
def version() -> None:
    """Show the version."""
    click.echo(enroot_py.version())


@command
@click.argument("verb", required=False)
@click.pass_context
def help_(ctx: click.Context, verb: str | None) -> None:
    """Show help for a command."""
    if verb in ("start", "batch"):
        from enroot_py.cli import start

        click.echo(start.usage(verb), nl=False)
    elif verb:
        ctx.exit(main([verb, "--help"]))
    else:
        assert ctx.parent is not None
        click.echo(ctx.parent.get_help())


section(RUN, *(penroot.commands[name] for name in ("batch", "create", "remove", "start", *quick.VERBS)))
section(IMAGES, *(penroot.commands[name] for name in ("digest", "export", "import", "inspect", "load")))
section(CACHE, cache)
for feature in plugged("verbs"):
    feature.add(penroot)
