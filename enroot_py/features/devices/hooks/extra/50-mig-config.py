"""Let a container that has whole GPUs in MIG mode configure the MIG devices of these GPUs."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from enroot_py.runtime.hooks import Context


def run(context: Context) -> None:
    visible = context.value("NVIDIA_VISIBLE_DEVICES")
    # A container with single MIG devices must not repartition the GPU.
    if visible in ("", "void", "none") or "MIG-" in visible or any(":" in word for word in visible.split(",")):
        return
    from enroot_py.base.errors import HookError
    from enroot_py.features.devices import nvml
    from enroot_py.features.devices.nvidia.driver import Driver
    from enroot_py.features.devices.nvidia.selection import GPUs
    from enroot_py.runtime.edits import Host

    host = Host.of(context.host)
    library = Driver.of(host, context.host).nvml()
    if not library:
        return
    words = [word.strip().removeprefix("nvidia.com/gpu=") for word in visible.split(",")]
    try:
        chosen = GPUs(host, lambda: library).select(words, "NVIDIA_VISIBLE_DEVICES")
        if any(nvml.mig_enabled(library, gpu.bus) for gpu in chosen.gpus):
            context.environ["NVIDIA_MIG_CONFIG_DEVICES"] = "all"
    except HookError:
        return  # 98-nvidia reports the error
