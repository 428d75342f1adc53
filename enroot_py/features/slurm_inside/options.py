"""The options of srun, sbatch and salloc for Slurm commands in the container."""

from __future__ import annotations

from pyxis_py.request.options import Option

SLURM = Option(
    "container-slurm",
    "slurm",
    "make the node's Slurm commands available in the container",
    value=True,
    annotated=True,
)
OPTIONS = (
    SLURM,
    Option("no-container-slurm", "slurm", "do not add the node's Slurm commands to the container", value=False),
)
