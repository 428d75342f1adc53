"""The setting for Slurm commands in containers."""

from __future__ import annotations

from enroot_py.config.table import Bool, FeatureTable, rows


class InsideSettings(FeatureTable):
    slurm = Bool(
        "no",
        "make the node's Slurm commands available in containers of any distribution",
        annotated=True,
    )


SETTINGS = rows(InsideSettings)
