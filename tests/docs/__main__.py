"""Write the pages, and remove those of what is no more."""

from __future__ import annotations

from tests.docs import manual, messages

for made in (messages, manual):
    made.DIRECTORY.mkdir(exist_ok=True)
    pages = made.pages()
    for path in set(made.DIRECTORY.glob("*.md")) - {made.DIRECTORY / name for name in pages}:
        path.unlink()
    for name, text in pages.items():
        (made.DIRECTORY / name).write_text(text)
