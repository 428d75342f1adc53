"""GPUs of AMD and Intel, and Gaudi, by what Slurm allocated, AMD_VISIBLE_DEVICES or HABANA_VISIBLE_DEVICES."""

from __future__ import annotations

from enroot_py.config.words import NO

TYPE_CHECKING = False
if TYPE_CHECKING:
    from enroot_py.runtime.edits import Edits
    from enroot_py.runtime.hooks import Context

_VISIBLE = ("AMD_VISIBLE_DEVICES", "HABANA_VISIBLE_DEVICES")
_OF_SLURM = frozenset(("SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "SLURM_GPUS_ON_NODE"))


def run(context: Context) -> None:
    if not _OF_SLURM.isdisjoint(context.host) or any(map(context.value, _VISIBLE)):
        for edits in plans(context):
            edits.execute(context)


def plans(context: Context) -> list[Edits]:
    """What the container needs of each vendor's devices. Raises HookError."""
    from enroot_py.features.devices import accelerators, allocation
    from enroot_py.features.devices.settings import named
    from enroot_py.runtime.edits import Host

    host, devices = Host.of(context.host), named(context.settings)
    by_slurm = (context.host.get("PENROOT_SLURM_GPUS") or "yes").lower() not in NO
    if host.exists("/proc/driver/nvidia"):
        by_slurm = False  # Slurm's numbers are of those: 98-nvidia
    allocated = allocation.told(context.host) if by_slurm else ""
    made: dict[str, Edits] = {}  # by folder: Slurm's numbers are of one vendor's
    for vendor in accelerators.VENDORS:
        # Who names nodes or devices with --device has said what he wants.
        if any(word in device for word in (vendor.folder, vendor.name, *vendor.common) for device in devices):
            continue
        visible = context.value(vendor.visible) if vendor.visible else ""
        withheld = by_slurm and allocation.is_withheld(context.host) and vendor.visible not in context.host
        if visible == "void" or withheld or not (visible or allocated):
            continue
        if vendor.folder not in made:
            plan = accelerators.VendorPlan(context, vendor, visible)
            edits = plan.made(allocated)
            made.update({vendor.folder: edits} if plan.all else {})
    return list(made.values())
