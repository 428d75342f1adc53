"""Find the first host of a Slurm node list. PyTorch gets this host as MASTER_ADDR."""

from __future__ import annotations

import pytest

from pyxis_py.node.pytorch import first_host


@pytest.mark.parity("50-slurm-pytorch")
@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("gpu[07-09,12]-x,cpu1", "gpu07-x"),
        ("r[1,3]c[04-05]", "r1c04"),
        ("", ""),
    ],
)
def test_first_host(nodes: str, first: str) -> None:
    assert first_host(nodes) == first
