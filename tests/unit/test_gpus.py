"""GPU masks of tasks in a container that has some of the node's GPUs."""

from __future__ import annotations

import pytest

from pyxis_py.node.gpus import variables
from pyxis_py.request.job import Job


def masks(told: dict[str, str], gpus: str, kind: str = "", **image: str) -> dict[str, str]:
    """Return a task's masks in a container with these GPUs; ``told`` are the masks from Slurm."""
    task = Job([("verb", "join"), *(("environ", f"{name}={value}") for name, value in told.items())])
    return variables(task, {"PENROOT_GPUS": gpus, **({"PENROOT_GPU_KIND": f"{kind}.com/gpu"} if kind else {}), **image})


@pytest.mark.parametrize(
    ("told", "number"),
    [("2,3", "0,1"), ("3", "1"), ("3,2", "1,0"), ("1,3", "1"), ("1", None), ("GPU-x", None), ("", None)],
)
def test_numbers_are_counted_among_those_of_the_container(told: str, number: str | None) -> None:
    assert masks({"CUDA_VISIBLE_DEVICES": told, "GPU_DEVICE_ORDINAL": "2"}, "2,3") == {
        **({"CUDA_VISIBLE_DEVICES": number} if number else {}),
        "GPU_DEVICE_ORDINAL": "0",
    }


@pytest.mark.parity("ROCR_VISIBLE_DEVICES")
@pytest.mark.parametrize(
    ("of_container", "told", "first", "others"),
    [("2,3", "2,3", "0,1", "0,1"), ("2,3", "3", "1", "0"), ("0,1", "1", "1", "0"), ("0,1", "0,1", "0,1", "0,1")],
)
def test_hip_and_opencl_count_what_rocr_leaves(of_container: str, told: str, first: str, others: str) -> None:
    """Slurm sets all masks to the same numbers."""
    names = ("ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "CUDA_VISIBLE_DEVICES")
    assert masks(dict.fromkeys(names, told), of_container, "amd") == dict(
        zip(names, (first, others, others), strict=True)
    )


@pytest.mark.parity("ROCR_VISIBLE_DEVICES")
def test_masks_of_the_image_or_user_are_kept() -> None:
    """Level Zero numbers the GPUs of the container, like the other masks."""
    assert masks({"CUDA_VISIBLE_DEVICES": "2"}, "2,3", CUDA_VISIBLE_DEVICES="0") == {}
    told = {"ROCR_VISIBLE_DEVICES": "2,3", "GPU_DEVICE_ORDINAL": "0"}
    assert masks(told, "2,3", "amd") == {"ROCR_VISIBLE_DEVICES": "0,1"}
    assert masks({"ZE_AFFINITY_MASK": "5"}, "4,5", "intel") == {"ZE_AFFINITY_MASK": "1"}
