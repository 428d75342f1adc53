"""The options of srun, sbatch and salloc that bring Slurm's programs into the container, or not."""

from __future__ import annotations

from pyxis_py.request.options import Option

SLURM = Option(
    "container-slurm",
    "slurm",
    "bring srun, sbatch, squeue and their like of the node",
    value=True,
    annotated=True,
)
OPTIONS = (SLURM, Option("no-container-slurm", "slurm", "do not bring Slurm's programs of the node", value=False))
