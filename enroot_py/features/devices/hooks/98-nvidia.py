"""Add the NVIDIA GPUs that --device, NVIDIA_VISIBLE_DEVICES or Slurm selects."""

from __future__ import annotations

from enroot_py.config.words import NO

TYPE_CHECKING = False
if TYPE_CHECKING:
    from enroot_py.runtime.edits import Edits
    from enroot_py.runtime.hooks import Context

KIND = "nvidia.com/gpu"


def run(context: Context) -> None:
    visible, allocated = wanted(context)
    if visible or allocated:
        plan(context, visible, allocated).execute(context)


def by_option(context: Context) -> str:
    """Return the GPUs that the caller selects by CDI name: with --device, or in ENROOT_DEVICES."""
    if not context.settings.is_extended:
        return ""
    from enroot_py.features.devices.settings import named

    names = named(context.settings)
    return ",".join(name.removeprefix(KIND + "=") for name in names if name.startswith(KIND + "="))


def wanted(context: Context) -> tuple[str, str]:
    """Return the selected GPUs and the numbers of the GPUs that Slurm allocated; each may be empty."""
    visible = by_option(context) or context.value("NVIDIA_VISIBLE_DEVICES")
    if visible == "void":
        return "", ""
    # PENROOT_* is read from the caller's environment only: an image must not control what happens on the host.
    if visible == "none" or (context.host.get("PENROOT_SLURM_GPUS") or "yes").lower() in NO:
        return visible, ""
    if not context.host.keys() & {"SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "SLURM_GPUS_ON_NODE"}:
        return visible, ""
    from enroot_py.features.devices import allocation

    by_caller = by_option(context) or "NVIDIA_VISIBLE_DEVICES" in context.host
    if allocation.is_withheld(context.host) and not by_caller:
        return "", ""  # the image must not select GPUs that the step lacks
    return visible, allocation.gpu_numbers(context.host)


def plan(context: Context, visible: str, allocated: str) -> Edits:
    """Return the container's edits for these GPUs. Raises HookError."""
    from enroot_py.features.devices.nvidia.plan import Plan

    return Plan(context, visible, by_option=bool(by_option(context))).build(allocated)
