"""GPUs that Slurm has allocated to a step, by the variables of its tasks. Source: gres.conf(5), srun(1), and Slurm's
common_gres_set_env(): SLURM_STEP_GPUS counts the GPUs of the node in the order of gres.conf, and so does what a task is
told, unless ConstrainDevices lets it count its own.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

UNTOLD = "all"  # where Slurm tells a step how many GPUs it has, but not which


def told(caller: Mapping[str, str]) -> str:
    """The numbers of the GPUs that a step has, or the job outside of one; UNTOLD, or "" for none."""
    numbers, of_job = caller.get("SLURM_STEP_GPUS", ""), caller.get("SLURM_JOB_GPUS", "")
    if "SLURM_STEP_ID" not in caller:
        return numbers or of_job
    if not numbers and caller.get("SLURM_GPUS_ON_NODE", "0") != "0":
        return UNTOLD  # with --gpu-bind=none
    return numbers


def is_withheld(caller: Mapping[str, str]) -> bool:
    """Whether a step has none of the GPUs that its job has."""
    return "SLURM_STEP_ID" in caller and bool(caller.get("SLURM_JOB_GPUS")) and not told(caller)


def shared(caller: Mapping[str, str], allocated: str, masks: list[str]) -> tuple[list[str], bool] | None:
    """The GPUs of all tasks of a step on this node, where one has ``allocated`` and is told ``masks``.

    With whether the tasks are told numbers that count all GPUs of the node, as they are without ConstrainDevices.
    None where it cannot be known which they are.
    """
    own = [word for word in allocated.split(",") if word and word != UNTOLD]
    bound = is_bound(caller, allocated)
    numbers = _of_all_tasks(caller, own) if bound else own
    if not numbers:
        return None
    counted = [str(number) for number in range(len(numbers))]
    counts_all = any(mask.isdecimal() and mask not in counted for mask in masks)
    if bound and masks and masks == own and set(numbers) != set(counted):
        if masks == [str(sorted(map(int, numbers)).index(int(number))) for number in own]:
            return None  # of 0 and 2 the first: that is its number either way
        counts_all = True
    return numbers, counts_all


def is_bound(caller: Mapping[str, str], allocated: str) -> bool:
    """Whether each task has GPUs of its own: --gpus-per-task, --gpu-bind."""
    # "gres/gpu:…" since Slurm 23.11
    return allocated == UNTOLD or caller.get("SLURMD_TRES_BIND", "").startswith(("gpu", "gres/gpu"))


def _of_all_tasks(caller: Mapping[str, str], own: list[str]) -> list[str]:
    """The GPUs of all tasks, of which each is told its own where tasks are bound to GPUs; none where nobody says."""
    if caller.get("SLURM_GPUS_ON_NODE") == str(len(own)):
        return own
    of_job = caller.get("SLURM_JOB_GPUS", "").split(",")
    # Of the node on which the batch script runs.
    here = caller.get("SLURM_JOB_NUM_NODES") == "1" and set(own) <= set(of_job)
    return of_job if here else []
