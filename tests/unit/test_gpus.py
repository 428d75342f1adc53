"""What tasks are told of GPUs, in a container that has some of the node's."""

from __future__ import annotations

import pytest

from pyxis_py.node.gpus import variables
from pyxis_py.request.job import Job


@pytest.mark.parametrize(
    ("told", "found"),
    [("2,3", "0,1"), ("3", "1"), ("3,2", "1,0"), ("1,3", "1"), ("1", None), ("GPU-x", None), ("", None)],
)
def test_numbers_are_counted_among_those_of_the_container(told: str, found: str | None) -> None:
    task = Job([("verb", "join"), ("environ", f"CUDA_VISIBLE_DEVICES={told}"), ("environ", "GPU_DEVICE_ORDINAL=2")])
    assert variables(task, {"PENROOT_GPUS": "2,3"}) == {
        **({"CUDA_VISIBLE_DEVICES": found} if found else {}),
        "GPU_DEVICE_ORDINAL": "0",
    }


def test_what_the_image_says_stays() -> None:
    task = Job([("verb", "join"), ("environ", "CUDA_VISIBLE_DEVICES=2")])
    assert variables(task, {"PENROOT_GPUS": "2,3", "CUDA_VISIBLE_DEVICES": "0"}) == {}


AMD = {"PENROOT_GPU_KIND": "amd.com/gpu"}


@pytest.mark.parity("ROCR_VISIBLE_DEVICES")
@pytest.mark.parametrize(
    ("of_container", "told", "first", "others"),
    [("2,3", "2,3", "0,1", "0,1"), ("2,3", "3", "1", "0"), ("0,1", "1", "1", "0"), ("0,1", "0,1", "0,1", "0,1")],
)
def test_hip_and_opencl_count_what_rocr_leaves(of_container: str, told: str, first: str, others: str) -> None:
    """Slurm gives all of them the same numbers."""
    names = ("ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "CUDA_VISIBLE_DEVICES")
    task = Job([("verb", "join"), *(("environ", f"{name}={told}") for name in names)])
    assert variables(task, {"PENROOT_GPUS": of_container, **AMD}) == {
        "ROCR_VISIBLE_DEVICES": first,
        "GPU_DEVICE_ORDINAL": others,
        "CUDA_VISIBLE_DEVICES": others,
    }


def test_what_a_user_has_set_besides_is_his() -> None:
    task = Job([("verb", "join"), ("environ", "ROCR_VISIBLE_DEVICES=2,3"), ("environ", "GPU_DEVICE_ORDINAL=0")])
    assert variables(task, {"PENROOT_GPUS": "2,3", **AMD}) == {"ROCR_VISIBLE_DEVICES": "0,1"}


@pytest.mark.parity("ROCR_VISIBLE_DEVICES")
def test_level_zero_counts_the_gpus_of_the_container() -> None:
    task = Job([("verb", "join"), ("environ", "ZE_AFFINITY_MASK=5")])
    image = {"PENROOT_GPUS": "4,5", "PENROOT_GPU_KIND": "intel.com/gpu"}
    assert variables(task, image) == {"ZE_AFFINITY_MASK": "1"}
