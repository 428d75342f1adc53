"""Find the tests that prove a statement of docs/.

A test names the statement in a mark: ``parity`` has the first words of a line of docs/reference/parity-*.md or
beyond.md, ``security`` a key of docs/explanation/security.md, ``clusters`` a heading of docs/howto/clusters.md. Several
tests may have the same mark.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache

from tests.docs import NOTE, ROOT

PAGES = ("parity-enroot", "parity-pyxis", "parity-cases", "beyond")  # beneath docs/reference
_LINE = re.compile(r"^(?:-|\d+\.) (.*)", re.M)
_MISSING = " **missing:** "


@cache
def marks(kind: str) -> dict[str, list[str]]:
    """Map each text in the tests' marks of this kind to the tests, as FILE::NAME beneath tests/."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if f"mark.{kind}(" in text else ():
            if isinstance(node, ast.FunctionDef):
                for mark in _arguments(node, kind):
                    found.setdefault(mark, []).append(f"{path.relative_to(ROOT / 'tests')}::{node.name}")
    return found


def _arguments(function: ast.FunctionDef, kind: str) -> Iterator[str]:
    for call in function.decorator_list:
        if isinstance(call, ast.Call) and ast.unparse(call.func) == f"pytest.mark.{kind}":
            yield from map(ast.literal_eval, call.args)


def sections(page: str) -> Iterator[tuple[str, list[str]]]:
    """Return the headings of a page, each with the lines of its list."""
    for section in re.split(r"^## ", (ROOT / f"docs/reference/{page}.md").read_text(), flags=re.M)[1:]:
        yield section.partition("\n")[0], _LINE.findall(section)


@cache
def lines() -> tuple[str, ...]:
    """Return the lines of all pages, except lines that explain a missing test."""
    each = [line for page in PAGES for _, found in sections(page) for line in found]
    return tuple(line for line in each if _MISSING not in line)


@cache
def named(mark: str) -> list[str]:
    """Return the lines that begin with a mark's words, or only the line that equals the mark."""
    if mark in lines():
        return [mark]
    return [line for line in lines() if line.startswith(mark) and not re.match(r"[\w-]", line[len(mark) :])]


def pages() -> dict[str, str]:
    """Return the page of the site, with a table of tests for each kind of mark."""
    out = [NOTE, "", "# Tests behind each statement", "", "Files are beneath `tests/`; `make test` runs them all."]
    security = sorted(marks("security").items(), key=lambda item: (item[0][0], int(item[0][1:])))
    out += _table("Security", ((f"[{key}](../explanation/security.md)", tests) for key, tests in security))
    out += _table("Which setting for which cluster", marks("clusters").items())
    proofs: dict[str, list[str]] = {}
    for mark, tests in marks("parity").items():
        proofs.setdefault(named(mark)[0], []).extend(tests)
    for page in PAGES:
        title = (ROOT / f"docs/reference/{page}.md").read_text().partition("\n")[0].removeprefix("# ")
        out += _table(title, ((line, proofs.get(line, [])) for _, found in sections(page) for line in found))
    return {"proofs.md": "\n".join(out) + "\n"}


def _table(title: str, rows: Iterable[tuple[str, list[str]]]) -> Iterator[str]:
    yield from ("", f"## {title}", "", "| | tests |", "|---|---|")
    for what, tests in rows:
        cells = what.replace("|", "\\|"), "<br>".join(f"`{test}`" for test in tests)
        yield f"| {' | '.join(cells)} |"
