"""Manual pages of the plugin, generated from its commands, options and arguments."""

from __future__ import annotations

from collections.abc import Iterator

import click

from enroot_py.cli import manual
from enroot_py.config.words import YES
from pyxis_py.request.options import all_options
from pyxis_py.request.settings import all_settings

EXAMPLES = (
    ("srun --container-image=ubuntu:24.04 grep PRETTY /etc/os-release", "Run a command in a Docker Hub image."),
    (
        "srun -N4 --mpi=pmix --container-image=nvcr.io#nvidia/pytorch:24.05-py3 --container-mounts=/data:/data:ro "
        "python train.py",
        "Run an MPI job in an image of another registry, with a directory of the node mounted read-only.",
    ),
    (
        "srun --container-image=ubuntu --container-name=work --container-remap-root --container-writable "
        "apt-get install -y git",
        "Install a package in a container that stays on the node. Use it later: srun --container-name=work git status",
    ),
    (
        "srun -N16 --container-image=bcast:./mine.sqsh ./program",
        "Send a squashfs file from this host to sixteen nodes and run it there.",
    ),
    (
        "srun --container-image=./mine.sqsh --container-save=./changed.sqsh --container-writable ./change",
        "Change the content of a squashfs file, and save the result in another file.",
    ),
)
MEANING = """\
These options run the tasks of a step in a container if Slurm loads the penroot plugin. All tasks of the step on a node
share one container. --container-image, --container-name or --environment selects the container. Without any of them,
srun ignores the other options, and warns about all except --container-pin and --container-lock. Invalid options are
reported before the job is queued.

An image is a registry reference, in the form of penroot-import(1) with or without docker://, or the path of a squashfs
file on the node. In an #SBATCH line, # begins a comment even within a word: write REGISTRY/IMAGE or \\# there. A path
after bcast: is a path on the host of srun, which sends the file to each node that does not have it in its store. sbatch
refuses bcast:, but an srun in the batch script accepts it.

NAME in --container-name may be followed by a mode, as in NAME:exec. The mode auto (the default) uses the existing
container, running or not, or creates it. The mode create creates a container, and fails if it exists. The mode
exec enters the running container, and fails if none runs. The mode no_exec starts a separate container on the same
files.

In --container-mounts, write a backslash before a comma, a colon or a space that is part of a path. $NAME and ${NAME}
are replaced by the job's variables. Relative sources begin with a dot. penroot-start(1) lists the flags under --mount.
If SRC is the word umount, as in umount:/data, nothing is mounted. Instead, the mount that the image or the site has at
DST is removed. The flag sqsh mounts the content of a squashfs file read-only: data.sqsh:/data:sqsh.

Tasks get the variables of the job. If the image sets a variable too, the value of the image takes precedence, unless
--container-env names the variable.
"""
VARIABLES = f"""\
Each variable sets the value of an option that is not on the command line. If the option takes no value, set the
variable to {YES[1]} or false.
"""
SEE = "penroot(1), penroot-env(1), penroot-lock(1), penroot.yaml(5), pyxis-py(1), srun(1), sbatch(1)"


def write(commands: click.Group, directory: str) -> list[str]:
    """Write the pages to man1 and man7 of ``directory``, and return their paths. Raises OSError."""
    return manual.write(pages(commands), directory)


def pages(commands: click.Group) -> Iterator[tuple[str, str]]:
    """Yield the name and the source of each page."""
    rows = [
        (f"{setting.name}={setting.default}", f"{setting.doc} ({setting.kind}).") for setting in all_settings().values()
    ]
    arguments = manual.section(
        "ARGUMENTS OF THE PLUGIN",
        manual.text(
            "Write them after the plugin in plugstack.conf, or use install --arg. The values below are defaults."
        )
        + manual.entries(rows),
    )
    yield "pyxis-py.1", manual.command_page("pyxis-py", commands, "penroot-srun(7), penroot(1), spank(7)", arguments)
    yield "penroot-srun.7", _options_page()


def _options_page() -> str:
    options, variables = [], []
    for option in all_options():
        example = f" For example --{option.name}={option.example}." if option.example else ""
        options.append((f"--{option.name}" + f"={option.arginfo}" * bool(option.arginfo), f"{option.usage}.{example}"))
        if option.variable:
            variables.append((option.variable, f"--{option.name}"))
    return "".join(
        (
            manual.title("penroot-srun", 7, "container options of srun, sbatch and salloc"),
            manual.section("SYNOPSIS", manual.text("srun --container-image=IMAGE [OPTION...] COMMAND")),
            manual.section("DESCRIPTION", manual.text(MEANING)),
            manual.section("OPTIONS", manual.entries(options)),
            manual.section("ENVIRONMENT", manual.text(VARIABLES) + manual.entries(variables)),
            *manual.sections_of_features("penroot-srun.7"),
            manual.section("EXAMPLES", manual.entries(EXAMPLES)),
            manual.section("SEE ALSO", manual.text(SEE)),
        )
    )
