"""The options of srun, sbatch and salloc that bring Slurm's programs into the container, or not."""

from __future__ import annotations

from pyxis_py.request.options import Option

SLURM = Option(
    "container-slurm",
    "slurm",
    "make srun, sbatch, squeue and so on of the node available in the container",
    value=True,
    annotated=True,
)
OPTIONS = (
    SLURM,
    Option("no-container-slurm", "slurm", "do not make Slurm commands available in the container", value=False),
)
