from __future__ import annotations

import pytest

from enroot_py.registry import refusals
from enroot_py.registry.reference import Reference, parse


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("registry:5000", "registry:5000/IMAGE"),
        ("nvcr.io", "nvcr.io/IMAGE"),
        ("redis:7", ""),
        ("mine.sqsh", ""),
        ("org/name.py:2404", ""),
        ("nvcr.io#nvidia/cuda:1234", ""),
    ],
)
def test_a_registry_without_an_image_is_recognized(name: str, expected: str) -> None:
    """In an #SBATCH line, Slurm drops "#IMAGE" of REGISTRY#IMAGE. REGISTRY alone names an image on Docker Hub."""
    reference = parse(name)
    assert isinstance(reference, Reference)
    hint = refusals.likely_registry(reference)
    assert expected in hint and bool(expected) == bool(hint)
