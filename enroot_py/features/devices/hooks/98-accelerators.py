"""Add AMD GPUs, Intel GPUs and Gaudi devices that Slurm, AMD_VISIBLE_DEVICES or HABANA_VISIBLE_DEVICES selects."""

from __future__ import annotations

from enroot_py.config.words import NO

TYPE_CHECKING = False
if TYPE_CHECKING:
    from enroot_py.runtime.edits import Edits
    from enroot_py.runtime.hooks import Context

_VISIBLE = ("AMD_VISIBLE_DEVICES", "HABANA_VISIBLE_DEVICES")
_SLURM_VARIABLES = frozenset(("SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "SLURM_GPUS_ON_NODE"))


def run(context: Context) -> None:
    if not _SLURM_VARIABLES.isdisjoint(context.host) or any(map(context.value, _VISIBLE)):
        for edits in plans(context):
            edits.execute(context)


def plans(context: Context) -> list[Edits]:
    """Return the container's edits for each vendor's devices. Raises HookError."""
    from enroot_py.features.devices import accelerators, allocation
    from enroot_py.features.devices.settings import named
    from enroot_py.runtime.edits import Host

    host, devices = Host.of(context.host), named(context.settings)
    by_slurm = (context.host.get("PENROOT_SLURM_GPUS") or "yes").lower() not in NO
    if host.exists("/proc/driver/nvidia"):
        by_slurm = False  # then Slurm numbers NVIDIA GPUs, which 98-nvidia adds
    allocated = allocation.gpu_numbers(context.host) if by_slurm else ""
    by_folder: dict[str, Edits] = {}  # one vendor for each folder, because Slurm's numbers are of one vendor
    for vendor in accelerators.VENDORS:
        # Nodes or devices that the caller adds with --device take precedence.
        if any(word in device for word in (vendor.folder, vendor.name, *vendor.common) for device in devices):
            continue
        visible = context.value(vendor.visible) if vendor.visible else ""
        withheld = by_slurm and allocation.is_withheld(context.host) and vendor.visible not in context.host
        if visible == "void" or withheld or not (visible or allocated):
            continue
        if vendor.folder not in by_folder:
            plan = accelerators.VendorPlan(context, vendor, visible)
            edits = plan.build(allocated)
            by_folder.update({vendor.folder: edits} if plan.all else {})
    return list(by_folder.values())
