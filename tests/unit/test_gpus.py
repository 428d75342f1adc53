"""Masks: variables that select the GPUs of a task, in a container that has only some of the node's GPUs."""

from __future__ import annotations

import pytest

from pyxis_py.node.gpus import variables
from pyxis_py.request.job import Job


def masks(of_slurm: dict[str, str], gpus: str, kind: str = "", **image: str) -> dict[str, str]:
    """Return the masks that a task gets in a container with the GPUs ``gpus``. ``of_slurm`` are Slurm's masks."""
    task = Job([("verb", "join"), *(("environ", f"{name}={value}") for name, value in of_slurm.items())])
    return variables(task, {"PENROOT_GPUS": gpus, **({"PENROOT_GPU_KIND": f"{kind}.com/gpu"} if kind else {}), **image})


@pytest.mark.parametrize(
    ("of_slurm", "in_container"),
    [("2,3", "0,1"), ("3", "1"), ("3,2", "1,0"), ("1,3", "1"), ("1", None), ("GPU-x", None), ("", None)],
)
def test_masks_count_the_gpus_of_the_container(of_slurm: str, in_container: str | None) -> None:
    assert masks({"CUDA_VISIBLE_DEVICES": of_slurm, "GPU_DEVICE_ORDINAL": "2"}, "2,3") == {
        **({"CUDA_VISIBLE_DEVICES": in_container} if in_container else {}),
        "GPU_DEVICE_ORDINAL": "0",
    }


@pytest.mark.parity("ROCR_VISIBLE_DEVICES")
@pytest.mark.parametrize(
    ("of_container", "of_slurm", "rocr", "others"),
    [("2,3", "2,3", "0,1", "0,1"), ("2,3", "3", "1", "0"), ("0,1", "1", "1", "0"), ("0,1", "0,1", "0,1", "0,1")],
)
def test_hip_and_opencl_count_the_gpus_of_rocr(of_container: str, of_slurm: str, rocr: str, others: str) -> None:
    """HIP and OpenCL number only the GPUs of ROCR_VISIBLE_DEVICES. Slurm sets all masks to the same numbers."""
    names = ("ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "CUDA_VISIBLE_DEVICES")
    assert masks(dict.fromkeys(names, of_slurm), of_container, "amd") == dict(
        zip(names, (rocr, others, others), strict=True)
    )


@pytest.mark.parity("ROCR_VISIBLE_DEVICES")
def test_masks_of_the_image_or_user_are_kept() -> None:
    """The mask of Level Zero is renumbered for the container, like the other masks."""
    assert masks({"CUDA_VISIBLE_DEVICES": "2"}, "2,3", CUDA_VISIBLE_DEVICES="0") == {}
    of_slurm = {"ROCR_VISIBLE_DEVICES": "2,3", "GPU_DEVICE_ORDINAL": "0"}
    assert masks(of_slurm, "2,3", "amd") == {"ROCR_VISIBLE_DEVICES": "0,1"}
    assert masks({"ZE_AFFINITY_MASK": "5"}, "4,5", "intel") == {"ZE_AFFINITY_MASK": "1"}
