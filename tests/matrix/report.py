"""The results of a tier from pytest's JUnit file, and the table of all tiers."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .known import KNOWN, Known

COLUMNS = ("release", "Slurm", "tier", "passed", "failed", "not ours", "skipped", "minutes")


@dataclass(frozen=True)
class Failure:
    """A test that failed, with pytest's text; ``known`` is set if the cause is not ours."""

    test: str
    text: str
    known: Known | None = None


@dataclass(frozen=True)
class Outcome:
    """One tier of one release; ``repaired`` lists the known failures that no longer occur."""

    release: str
    slurm: str
    tier: str
    seconds: float
    passed: int = 0
    failures: Sequence[Failure] = ()
    skipped: Sequence[str] = ()
    repaired: Sequence[Known] = ()

    @property
    def ours(self) -> list[Failure]:
        return [failure for failure in self.failures if not failure.known]

    def row(self) -> tuple[str, ...]:
        counts = (self.passed, len(self.ours), len(self.failures) - len(self.ours), len(self.skipped))
        return (self.release, self.slurm, self.tier, *map(str, counts), f"{self.seconds / 60:.1f}")

    def notes(self) -> Iterator[str]:
        """Yield a line for each failure of ours, cause of other failures, reason of skips, and Known that passed."""
        where = f"{self.release} {self.tier}"
        for failure in self.ours:
            yield f"{where}: FAILED: {failure.test}: {failure.text.strip().partition(chr(10))[0]}"
        for known in {failure.known: None for failure in self.failures if failure.known}:
            tests = [failure.test for failure in self.failures if failure.known == known]
            yield f"{where}: {len(tests)} not ours: {known.why} ({known.source}): {' '.join(tests)}"
        yield from (f"{where}: {times} skipped: {why}" for why, times in Counter(self.skipped).items())
        yield from (f"{where}: no longer fails: {known.test}: {known.why} ({known.source})" for known in self.repaired)


def of_junit(release: str, slurm: str, tier: str, file: Path, known: Sequence[Known] = KNOWN) -> Outcome:
    """Read the results of pytest. Raises OSError, ParseError if pytest did not finish."""
    suite = ElementTree.parse(file).getroot().find("testsuite")
    assert suite is not None
    where = f"{release} {slurm}"
    passed: list[str] = []
    failures: list[Failure] = []
    skipped: list[str] = []
    for case in suite.iter("testcase"):
        test = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
        bad = [child for child in case if child.tag in ("failure", "error")]
        if bad:
            text = "\n".join(f"{child.get('message')}\n{child.text}" for child in bad)
            failures.append(Failure(test, text, next((k for k in known if k.covers(where, test, text)), None)))
        elif (skip := case.find("skipped")) is not None:
            skipped.append(skip.get("message") or "")
        else:
            passed.append(test)
    if not (passed or failures or skipped):
        failures.append(Failure(f"tests/{tier}", "no test ran"))
    failing = {failure.known for failure in failures}
    repaired = [k for k in known if k not in failing and any(k.names(where, test) for test in passed)]
    return Outcome(release, slurm, tier, float(suite.get("time") or 0), len(passed), failures, skipped, repaired)


def table(outcomes: Sequence[Outcome]) -> str:
    rows = [COLUMNS, ("---",) * len(COLUMNS), *(outcome.row() for outcome in outcomes)]
    notes = [note for outcome in outcomes for note in outcome.notes()]
    return "\n".join([*(f"| {' | '.join(row)} |" for row in rows), "", *notes])
