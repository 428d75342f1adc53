"""Write the tables."""

from __future__ import annotations

from tests.parity import NAMES, page, table

for name in NAMES:
    page(name).write_text(table(name))
