"""What tasks are told of GPUs, in a container that has some of the node's."""

from __future__ import annotations

import pytest

from pyxis_py.gpus import variables
from pyxis_py.job import Job


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
