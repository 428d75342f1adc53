from __future__ import annotations

import pytest

from enroot_py.registry import refusals
from enroot_py.registry.reference import Reference, parse


@pytest.mark.parametrize(
    ("name", "way_out"),
    [
        ("registry:5000", "registry:5000/IMAGE"),
        ("nvcr.io", "nvcr.io/IMAGE"),
        ("redis:7", ""),
        ("mine.sqsh", ""),
        ("org/name.py:2404", ""),
        ("nvcr.io#nvidia/cuda:1234", ""),
    ],
)
def test_a_registry_without_an_image_is_recognized(name: str, way_out: str) -> None:
    """What #SBATCH leaves of REGISTRY#IMAGE: a name of Docker Hub."""
    reference = parse(name)
    assert isinstance(reference, Reference)
    hint = refusals.meant(reference)
    assert way_out in hint and bool(way_out) == bool(hint)
