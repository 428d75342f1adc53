"""The argument of the plugin that lets jobs have tags pinned."""

from __future__ import annotations

from enroot_py.config.table import Bool, FeatureTable, rows


class PinArguments(FeatureTable):
    pin_tags = Bool("1", "let sbatch and salloc resolve the tag of an image for all steps of their job")


ARGUMENTS = rows(PinArguments)
