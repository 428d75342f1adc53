"""Add Slurm's programs to a starting container."""

from __future__ import annotations

from enroot_py.features.slurm_inside.settings import SETTINGS, InsideSettings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from enroot_py.runtime.hooks import Context


def finish(context: Context) -> str:
    """Add the programs if requested, and return the origin of the setting. Otherwise return "".

    This runs last, so that no mount of the caller covers the programs.
    """
    if not InsideSettings(context.settings).slurm:
        return ""
    from enroot_py.features.slurm_inside import slurm

    origin = context.settings.origin(SETTINGS["ENROOT_SLURM"])
    slurm.add_slurm(context, origin)
    return origin
