"""Write the generated pages into docs/made, which is not committed."""

from __future__ import annotations

import shutil

from tests.docs import MADE, api, manual, proofs, settings

shutil.rmtree(MADE, ignore_errors=True)
for directory, pages in (
    (MADE / "manual", manual.pages()),
    (MADE, {**settings.pages(), **api.pages(), **proofs.pages()}),
):
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in pages.items():
        (directory / name).write_text(text)
