"""The argument of the plugin that lets jobs have tags pinned."""

from __future__ import annotations

from pyxis_py.settings import PluginSetting

PIN_TAGS = PluginSetting(
    "pin_tags", "1", "let sbatch and salloc resolve the tag of an image for all steps of their job"
)
ARGUMENTS = (PIN_TAGS,)
