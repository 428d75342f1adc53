"""Find the GPUs that Slurm allocated to a step, in the environment of one of its tasks.

The numbers in SLURM_STEP_GPUS count the GPUs of the node in the order of gres.conf. A task also has variables such as
CUDA_VISIBLE_DEVICES, which this module calls masks. The numbers in masks also count all GPUs of the node, but with
ConstrainDevices only the allocated GPUs.
Sources: gres.conf(5), srun(1), Slurm's common_gres_set_env().
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

UNNUMBERED = "all"  # stands for the step's GPUs if Slurm reports only how many there are


def gpu_numbers(caller: Mapping[str, str]) -> str:
    """Return the numbers of the step's GPUs. Outside a step, return the numbers of the job's GPUs.

    Return UNNUMBERED if Slurm does not report the numbers, and "" if there is no GPU.
    """
    step_gpus, job_gpus = caller.get("SLURM_STEP_GPUS", ""), caller.get("SLURM_JOB_GPUS", "")
    if "SLURM_STEP_ID" not in caller:
        return step_gpus or job_gpus
    if not step_gpus and caller.get("SLURM_GPUS_ON_NODE", "0") != "0":
        return UNNUMBERED  # with --gpu-bind=none
    return step_gpus


def is_withheld(caller: Mapping[str, str]) -> bool:
    """Check whether the job has GPUs, but the step has none of them."""
    return "SLURM_STEP_ID" in caller and bool(caller.get("SLURM_JOB_GPUS")) and not gpu_numbers(caller)


def gpus_of_step(caller: Mapping[str, str], allocated: str, masks: list[str]) -> tuple[list[str], bool] | None:
    """Return the GPU numbers of all tasks of a step on this node, or None if they are unknown.

    ``allocated`` and ``masks`` are the GPUs and the visible devices of one task. The second value tells whether the
    numbers in the masks count all GPUs of the node, as they do without ConstrainDevices.
    """
    task_gpus = [word for word in allocated.split(",") if word and word != UNNUMBERED]
    bound = is_bound(caller, allocated)
    numbers = _gpus_of_all_tasks(caller, task_gpus) if bound else task_gpus
    if not numbers:
        return None
    counted = [str(number) for number in range(len(numbers))]
    counts_all = any(mask.isdecimal() and mask not in counted for mask in masks)
    if bound and masks and masks == task_gpus and set(numbers) != set(counted):
        if masks == [str(sorted(map(int, numbers)).index(int(number))) for number in task_gpus]:
            return None  # ambiguous: the first of GPUs 0 and 2 is number 0 in both numberings
        counts_all = True
    return numbers, counts_all


def is_bound(caller: Mapping[str, str], allocated: str) -> bool:
    """Check whether tasks may be bound to GPUs (--gpus-per-task, --gpu-bind). Assume so without GPU numbers."""
    # "gres/gpu:…" since Slurm 23.11
    return allocated == UNNUMBERED or caller.get("SLURMD_TRES_BIND", "").startswith(("gpu", "gres/gpu"))


def _gpus_of_all_tasks(caller: Mapping[str, str], task_gpus: list[str]) -> list[str]:
    """Return the GPUs of all tasks if this task is bound to ``task_gpus``, or an empty list if they are unknown."""
    if caller.get("SLURM_GPUS_ON_NODE") == str(len(task_gpus)):
        return task_gpus
    job_gpus = caller.get("SLURM_JOB_GPUS", "").split(",")
    # SLURM_JOB_GPUS lists the GPUs of the node that runs the batch script.
    is_this_node = caller.get("SLURM_JOB_NUM_NODES") == "1" and set(task_gpus) <= set(job_gpus)
    return job_gpus if is_this_node else []
