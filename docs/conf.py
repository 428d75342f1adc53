"""Build a site from the Markdown files of the repository with Sphinx: ``make docs``.

The lists in docs/README.md are the navigation. A page of these lists may list further pages. The site works without a
network: it contains its fonts, scripts and search.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

project = "penroot"
copyright = "the authors of penroot, Apache-2.0"
extensions = ["myst_parser"]
root_doc = "README"
include_patterns = [
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "docs/**.md"),
    *("examples/README.md", "hooks/README.md", "c_shims/spank/README.md", "c_shims/programs/README.md"),
    *("packages/README.md", "packages/ansible/README.md"),
]
exclude_patterns = [".venv", "build", "site"]
myst_heading_anchors = 3  # headings of levels 1 to 3 get GitHub's anchors
highlight_language = "none"
html_theme = "furo"
html_title = "penroot"
html_static_path = ["static"]
html_css_files = ["penroot.css"]
html_copy_source = False
html_show_search_summary = False  # would fetch the pages, which browsers forbid for file:// addresses
smartquotes = False  # would join the two hyphens of an option
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}
# Generated pages, in the order of the navigation.
_MANUAL = "docs/made/manual/README"
_MADE = [
    f"Commands and options </{_MANUAL}>",
    "Settings </docs/made/settings>",
    "Python </docs/made/python>",
    "Tests behind each statement </docs/made/proofs>",
]
_ITEM = re.compile(r"^- \[(.*?)\]\((\S+?)\.md\)", re.M)


def _entries(page: str, text: str) -> list[str]:
    """Return a toctree line for each page linked at the start of a list item in ``text``, the content of ``page``."""
    folder = Path(page).parent
    return [f"{title} </{_flat(folder / target)}>" for title, target in _ITEM.findall(text)]


def _flat(path: Path) -> str:
    return str((ROOT / path).resolve().relative_to(ROOT))


def _toctree(entries: list[str], caption: str = "") -> str:
    about = [f":caption: {caption}"] if caption else []
    return "\n".join(("\n\n```{toctree}", ":hidden:", *about, "", *entries, "```\n"))


def _add_navigation(app: Any, page: str, content: list[str]) -> None:
    """Add a toctree of all pages to the first page, and of the manual pages to their index."""
    if page == root_doc:
        content[0] += _toctree(["All pages </docs/README>"])
        sections = re.split(r"^## (.*)\n", (ROOT / "docs/README.md").read_text(), flags=re.M)[1:]
        for caption, text in zip(sections[::2], sections[1::2], strict=True):
            made = _MADE if caption == "Reference" else []
            content[0] += _toctree([*made, *_entries("docs/README", text)], caption)
    elif page == _MANUAL:
        content[0] += _toctree(_entries(page, content[0]))


def _write_index(app: Any, failure: Exception | None) -> None:
    """Copy the first page to index.html."""
    if not failure and app.builder.name == "html":
        shutil.copyfile(f"{app.outdir}/{root_doc}.html", f"{app.outdir}/index.html")


def _keep_anchors(app: Any, document: Any) -> None:
    """Give each heading GitHub's anchor, besides the anchor of Sphinx."""
    anchors = app.env.metadata[app.env.docname].get("myst_slugs", {})
    of_ours = {of_sphinx: anchor for anchor, (_, of_sphinx, _) in anchors.items()}
    for section in document.findall(lambda node: node.tagname == "section"):
        section["ids"] += {of_ours.get(name, name) for name in section["ids"]} - {*section["ids"]}


def setup(app: Any) -> None:
    app.connect("source-read", _add_navigation)
    app.connect("doctree-read", _keep_anchors)
    app.connect("build-finished", _write_index)
