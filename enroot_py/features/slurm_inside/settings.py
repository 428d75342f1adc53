"""The setting that brings Slurm's programs into containers."""

from __future__ import annotations

from enroot_py.config.table import Bool, FeatureTable, rows


class InsideSettings(FeatureTable):
    slurm = Bool(
        "no",
        "give containers the node's srun, sbatch, squeue and their like, in whatever distribution",
        annotated=True,
    )


SETTINGS = rows(InsideSettings)
