"""Renumber the GPUs of a task for a container that sees only some GPUs of the node.

Without ConstrainDevices, Slurm counts all GPUs of the node in CUDA_VISIBLE_DEVICES and similar variables. But CUDA,
ROCm and Level Zero count only the GPUs that they can open. AMD's HIP and OpenCL count only the GPUs in
ROCR_VISIBLE_DEVICES, but Slurm sets their own variables to the same numbers as ROCR_VISIBLE_DEVICES.

Sources: gres.conf(5); CUDA C++ Programming Guide, "CUDA Environment Variables"; ROCm, "GPU isolation techniques"; Level
Zero, core programming guide, "Affinity Mask".
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyxis_py.request.job import Job

_FIRST = "ROCR_VISIBLE_DEVICES"
_OF_SLURM = ("CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", _FIRST, "ZE_AFFINITY_MASK")


def variables(task: Job, image: Mapping[str, str]) -> dict[str, str]:
    """Return the GPU variables of a task that must change: each GPU becomes its position in PENROOT_GPUS.

    PENROOT_GPUS lists the container's GPUs. ``image`` is the container's environment: variables in it do not change. A
    task that has none of these GPUs keeps its variables, because its step has joined the container of another step.
    """
    of_container = image["PENROOT_GPUS"].split(",")
    uses_rocr = image.get("PENROOT_GPU_KIND") == "amd.com/gpu" and bool(task.environ.get(_FIRST))
    changed = {}
    for name in _OF_SLURM:
        of_task = task.environ.get(name, "").split(",")
        counted = [str(of_container.index(number)) for number in of_task if number and number in of_container]
        if uses_rocr and name != _FIRST and task.environ.get(name) == task.environ[_FIRST]:
            counted = [str(number) for number in range(len(counted))]
        if name not in image and counted:
            changed[name] = ",".join(counted)
    return changed
