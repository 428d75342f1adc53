"""The options of srun, sbatch and salloc that name an environment file.

--environment is the option of pyxis at CSCS, and --edf the option of Sarus Suite.
"""

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
EDF = Option(
    "edf",
    "environment",
    "the same as --environment",
    parse=file_name,
    arginfo="NAME|FILE",
    example="ubuntu",
    selects=True,
    describes=True,
    variable=ENVIRONMENT.variable,  # not PYXIS_EDF, which has the content of a file
)
OPTIONS = (ENVIRONMENT, EDF)
