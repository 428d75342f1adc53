"""Numbers of GPUs, in a container that has some of the node's.

Without ConstrainDevices Slurm gives a task numbers that count all GPUs of the node, and CUDA, ROCm and Level Zero count
those that they can open. HIP and OpenCL of AMD count what ROCR_VISIBLE_DEVICES leaves, and Slurm gives them the same
numbers. Sources: gres.conf(5); CUDA C++ Programming Guide, "CUDA Environment Variables"; ROCm, "GPU isolation
techniques"; Level Zero, core programming guide, "Affinity Mask".
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyxis_py.request.job import Job

_FIRST = "ROCR_VISIBLE_DEVICES"
_OF_SLURM = ("CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", _FIRST, "ZE_AFFINITY_MASK")


def variables(task: Job, image: Mapping[str, str]) -> dict[str, str]:
    """The GPUs of a task, counted among those of the container, PENROOT_GPUS, as those libraries do.

    Variables of the image stay. So do those of a task with none of these GPUs: it is of another step, which attaches.
    """
    of_container = image["PENROOT_GPUS"].split(",")
    stacks = image.get("PENROOT_GPU_KIND") == "amd.com/gpu" and bool(task.environ.get(_FIRST))
    changed = {}
    for name in _OF_SLURM:
        of_task = task.environ.get(name, "").split(",")
        counted = [str(of_container.index(number)) for number in of_task if number and number in of_container]
        if stacks and name != _FIRST and task.environ.get(name) == task.environ[_FIRST]:
            counted = [str(number) for number in range(len(counted))]
        if name not in image and counted:
            changed[name] = ",".join(counted)
    return changed
