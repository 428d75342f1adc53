"""Manual pages about environment files."""

from __future__ import annotations

from enroot_py.features.environments import edf_parser

_FILES = """\
An environment file is a TOML file in the format of CSCS. Give its path (with a /), or its name in a directory of
EDF_PATH (default: ~/.edf). ${NAME} and ${NAME:-TEXT} are replaced by the value of the caller's variable. In [env],
variables of the image take precedence over the caller's. Write $$ for a dollar sign. Precedence of settings, highest
first: the command line, the file, its bases.
"""
_STEPS = """\
An environment file (--environment) holds these options, so that a team can share them. penroot-env(1) lists the keys.
srun, sbatch and salloc read the file and send its content with the job or step: nodes need no access to the file, and
a requeued batch job keeps the old content. Precedence, highest first: the command line, the file, PYXIS_* variables.
"""
_KEYS = tuple((example, f"{meaning[0].upper()}{meaning[1:]}.") for _, example, meaning in edf_parser.KEYS.values())
_PLACES = (
    ("EDF_PATH", "Directories of environment files, separated by colons (default: ~/.edf)."),
    ("~/.edf/*.toml", "Environment files: penroot-env(1)."),
)
EXAMPLES = {
    "env": (
        ("penroot env render ubuntu", "Show ~/.edf/ubuntu.toml merged with its bases, with the origin of each value."),
        ("penroot env validate ./*.toml", "Check files."),
        (
            "penroot start --environment ubuntu ls",
            "Run a command in the environment of ~/.edf/ubuntu.toml.",
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
