"""Each promise and each table row of the security page links to tests. Each file in tests/attack proves a promise."""

from __future__ import annotations

import re

import pytest

from tests.docs import ROOT
from tests.docs.proofs import marks

PAGE = (ROOT / "docs/explanation/security.md").read_text()
PROMISES = PAGE.partition("## The promise")[2].partition("## What is outside of the promise")[0]
POINTS = re.split(r"^- ", PROMISES, flags=re.M)[1:]
ROWS = re.findall(r"^\| (?!---|request|setting).*", PAGE, flags=re.M)
# Matches "KEY: [NAME](FILE), ..."
_PROOF = re.compile(r"\b([A-Z]\d+): ((?:,? ?\[[^]]+\]\(\.\./\.\./tests/[^)]+\))+)")


def proofs(text: str) -> dict[str, set[str]]:
    """Return key -> linked test files, for each key, such as H5, in a text."""
    return {
        key: set(re.findall(r"\(\.\./\.\./tests/(.*?)\)", links))
        for key, links in _PROOF.findall(" ".join(text.split()))
    }


@pytest.mark.parametrize("point", POINTS)
def test_a_promise_links_to_its_tests(point: str) -> None:
    assert len(proofs(point.partition("\n\n")[0])) == 1, "no key with links to tests"


@pytest.mark.parametrize("row", ROWS)
def test_a_row_links_to_its_tests(row: str) -> None:
    proof = row.rstrip(" |").rpartition(" | ")[2]
    assert proofs(proof) or proof.startswith(("no test; checked by reading ", "no test; tried by hand ")), (
        "the row has no tests, and does not say where the fact was read"
    )


def test_keys_and_links_match_the_marks_of_tests() -> None:
    files = {key: {test.partition("::")[0] for test in tests} for key, tests in marks("security").items()}
    assert proofs(PAGE) == files


def test_every_attack_belongs_to_a_promise() -> None:
    proving = {test.partition("::")[0] for tests in marks("security").values() for test in tests}
    assert {f"attack/{path.name}" for path in (ROOT / "tests/attack").glob("test_*.py")} <= proving


def test_every_request_for_a_container_is_in_the_table() -> None:
    text = (ROOT / "tests/slurm/test_never_on_the_host.py").read_text()
    proving = {test for tests in marks("security").values() for test in tests}
    assert {
        f"slurm/test_never_on_the_host.py::{name}" for name in re.findall(r"^def (test_\w+)", text, re.M)
    } <= proving
