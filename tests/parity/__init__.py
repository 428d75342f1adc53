"""Tables of what enroot, pyxis and we are, each item with the test that proves it: ``python3 -m tests.parity``.

The lists are NAME.txt beside this file, the tables docs/parity-NAME.md, and of what goes beyond both docs/beyond.md.
"""

from __future__ import annotations

import ast
import pathlib
from functools import cache

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent.parent
NAMES = sorted(path.stem for path in HERE.glob("*.txt"))
BEYOND = "beyond"
_MISSING = "missing:"


class Item:
    """One line of a list: tests that prove it, or why it is missing."""

    def __init__(self, section: str, line: str) -> None:
        self.section = section
        self.what, _, proof = (part.strip() for part in line.rpartition("|"))
        self.missing = proof.removeprefix(_MISSING).strip() if proof.startswith(_MISSING) else ""
        self.tests = [] if self.missing else [test.strip() for test in proof.split(",") if test.strip()]


def items(name: str) -> list[Item]:
    """The items of a list, in its order."""
    found = []
    section = ""
    for line in (HERE / f"{name}.txt").read_text().splitlines():
        if line.startswith("== "):
            section = line[3:]
        elif line.strip() and not line.startswith("#"):
            found.append(Item(section, line))
    return found


@cache
def functions(file: str) -> frozenset[str]:
    """Names of the test functions of a file under tests/."""
    path = HERE.parent / file
    if not path.exists():
        return frozenset()
    tree = ast.parse(path.read_text())
    return frozenset(n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name.startswith("test_"))


def exists(test: str) -> bool:
    """Whether FILE::FUNCTION names a test that there is."""
    file, _, function = test.partition("::")
    return function in functions(file)


def page(name: str) -> pathlib.Path:
    """Where the table of a list is."""
    return ROOT / "docs" / ("beyond.md" if name == BEYOND else f"parity-{name}.md")


def table(name: str) -> str:
    """The table of a list."""
    found = items(name)
    proved = sum(bool(item.tests) for item in found)
    out = [
        "# Beyond enroot and pyxis" if name == BEYOND else f"# Parity with {name}",
        "",
        f"Made by `python3 -m tests.parity` from tests/parity/{name}.txt: do not edit. Each item names the tests that",
        f"prove it; `make test` runs them all. {proved} of {len(found)} items are proved.",
    ]
    section = None
    for item in found:
        if item.section != section:
            section = item.section
            out += ["", f"## {section}", "", "| item | proof |", "|---|---|"]
        proof = "<br>".join(f"`{test}`" for test in item.tests) or f"**missing**: {item.missing}"
        what = item.what.replace("|", "\\|")
        out.append(f"| {what} | {proof} |")
    return "\n".join(out) + "\n"
