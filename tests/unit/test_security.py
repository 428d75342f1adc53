"""Every promise in docs/security.md has tests, and every attack belongs to a promise."""

from __future__ import annotations

import re

import pytest

from tests.parity import ROOT, exists

PAGE = (ROOT / "docs/security.md").read_text()
PROMISES = PAGE.partition("## The promise")[2].partition("## What is outside of the promise")[0]
POINTS = [" ".join(point.split()) for point in re.split(r"^- ", PROMISES, flags=re.M)[1:]]
TESTS = {
    section.partition("\n")[0].lower(): re.findall(r"`([\w/]+\.py::\w+)`", section)
    for section in re.split(r"^### ", (ROOT / "docs/security-tests.md").read_text(), flags=re.M)[1:]
}


def linked(text: str) -> list[str]:
    """The sections of the page of tests to which a text links."""
    return re.findall(r"\(security-tests\.md#(\w+)\)", text)


def test_the_page_states_promises() -> None:
    assert len(POINTS) > 30


@pytest.mark.parametrize("point", POINTS)
def test_a_promise_links_to_its_tests(point: str) -> None:
    assert len(linked(point.partition(" | ")[0])) == 1, "no link to tests"


@pytest.mark.parametrize("section", TESTS)
def test_listed_tests_exist(section: str) -> None:
    assert TESTS[section], "no test"
    for test in TESTS[section]:
        assert exists(test), f"no such test: {test}"


def test_promises_and_lists_of_tests_match() -> None:
    assert set(linked(PROMISES)) == set(TESTS)


def test_every_attack_belongs_to_a_promise() -> None:
    listed = " ".join(test for tests in TESTS.values() for test in tests)
    for path in sorted((ROOT / "tests/attack").glob("test_*.py")):
        assert f"attack/{path.name}::" in listed, path.name


def test_every_request_for_a_container_is_in_the_table() -> None:
    tests = (ROOT / "tests/slurm/test_never_on_the_host.py").read_text()
    named = set(re.findall(r"`(test_\w+)`", PROMISES))
    assert set(re.findall(r"^def (test_\w+)", tests, flags=re.M)) == named
