"""The setting that brings Slurm's programs into containers."""

from __future__ import annotations

from enroot_py.config.table import Bool, FeatureTable, rows


class InsideSettings(FeatureTable):
    slurm = Bool(
        "no",
        "make srun, sbatch, squeue and so on of the node available in containers of any distribution",
        annotated=True,
    )


SETTINGS = rows(InsideSettings)
