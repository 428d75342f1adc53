"""Manual pages of the plugin, made of what its commands, options and arguments say of themselves."""

from __future__ import annotations

from collections.abc import Iterator

import click

from enroot_py.cli import manual
from enroot_py.config.words import YES
from pyxis_py.request.options import NAME_MODES, all_options
from pyxis_py.request.settings import all_settings

EXAMPLES = (
    ("srun --container-image=ubuntu:24.04 grep PRETTY /etc/os-release", "A command in an image of Docker Hub."),
    (
        "srun -N4 --mpi=pmix --container-image=nvcr.io#nvidia/pytorch:24.05-py3 --container-mounts=/data:/data:ro "
        "python train.py",
        "An MPI job in an image of another registry, with data of the node.",
    ),
    (
        "srun --container-image=ubuntu --container-name=work --container-remap-root --container-writable "
        "apt-get install -y git",
        "A container that stays on the node, with what is installed in it; then: srun --container-name=work git status",
    ),
    (
        "srun -N16 --container-image=bcast:./mine.sqsh ./program",
        "A squashfs file that only this host has, on sixteen nodes.",
    ),
    (
        "srun --container-image=./mine.sqsh --container-save=./changed.sqsh --container-writable ./change",
        "From one squashfs file to another.",
    ),
)
MEANING = f"""\
Where Slurm loads the plugin of penroot, these options give the tasks of a step a container: one on each node, which
they share. --container-image, --container-name or --environment says which; without one of them the others are
ignored, and srun says so. What is wrong in an option is told before the job is queued.

An image is a reference to a registry, as penroot-import(1) takes it with or without docker://, or the path of a
squashfs file on the node. As # begins a comment in a batch script, write REGISTRY/IMAGE there, or \\#. With bcast:
before it the path is one on the host of srun, which sends the file to the nodes that do not have it in their stores;
sbatch takes none of those, but an srun in its script does.

NAME in --container-name may be followed by {", ".join(":" + mode for mode in NAME_MODES)}: use the container that
there is, running or not, or make it; make it, and fail where it exists; go into a running one, and fail where none
runs; start one of one's own on its files.

In --container-mounts a backslash before a comma, a colon or a space takes it as part of a path. $NAME and $${{NAME}}
are replaced by the job's variables, relative sources begin with a dot, and flags are those of penroot-start(1):
--mount. The source umount unmounts what the image or the site mounts at DST. The flag sqsh mounts what a squashfs file
holds, read-only: data.sqsh:/data:sqsh.

Variables of the job reach the tasks, but what the image sets wins; --container-env says for which it does not.
""".replace("$$", "$")
SEE = "penroot(1), penroot-env(1), penroot-lock(1), penroot.yaml(5), pyxis-py(1), srun(1), sbatch(1)"


def write(commands: click.Group, directory: str) -> list[str]:
    """Write the pages to man1 and man7 of ``directory``, and return their paths. Raises OSError."""
    return manual.write(pages(commands), directory)


def pages(commands: click.Group) -> Iterator[tuple[str, str]]:
    """Name and source of every page."""
    rows = [
        (f"{setting.name}={setting.default}", f"{setting.doc} ({setting.kind}).") for setting in all_settings().values()
    ]
    arguments = manual.section(
        "ARGUMENTS OF THE PLUGIN",
        manual.text("In plugstack.conf(5) behind the plugin, or with install --arg; here with their defaults.")
        + manual.entries(rows),
    )
    yield "pyxis-py.1", manual.command_page("pyxis-py", commands, "penroot-srun(7), penroot(1), spank(8)", arguments)
    yield "penroot-srun.7", _options_page()


def _options_page() -> str:
    options, variables = [], []
    for option in all_options():
        example = f" For example --{option.name}={option.example}." if option.example else ""
        options.append((f"--{option.name}" + f"={option.arginfo}" * bool(option.arginfo), f"{option.usage}.{example}"))
        if option.variable:
            value = f"{YES[1]} or false" if option.parse is None else "the same"
            variables.append((option.variable, f"{value}, if no option is given."))
    return "".join(
        (
            manual.title("penroot-srun", 7, "container options of srun, sbatch and salloc"),
            manual.section("SYNOPSIS", manual.text("srun --container-image=IMAGE [OPTION...] COMMAND")),
            manual.section("DESCRIPTION", manual.text(MEANING)),
            manual.section("OPTIONS", manual.entries(options)),
            manual.section("ENVIRONMENT", manual.entries(variables)),
            *manual.sections_of_features("penroot-srun.7"),
            manual.section("EXAMPLES", manual.entries(EXAMPLES)),
            manual.section("SEE ALSO", manual.text(SEE)),
        )
    )
