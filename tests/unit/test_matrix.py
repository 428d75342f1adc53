"""The report of tests on many releases lists known failures, skipped tests, and failures that no longer occur."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.installation import ROOT
from tests.matrix import report, roots
from tests.matrix.__main__ import QUICK, SMOKE, WITHOUT_NAMESPACES
from tests.matrix.known import KNOWN, Known

TESTS = """
import pytest
def test_good(): pass
def test_theirs(): raise OSError("no plugin of that name")
def test_ours(): assert 1 == 2
def test_mended(): pass
@pytest.fixture
def broken(): raise OSError("no plugin of that name")
def test_theirs_before_it_begins(broken): pass
def test_skipped(): pytest.skip("no such device")
"""
THEIRS = Known("forky 26", "test_theirs", "no plugin", "the package lacks it", "https://example.org/1")
MENDED = Known("forky 26", "test_mended", "what it was", "a defect of long ago", "https://example.org/2")
OTHER_WORDS = Known("forky 26", "test_ours", "something else", "not that", "https://example.org/3")


@pytest.fixture(scope="module")
def junit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("made")
    (directory / "test_made.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-o", "junit_family=xunit1", "--junit-xml=out.xml", "test_made.py"]
    subprocess.run(command, cwd=directory, capture_output=True, check=False)
    return directory / "out.xml"


def test_chosen_tests_exist() -> None:
    """pytest runs none of the chosen tests if one of them does not exist."""
    for path in (*SMOKE, *WITHOUT_NAMESPACES, *(f"tests/slurm/test_{name}.py" for name in QUICK)):
        file, _, name = path.partition("::")
        assert (ROOT / file).exists(), path
        assert not name or f"\ndef {name}(" in (ROOT / file).read_text(), path


def test_report_without_tests_is_a_failure(tmp_path: Path) -> None:
    file = tmp_path / "out.xml"
    file.write_text('<testsuites><testsuite time="0.1"/></testsuites>')
    assert [failure.text for failure in report.of_junit("trixie", "24.11", "kernel", file).ours] == ["no test ran"]


def test_failure_counts_unless_its_name_and_message_are_known(junit: Path) -> None:
    outcome = report.of_junit("forky", "26.05.5", "slurm", junit, [THEIRS, MENDED, OTHER_WORDS])
    assert outcome.row()[:-1] == ("forky", "26.05.5", "slurm", "2", "1", "2", "1")
    text = report.table([outcome])
    assert "forky slurm: FAILED: test_made.py::test_ours: assert 1 == 2\n" in text
    theirs = "test_made.py::test_theirs test_made.py::test_theirs_before_it_begins"
    assert f"forky slurm: 2 not ours: the package lacks it (https://example.org/1): {theirs}\n" in text
    assert "forky slurm: 1 skipped: no such device\n" in text
    assert "no longer fails: test_mended: a defect of long ago (https://example.org/2)" in text


@pytest.mark.parametrize(("release", "slurm"), [("trixie", "26.05.5"), ("forky", "25.11.1")])
def test_known_failure_of_one_release_excuses_no_other(junit: Path, release: str, slurm: str) -> None:
    outcome = report.of_junit(release, slurm, "slurm", junit, [THEIRS, MENDED])
    assert len(outcome.ours) == 3
    assert not outcome.repaired


def test_each_known_failure_names_its_source() -> None:
    assert all(known.source.startswith(("https://", "slurm-")) and known.why for known in KNOWN)


def test_working_tree_is_tested_as_it_is(tmp_path: Path) -> None:
    roots.copy_checkout(tmp_path / "copy")
    assert (tmp_path / "copy/tests/unit/test_matrix.py").read_bytes() == Path(__file__).read_bytes()
    assert os.access(tmp_path / "copy/tests/matrix/enter", os.X_OK)
    assert not (tmp_path / "copy/.venv").exists()
