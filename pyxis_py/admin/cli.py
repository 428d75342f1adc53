"""``pyxis-py``: build, install, check and uninstall the SPANK plugin."""

from __future__ import annotations

import glob
import os
import sys
import tempfile
from collections.abc import Callable, Sequence

import click

from enroot_py import LIBRARY
from enroot_py.base import log, pack, versions
from enroot_py.base.build import line as build_line
from enroot_py.base.errors import ConfigError, PenrootError
from enroot_py.base.features import plugged
from enroot_py.base.run import Program, find
from pyxis_py.admin import plugstack, prebuilt
from pyxis_py.admin.header import c_header
from pyxis_py.request import settings
from pyxis_py.request.settings import PLUGIN

# Export only the symbols that Slurm looks up: Slurm loads all plugins into one process.
CFLAGS = "-std=gnu11 -shared -fPIC -O2 -g -Wall -Wextra -Werror -fvisibility=hidden".split()
_LIBRARY = os.path.realpath(LIBRARY)
_INCLUDES = ("/usr/include", "/usr/local/include", "/opt/slurm/include")


def library_directory(prefix: str | None) -> str:
    """Return the directory of the Python packages, which the plugin adds to sys.path.

    Raises ConfigError if penroot is not installed in PREFIX.
    """
    if prefix is None:
        link = versions.link(_LIBRARY)
        return link if os.path.exists(link) else _LIBRARY  # the link is missing until a version is in use
    directory = os.path.join(os.path.abspath(prefix), "lib/penroot")
    if not os.path.exists(f"{directory}/pyxis_py/__init__.py"):
        raise ConfigError(f"no penroot in {directory}", hint=f"first: make install PREFIX={prefix}")
    return directory


def source_directory() -> str:
    """Return the directory of the C files, which differs between a wheel and a source tree. Raises ConfigError."""
    for directory in (f"{_LIBRARY}/pyxis_py/c_shims/spank", f"{_LIBRARY}/c_shims/spank"):
        if os.path.exists(f"{directory}/plugin.c"):
            return directory
    raise ConfigError(f"the sources of the plugin are not in {_LIBRARY}", hint="install penroot again")


def sources_in(directory: str) -> list[str]:
    """Return the C files of the plugin."""
    return sorted(glob.glob(f"{directory}/*.c"))


def find_slurm(prefix: str | None) -> str:
    """Return the directory that holds slurm/spank.h. Raises ConfigError."""
    for directory in (prefix,) if prefix else _INCLUDES:
        if os.path.exists(f"{directory}/slurm/spank.h"):
            return directory
    raise ConfigError(
        f"slurm/spank.h is not in {prefix or ', '.join(_INCLUDES)}",
        hint="install the package libslurm-dev or slurm-devel, or name the directory: --slurm-include DIR",
    )


def check_for_users(path: str, purpose: str) -> None:
    """Raise ConfigError if ordinary users cannot read or enter ``path``: a job runs it as the job's user."""
    if not os.path.exists(path):
        raise ConfigError(f"{purpose} {path} does not exist")
    at = os.path.realpath(path)
    while at != "/":
        mode = os.stat(at).st_mode
        if not mode & 0o001 and (at != os.path.realpath(path) or not mode & 0o004):
            raise ConfigError(
                f"{purpose} {path}: {at} is closed to ordinary users",
                hint="let every user read and enter it, because a job runs it as the job's user",
            )
        at = os.path.dirname(at)


def build(output: str, *, python: str, library: str, include: str) -> None:
    """Compile the plugin, and replace ``output`` by rename, because slurmd may have the old file mapped.

    Raises PenrootError with the last lines of the compiler.
    """
    for path, purpose in ((python, "the interpreter"), (library, "the packages' directory")):
        if not os.path.isabs(path) or any(c in path for c in "\"'\\\n"):
            raise ConfigError(
                f"{purpose} {path}: must be an absolute path, and have no quotes, backslashes or line breaks"
            )
        check_for_users(path, purpose)
    compile_plugin(output, include, f'-DPENROOT_PYTHON="{python}"', f'-DPENROOT_LIB="{library}"')


def compile_plugin(output: str, include: str, *flags: str) -> None:
    """Compile the plugin with these flags. Without -DPENROOT_LIB, the plugin searches for the packages when loaded.

    Raises PenrootError with the last lines of the compiler.
    """
    directory = os.path.dirname(os.path.abspath(output))
    if os.path.isdir(output) or not os.path.isdir(directory):
        raise ConfigError(f"{output} is not a writable file", hint="use a file in an existing directory")
    sources = source_directory()
    compiler = find(os.environ.get("CC") or "cc", package="gcc")
    with tempfile.TemporaryDirectory(prefix=".spank-", dir=directory) as work:
        with open(f"{work}/options.h", "w") as header:
            header.write(c_header())
        Program(
            [
                compiler,
                *CFLAGS,
                *flags,
                *(f"-I{directory}" for directory in (work, sources, os.path.dirname(sources), include)),
                *sources_in(sources),
                *("-o", f"{work}/{PLUGIN}"),
            ]
        ).run()
        os.chmod(f"{work}/{PLUGIN}", 0o755)
        os.rename(f"{work}/{PLUGIN}", output)


def compiling(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that all compiling commands share."""
    for option in (
        click.option("--slurm-include", metavar="DIR", help="Directory with slurm/spank.h of Slurm 22.05 or later."),
        click.option(
            "--python",
            metavar="FILE",
            default=sys.executable,
            help="Interpreter for the steps (default: the interpreter of pyxis-py).",
        ),
        click.option(
            "--prefix", metavar="PREFIX", help="Prefix of the installation (default: the prefix of pyxis-py)."
        ),
    ):
        command = option(command)
    return command


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(build_line(), message="%(version)s")
def commands() -> None:
    """Install penroot's SPANK plugin, which gives srun, sbatch and salloc their --container options."""


@commands.command("build")
@click.option("--output", metavar="FILE", required=True, help="Write the plugin to FILE.")
@compiling
def build_command(output: str, slurm_include: str | None, python: str, prefix: str | None) -> None:
    """Build spank_pyxis.so against this machine's Slurm headers."""
    include = find_slurm(slurm_include)
    build(output, python=python, library=library_directory(prefix), include=include)
    log.info(f"built {output}")


@commands.command("install")
@click.option("--plugstack-dir", metavar="DIR", default=f"{plugstack.DIRECTORY}/plugstack.conf.d", show_default=True)
@click.option(
    "--arg", "arguments", metavar="NAME=VALUE", multiple=True, help="Set an argument of the plugin (may be repeated)."
)
@compiling
def install_command(
    plugstack_dir: str, arguments: tuple[str, ...], slurm_include: str | None, python: str, prefix: str | None
) -> None:
    """Install the plugin and enable it in Slurm.

    Uses the prebuilt plugin for this Slurm release if there is one, else compiles the plugin.
    """
    settings.load(arguments)
    main = plugstack.main_file(plugstack_dir)
    if not plugstack.is_copy(main):
        plugstack.check_place(plugstack_dir)
    library = library_directory(prefix)
    plugin = f"{library}/{PLUGIN}"
    if slurm_include or not (release := _take_prebuilt(library, python)):
        build(plugin, python=python, library=library, include=find_slurm(slurm_include))
        log.info(f"built {plugin}")
    else:
        log.info(f"{plugin} is the prebuilt plugin for Slurm {release}")
    if not _load(main, plugstack_dir, plugin, arguments):
        sys.exit(1)


def _take_prebuilt(library: str, python: str) -> str | None:
    """Select a prebuilt plugin. Return its Slurm release, or None if the plugin must be compiled."""
    if python != sys.executable or not prebuilt.releases(library):
        return None
    check_for_users(library, "the packages' directory")
    _compile_modules()
    return prebuilt.take(library)


def _compile_modules() -> None:
    """Compile the modules of an unpacked release archive for this Python, if that was not done before."""
    if os.path.exists(pack.MODULES) and not os.path.exists(pack.PACK):
        from enroot_py.base import packing

        packing.write()


def _load(main: str, directory: str, plugin: str, arguments: Sequence[str]) -> bool:
    """Make the plugstack.conf ``main`` load the plugin. Return False if an admin must still add a line to ``main``."""
    if plugstack.is_sent(main):
        plugstack.configure_sent(main, plugin, arguments)
        log.info(f"loaded by {main}, which slurmctld sends to nodes: run scontrol reconfigure when all have {plugin}")
    elif plugstack.reads(main, directory) or not plugstack.is_copy(main):
        file = plugstack.configure(directory, plugin, arguments)
        is_read = plugstack.reads(main, directory)
        log.info(f"loaded by {file}" if is_read else f"wrote {file}")
        if not is_read:
            problem = "does not include that file" if os.path.exists(main) else "does not exist"
            log.error(f"{main} {problem}: Slurm does not load the plugin yet")
            log.hint(f"add the line to {main}: include {os.path.abspath(directory)}/*")
            return False
    elif any(line.path == plugin for line in plugstack.stack(main)):
        log.info(f"loaded by {main} ({plugin})")
    else:
        log.warn(f"{main} comes from slurmctld and does not load the plugin")
        log.hint(plugstack.HINT)
    return True


@commands.command("check")
@click.option("--plugstack", metavar="FILE", help="plugstack.conf to check (default: the one that Slurm reads).")
@click.option(
    "--nodes", metavar="LIST", help="Only test whether these nodes can connect to each other and to this host."
)
def check_command(plugstack: str | None, nodes: str | None) -> None:
    """Check whether this node can run container steps.

    Prints a fix for each problem, and exits with 1 if there is any. With --nodes, starts a step on these nodes. The
    step tries the connections that nodes need to share an image. If swarm_network is set, only its networks are used.
    Nodes connect to this host at SrunPortRange.
    """
    from enroot_py.cli.findings import report
    from pyxis_py.admin import check

    if not report(check.findings_of_nodes(plugstack, nodes) if nodes else check.findings(plugstack)):
        sys.exit(1)


@commands.command("uninstall")
@click.option("--plugstack-dir", metavar="DIR", default=f"{plugstack.DIRECTORY}/plugstack.conf.d", show_default=True)
@click.option("--prefix", metavar="PREFIX", help="Prefix of the installation (default: the prefix of pyxis-py).")
def uninstall_command(plugstack_dir: str, prefix: str | None) -> None:
    """Disable the plugin in Slurm and remove it.

    Containers and images stay.
    """
    plugin = f"{library_directory(prefix)}/{PLUGIN}"
    plugstack.check_unused(plugin, plugstack_dir)
    main = plugstack.main_file(plugstack_dir)
    removed = [*plugstack.unconfigure(plugstack_dir, plugin), *plugstack.unconfigure_sent(main, plugin)]
    if os.path.lexists(plugin):
        os.unlink(plugin)
        removed.append(plugin)
    for path in removed:
        log.info(f"removed {path}")
    if removed and plugstack.is_sent(main):
        log.hint("run scontrol reconfigure: the nodes still have the old copy of plugstack.conf")
    if not removed:
        log.info(f"nothing to remove: {plugin} does not exist, and no file in {plugstack_dir} loads it")


@commands.command("choose", hidden=True)
def choose_command() -> None:
    """Select the prebuilt plugin for this machine's Slurm, for package scripts and recipes."""
    _compile_modules()
    prebuilt.choose(_LIBRARY)


@commands.command("manual", hidden=True)
@click.argument("directory", type=click.Path())
def manual_command(directory: str) -> None:
    """Write the manual pages of the plugin to man1 and man7 of DIRECTORY, for make install."""
    from pyxis_py.admin import manual

    manual.write(commands, directory)


def main() -> None:
    """Entry point of ``pyxis-py``."""
    try:
        commands(standalone_mode=False)
    except PenrootError as e:
        log.error(str(e))
        if e.hint:
            log.hint(e.hint)
        sys.exit(e.exit_code)
    except OSError as e:
        if e.filename is None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the buffered output would fail again at exit
        log.error(f"cannot write or read {e.filename or 'the output'}: {e.strerror}")
        if isinstance(e, PermissionError):
            log.hint("run this command as root: Slurm loads only files of root")
        sys.exit(1)
    except click.exceptions.NoArgsIsHelpError as e:
        e.show()
        sys.exit(e.exit_code)
    except click.UsageError as e:
        log.error(" ".join(e.format_message().split()).rstrip("."))
        log.hint(f"{e.ctx.command_path if e.ctx else 'pyxis-py'} --help")
        sys.exit(e.exit_code)
    except click.exceptions.Abort:
        sys.exit(130)


for feature in plugged("admin"):
    feature.add(commands)


if __name__ == "__main__":
    main()
