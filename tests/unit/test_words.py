"""Cut a text at its variables. Each kind of file decides how the variables are replaced."""

from __future__ import annotations

import pytest

from enroot_py.config.words import cut
from enroot_py.runtime.container_mounts import MountEntry


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("", [("", "", None, "")]),
        ("a$B/c", [("", "", None, "a"), ("$B", "B", None, "/c")]),
        ("${A}${B:-x}", [("", "", None, ""), ("${A}", "A", None, ""), ("${B:-x}", "B", "x", "")]),
        ("${A:-}-", [("", "", None, ""), ("${A:-}", "A", "", "-")]),
        ("$$A", [("", "", None, ""), ("$", "", None, ""), ("$A", "A", None, "")]),
        ("${A$B}", [("", "", None, ""), ("$", "", None, "{A"), ("$B", "B", None, "}")]),
        ("$1 ${1} ${A-b} $", [("", "", None, ""), *(("$", "", None, x) for x in ("1 ", "{1} ", "{A-b} ", ""))]),
        ("$a\u00e9", [("", "", None, ""), ("$a", "a", None, "\u00e9")]),
    ],
)
def test_text_is_cut_at_its_variables(text: str, pieces: list[tuple[str, str, str | None, str]]) -> None:
    assert list(cut(text)) == pieces
    assert "".join(variable + after for variable, _, _, after in cut(text)) == text


def test_backslash_of_a_value_keeps_no_dollar() -> None:
    entry = MountEntry("/$A$B\\$C", "/x", ())
    assert entry.resolved("/", {"A": "a\\", "B": "b"}).source == "/a\\b$C"
