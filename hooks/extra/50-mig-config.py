"""MIG: who gets whole GPUs in MIG mode may also cut them up."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from enroot_py.runtime.hooks import Context


def run(context: Context) -> None:
    visible = context.host.get("NVIDIA_VISIBLE_DEVICES", context.environ.get("NVIDIA_VISIBLE_DEVICES", ""))
    # Of MIG devices the caller has parts, and those are made already.
    if visible in ("", "void", "none") or "MIG-" in visible or any(":" in word for word in visible.split(",")):
        return
    from enroot_py.base.errors import HookError
    from enroot_py.devices import edits, nvidia, nvml

    host = edits.Host.of(context.host)
    library = nvidia.Driver.of(host, context.host).nvml()
    if not library:
        return
    known = nvidia.gpus(host)
    words = [word.strip().removeprefix("nvidia.com/gpu=") for word in visible.split(",")]
    try:
        chosen = nvidia.select(words, known, host, "NVIDIA_VISIBLE_DEVICES", lambda: library)
        if any(nvml.mig_enabled(library, gpu.bus) for gpu in chosen.gpus):
            context.environ["NVIDIA_MIG_CONFIG_DEVICES"] = "all"
    except HookError:
        return  # 98-nvidia says what is wrong, or that Slurm has given others
