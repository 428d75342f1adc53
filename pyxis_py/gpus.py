"""Numbers of GPUs, in a container that has some of the node's.

Without ConstrainDevices Slurm gives a task numbers that count all GPUs of the
node, and CUDA counts those that it can open. Source: gres.conf(5); CUDA C++
Programming Guide, "CUDA Environment Variables".
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyxis_py.job import Job

_OF_SLURM = ("CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")


def variables(task: Job, image: Mapping[str, str]) -> dict[str, str]:
    """The GPUs of a task, counted among those of the container, PENROOT_GPUS, as CUDA does.

    Variables of the image stay. So do those of a task with none of these GPUs: it is of another step, which attaches.
    """
    of_container = image["PENROOT_GPUS"].split(",")
    changed = {}
    for name in _OF_SLURM:
        of_task = task.environ.get(name, "").split(",")
        counted = [str(of_container.index(number)) for number in of_task if number and number in of_container]
        if name not in image and counted:
            changed[name] = ",".join(counted)
    return changed
