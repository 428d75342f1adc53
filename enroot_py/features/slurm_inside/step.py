"""Slurm's programs in the container of a step, including a container that another step has started."""

from __future__ import annotations

from enroot_py.features.slurm_inside.options import SLURM

TYPE_CHECKING = False
if TYPE_CHECKING:
    from enroot_py.features.slurm_inside.programs import Programs
    from pyxis_py.node.held import Held
    from pyxis_py.node.step import Step


def settings(step: Step) -> dict[str, object]:
    """Return the step settings that this feature sets."""
    return {"slurm": step.request.value(SLURM)}


def attach(step: Step, held: Held) -> Programs | None:
    """Return the programs to add to a running container that a step joins; None if not requested or already there."""
    from enroot_py.config.settings import BIN as SLURM_BIN
    from enroot_py.features.slurm_inside.settings import InsideSettings

    search = held.environ.get("PATH", "")
    if not InsideSettings(step.settings).slurm or SLURM_BIN in search.split(":"):
        return None
    from enroot_py.features.slurm_inside import programs, slurm

    if held.remap_root:
        slurm.warn_root()
    held.environ = {**held.environ, "PATH": f"{SLURM_BIN}:{search}" if search else SLURM_BIN}
    return programs.Programs(step)
