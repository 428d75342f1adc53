"""Every item of the parity lists has a test that there is, and the tables say what the lists say."""

from __future__ import annotations

import pytest

from tests.parity import NAMES, ROOT, Item, exists, items, table


@pytest.mark.parametrize("item", [pytest.param(i, id=f"{n}: {i.what}") for n in NAMES for i in items(n)])
def test_item_has_a_proof_or_a_reason(item: Item) -> None:
    assert item.tests or item.missing
    for test in item.tests:
        assert exists(test), f"no such test: {test}"


@pytest.mark.parametrize("name", NAMES)
def test_table_is_fresh(name: str) -> None:
    assert (ROOT / f"docs/parity-{name}.md").read_text() == table(name), "run: python3 -m tests.parity"
