"""Write the tables."""

from __future__ import annotations

from tests.parity import NAMES, ROOT, table

for name in NAMES:
    (ROOT / "docs").mkdir(exist_ok=True)
    (ROOT / f"docs/parity-{name}.md").write_text(table(name))
