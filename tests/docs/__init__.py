"""The pages of docs/, those that people write and those that ``.venv/bin/python -m tests.docs`` makes of the source.

`make docs` runs it: docs/made has each manual page, and which tests prove what the other pages say.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
MADE = ROOT / "docs/made"
NOTE = "<!-- Made by .venv/bin/python -m tests.docs: do not edit. -->"


def slug(title: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")


def anchors(titles: list[str]) -> Iterator[str]:
    """The anchors of a page's headings: GitHub puts a number behind those that there are already."""
    seen: Counter[str] = Counter()
    for title in titles:
        anchor = slug(title)
        yield f"{anchor}-{seen[anchor]}" if seen[anchor] else anchor
        seen[anchor] += 1


def escaped(text: str) -> str:
    """Escape text for Markdown."""
    return re.sub(r"[\\`*<$]|(?<!\w)_|_(?!\w)|(?<=\])(?=\()", r"\\\g<0>", text)
