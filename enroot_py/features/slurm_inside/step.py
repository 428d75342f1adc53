"""Slurm's programs in the container of a step, also in one that another step has started."""

from __future__ import annotations

from enroot_py.features.slurm_inside.options import SLURM

TYPE_CHECKING = False
if TYPE_CHECKING:
    from enroot_py.features.slurm_inside.programs import Programs
    from pyxis_py.node.held import Held
    from pyxis_py.node.step import Step


def settings(step: Step) -> dict[str, object]:
    """Return the settings of a step that this feature changes."""
    return {"slurm": step.request.value(SLURM)}


def attach(step: Step, held: Held) -> Programs | None:
    """What a running container gets when a step joins it; another step may have brought it already."""
    from enroot_py.config.settings import BIN
    from enroot_py.features.slurm_inside.settings import InsideSettings

    search = held.environ.get("PATH", "")
    if not InsideSettings(step.settings).slurm or BIN in search.split(":"):
        return None
    from enroot_py.features.slurm_inside import programs, slurm

    if held.remap_root:
        slurm.warn_root()
    held.environ = {**held.environ, "PATH": f"{BIN}:{search}" if search else BIN}
    return programs.Programs(step)
