"""Numbers of GPUs, in a container that has some of the node's.

Without ConstrainDevices Slurm tells a task numbers that count all GPUs of the
node, and CUDA counts those that it can open. Source: gres.conf(5); CUDA C++
Programming Guide, "CUDA Environment Variables".
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyxis_py.job import Job

_TOLD = ("CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")


def variables(task: Job, image: Mapping[str, str]) -> dict[str, str]:
    """What a task is told of its GPUs, counted among PENROOT_GPUS: those of the container, as CUDA sees them.

    What the image says itself stays, and so do numbers of others, which a task of another step has that attaches.
    """
    there = image["PENROOT_GPUS"].split(",")
    found = {}
    for name in _TOLD:
        told = task.environ.get(name, "").split(",")
        if name not in image and any(told):
            mine = [str(there.index(number)) for number in told if number in there]
            if mine:
                found[name] = ",".join(mine)
    return found
