"""Slurm's programs in a container that starts."""

from __future__ import annotations

from enroot_py.features.slurm_inside.settings import SETTINGS, InsideSettings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from enroot_py.runtime.hooks import Context


def finish(context: Context) -> str:
    """Bring the programs if they are asked for, last, so that no mount of the caller covers them; return by what."""
    if not InsideSettings(context.settings).slurm:
        return ""
    from enroot_py.features.slurm_inside import slurm

    origin = context.settings.origin(SETTINGS["ENROOT_SLURM"])
    slurm.bring(context, origin)
    return origin
