"""The plugin's argument for pinned tags."""

from __future__ import annotations

from enroot_py.config.table import Bool, FeatureTable, rows


class PinArguments(FeatureTable):
    pin_tags = Bool("1", "resolve tags in sbatch and salloc for all steps of the job")


ARGUMENTS = rows(PinArguments)
