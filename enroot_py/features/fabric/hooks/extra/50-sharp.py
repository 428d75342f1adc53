"""Enable SHARP (collective operations in the switches) for jobs with --network=sharp.

Sources: SHARP Collective Library, "Setting up"; NCCL, NCCL_COLLNET_ENABLE.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from enroot_py.runtime.hooks import Context


def run(context: Context) -> None:
    host, environ = context.host, context.environ
    devices = context.value("MELLANOX_VISIBLE_DEVICES")
    if devices in ("", "void", "none") or host.get("SLURM_NETWORK") != "sharp":
        return
    environ.setdefault("SHARP_COLL_LOCK_ON_COMM_INIT", "1")
    environ.setdefault("SHARP_COLL_NUM_COLL_GROUP_RESOURCE_ALLOC_THRESHOLD", "0")
    environ.setdefault("NCCL_COLLNET_ENABLE", "1")
    nodes = host.get("SLURM_STEP_NUM_NODES") or host.get("OMPI_MCA_orte_num_nodes")
    if nodes:
        environ.setdefault("NCCL_SHARP_GROUP_SIZE_THRESH", nodes)
