"""The results of checks, for people and for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from enroot_py.base import log

_COLOURS = {"ok": log.GREEN, "warn": log.YELLOW, "bad": log.RED}


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. ``verdict`` is "ok", "warn" (some containers will fail or be slow) or "bad"."""

    verdict: str
    what: str
    fix: str = ""

    def text(self) -> str:
        """Return the lines that a person reads."""
        fix = f"\n     fix: {self.fix}" if self.fix else ""
        return f"{log.coloured(f'{self.verdict:<5}', _COLOURS[self.verdict], sys.stdout)}{self.what}{fix}"


def report(results: Iterable[Finding], *, as_json: bool = False) -> bool:
    """Print findings as text, or as JSON with an object on each line. Return False if a finding is bad."""
    good = True
    for finding in results:
        good = good and finding.verdict != "bad"
        print(json.dumps(asdict(finding)) if as_json else finding.text(), flush=True)
    return good
