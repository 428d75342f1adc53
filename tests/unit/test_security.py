"""Each sentence of the promise in docs/security.md names a test that there is."""

from __future__ import annotations

import re

import pytest

from tests.parity import ROOT, exists

TEXT = (ROOT / "docs/security.md").read_text()
PROMISE = TEXT.partition("## The promise")[2].partition("## What is outside of it")[0]
POINTS = [" ".join(point.split()) for point in re.split(r"^- ", PROMISE, flags=re.M)[1:]]


def test_there_is_a_promise() -> None:
    assert len(POINTS) > 30


@pytest.mark.parametrize("point", POINTS)
def test_a_point_names_its_tests(point: str) -> None:
    named = re.findall(r"`([\w/]+\.py::\w+)`", point)
    assert named, "no test"
    for test in named:
        assert exists(test), f"no such test: {test}"


def test_every_attack_is_named() -> None:
    """An attack that the promise does not speak of is one that nobody was promised to be safe from."""
    for path in sorted((ROOT / "tests/attack").glob("test_*.py")):
        assert f"attack/{path.name}::" in PROMISE, path.name


def test_every_way_to_ask_is_in_the_table() -> None:
    tests = (ROOT / "tests/slurm/test_never_on_the_host.py").read_text()
    assert set(re.findall(r"^def (test_\w+)", tests, flags=re.M)) == set(re.findall(r"`(test_\w+)`", PROMISE))
