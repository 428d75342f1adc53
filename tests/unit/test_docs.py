"""Check docs/: links have targets, each page is in the table of contents, and facts match the code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from enroot_py.config import yaml
from enroot_py.config.table import all_settings
from pyxis_py.request import settings as plugin_settings
from tests.docs import MADE, ROOT, anchors, escaped, manual
from tests.docs.proofs import marks

PAGES = sorted(
    path
    for path in ROOT.rglob("*.md")
    if MADE not in path.parents and not re.match(r"\..*|build$|site$|tests$", path.relative_to(ROOT).parts[0])
)
_HEADING = re.compile(r"^#{1,6} (.*)$", re.M)
_WORD = re.compile(r"[^\W_]+")
_LINK = re.compile(r"(?<!\\)\]\(([^)\s]+)\)")


@cache
def prose(path: Path) -> str:
    """Return a page without its code blocks."""
    return re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.M | re.S)


@cache
def headings(path: Path) -> list[str]:
    return [re.sub(r"\[([^]]*)\]\([^)]*\)|`` | ``|[`*]", r"\1", title) for title in _HEADING.findall(prose(path))]


def links(path: Path) -> Iterator[str]:
    """Return the link targets of a page, except targets in code and targets with a scheme."""
    text = re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", prose(path), flags=re.S)
    yield from (target for target in _LINK.findall(text) if "://" not in target)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    assert path.parent != ROOT or path.name != "README.md" or len(list(links(path))) > 20
    for target in links(path):
        file, _, anchor = target.partition("#")
        linked = path.parent / file if file else path
        assert linked.is_file(), f"{target}: there is no such file"
        if anchor:
            assert anchor in anchors(headings(linked)), f"{target}: no heading of {linked.name} has that anchor"


def test_every_page_is_in_a_list() -> None:
    listed = {(ROOT / "docs" / target).resolve() for target in links(ROOT / "docs/README.md")}
    assert {*PAGES} - {ROOT / "README.md", ROOT / "docs/README.md"} <= listed


@pytest.mark.parity("messages for which a hint is too short")
def test_explained_messages_are_in_the_source() -> None:
    paths = [path for room in ("enroot_py", "pyxis_py", "c_shims") for path in (ROOT / room).rglob("*.[cp]*")]
    source = "".join(path.read_text() for path in paths if path.suffix in (".c", ".py"))
    source = re.sub(r'"\s+f?"', "", source)  # join strings that continue in the next line
    messages = re.findall(r"^### `(.*)`$", (ROOT / "docs/reference/troubleshooting.md").read_text(), re.M)
    assert len(messages) > 20
    for message in messages:
        for words in re.split(r"\(?(?<![A-Za-z])[A-Z][A-Z-]+(?![a-z])\)?", message):
            assert words in source, message


CLUSTERS = (ROOT / "docs/howto/clusters.md").read_text()


@pytest.mark.parity("settings for each kind of cluster")
def test_each_part_about_clusters_has_tests() -> None:
    titles = re.findall(r"^## (.*)", CLUSTERS, re.M)[1:]  # without the first part, which is the table of directories
    assert len(titles) > 10
    assert {*titles} == {*marks("clusters")}


def test_settings_for_clusters_are_settings() -> None:
    blocks = re.findall(r"^```yaml\n(.*?)^```", CLUSTERS, re.M | re.S)
    assert sum(len(yaml.parse("clusters.md", block.encode())) for block in blocks) > 8
    arguments = set(re.findall(r"`(\w+=[\w./]+)`", CLUSTERS))
    ours = {argument for argument in arguments if argument.partition("=")[0] in plugin_settings.all_settings()}
    assert len(ours) > 5
    plugin_settings.load(sorted(ours))


def test_table_of_directories_has_the_defaults() -> None:
    for row in re.findall(r"^\|.*?\| `(\w+_path)` \|.*\| (.*?) \|$", CLUSTERS, re.M):
        default = all_settings()[f"ENROOT_{row[0].upper()}"].default
        shown = default.replace("${XDG_CACHE_HOME}", "~/.cache").replace("${XDG_DATA_HOME}", "~/.local/share")
        shown = shown.replace("${XDG_CONFIG_HOME}", "~/.config").strip("${}").partition("}")[0]
        assert f"`{shown}`" in row[1]


@pytest.mark.parametrize(
    ("text", "markdown"),
    [
        ("a_b _c_ *d*", r"a_b \_c\_ \*d\*"),
        ("[x](y) <z>", r"[x]\(y) \<z>"),
        ("`$HOME` \\", r"\`\$HOME\` \\"),
    ],
)
def test_text_is_escaped_for_markdown(text: str, markdown: str) -> None:
    assert escaped(text) == markdown


def test_headings_that_are_the_same_have_numbers() -> None:
    assert list(anchors(["A b", "`A` b!", "A B"])) == ["a-b", "a-b-1", "a-b-2"]


@pytest.mark.parity("manual pages as pages of the site")
@pytest.mark.parametrize("name", manual.sources())
def test_a_manual_page_has_every_word_that_man_shows(name: str) -> None:
    roff = [line for line in manual.sources()[name].splitlines()[1:] if not line.startswith(".")]
    page = re.sub(r"\]\([^)]*\)", "", manual.pages()[f"{name}.md"])
    words = iter(re.findall(_WORD, page))
    for word in re.findall(_WORD, manual.plain("\n".join(roff))):
        assert word in words, f"{word!r} is missing in the page, or in another order"


def test_walk_of_a_reference_names_functions_that_exist() -> None:
    """docs/explanation/developing.md follows an image reference through the code, in ten steps."""
    steps = re.findall(r"^\d+\. `(.+?)`, `(.+?)\(\)`: ", (ROOT / "docs/explanation/developing.md").read_text(), re.M)
    assert len(steps) == 10
    for path, function in steps:
        definition = rf"^ *def {function}\(" if path.endswith(".py") else rf"^[a-z].* {function}\("
        assert re.search(definition, (ROOT / path).read_text(), re.M), f"{path} has no {function}()"
