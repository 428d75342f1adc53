"""The option of srun, sbatch and salloc that names an environment file."""

from __future__ import annotations

from pyxis_py.request.options import Option, file_name

ENVIRONMENT = Option(
    "environment",
    "environment",
    "environment file that describes the container: a path with a /, or a name that is searched in EDF_PATH",
    parse=file_name,
    arginfo="NAME|FILE",
    example="ubuntu",
    selects=True,
    describes=True,
)
OPTIONS = (ENVIRONMENT,)
