"""Set the variables by which processes of a PyTorch job find each other, from Slurm's variables.

These are the variables of torch.distributed's "env://" initialisation, and the thread limit of torchrun. Variables that
the image or the user set stay, except RANK and LOCAL_RANK.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyxis_py.request.job import Job

_FIRST_PORT, _PORTS = 61000, 4536  # above Linux's default ephemeral ports: ip(7) ip_local_port_range


def variables(task: Job, image: Mapping[str, str]) -> dict[str, str]:
    """Return the missing variables of a task. RANK and LOCAL_RANK always replace existing values."""
    slurm = task.environ
    always = {"RANK": str(task.numbers["procid"]), "LOCAL_RANK": str(task.numbers["taskid"])}
    unset = {"MASTER_PORT": str(_FIRST_PORT + task.jobid % _PORTS)}
    if first := first_host(slurm.get("SLURM_STEP_NODELIST", "")):
        unset["MASTER_ADDR"] = first
    if "SLURM_NTASKS" in slurm:
        unset["WORLD_SIZE"] = slurm["SLURM_NTASKS"]
    if int(slurm.get("SLURM_STEP_NUM_TASKS", "1")) > int(slurm.get("SLURM_STEP_NUM_NODES", "1")):
        unset["OMP_NUM_THREADS"] = "1"
    return {**always, **{name: value for name, value in unset.items() if name not in image and name not in slurm}}


def first_host(nodes: str) -> str:
    """Return the first host of a node list such as ``gpu[07-09,12]-x,cpu1``: scontrol(1), "show hostnames"."""
    host, at = "", 0
    while at < len(nodes) and nodes[at] != ",":
        if nodes[at] == "[":
            end = nodes.find("]", at)
            host += nodes[at + 1 : end].split(",")[0].split("-")[0]
            at = end + 1
        else:
            host += nodes[at]
            at += 1
    return host
