"""Manual pages about environment files."""

from __future__ import annotations

from enroot_py.features.environments import edf_parser

_FILES = """\
An environment file is TOML, as CSCS has it. It is named by a path with a /, or by its name in a directory of EDF_PATH,
without which that is ~/.edf. ${NAME} and ${NAME:-TEXT} are replaced by variables of the caller, in env by those of the
image first; $$ is a dollar. Options of the command line go before what a file says, and that before its bases.
"""
_STEPS = """\
An environment file, --environment, says the same in a file that a team shares: penroot-env(1) has its keys. It is read
where srun, sbatch or salloc is called, and what it says goes with the step, with a batch job through each requeue as it
was then; nodes need not see it. Options of the command line go before it, and it goes before variables PYXIS_*.
"""
_KEYS = tuple((example, f"{meaning[0].upper()}{meaning[1:]}.") for _, example, meaning in edf_parser.KEYS.values())
_PLACES = (
    ("EDF_PATH", "Directories of environment files, separated by colons, if not ~/.edf."),
    ("~/.edf/*.toml", "Environment files, which penroot-env(1) describes."),
)
EXAMPLES = {
    "env": (
        ("penroot env render ubuntu", "Show ~/.edf/ubuntu.toml merged with its bases, with the origin of each value."),
        ("penroot env validate ./*.toml", "Check files."),
        (
            "penroot start --environment ubuntu ls",
            "Run a command in that environment, as srun --environment=ubuntu does.",
        ),
    ),
}
SECTIONS = (
    ("penroot.1", "ENVIRONMENT FILES", "", _PLACES),
    ("penroot-env.1", "KEYS OF A FILE", _FILES, _KEYS),
    (
        "penroot-srun.7",
        "ENVIRONMENT FILES",
        _STEPS,
        (("srun --environment=pytorch python train.py", "Use image, mounts and variables of ~/.edf/pytorch.toml."),),
    ),
)
