"""The pages of docs/: what is made of the source is fresh, links lead somewhere, and each page is in a list."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from enroot_py.config import yaml
from enroot_py.config.table import all_settings
from pyxis_py import settings as plugin_settings
from tests.docs import ROOT, anchors, escaped, manual, messages, slug
from tests.docs.reading import Source
from tests.parity import exists

HOW = "run: .venv/bin/python -m tests.docs"
PAGES = sorted(
    path for path in ROOT.rglob("*.md") if not re.match(r"\..*|build$|site$|tests$", path.relative_to(ROOT).parts[0])
)
_HEADING = re.compile(r"^#{1,6} (.*)$", re.M)
_WORD = re.compile(r"[^\W_]+")
_LINK = re.compile(r"(?<!\\)\]\(([^)\s]+)\)")


@cache
def prose(path: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.M | re.S)


@cache
def headings(path: Path) -> list[str]:
    return [re.sub(r"\[([^]]*)\]\([^)]*\)|`` | ``|[`*]", r"\1", title) for title in _HEADING.findall(prose(path))]


def links(path: Path) -> Iterator[str]:
    """Where a page links to, but for spans of code."""
    text = re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", prose(path), flags=re.S)
    yield from (target for target in _LINK.findall(text) if "://" not in target)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    for target in links(path):
        file, _, anchor = target.partition("#")
        there = path.parent / file if file else path
        assert there.is_file(), f"{target}: there is no such file"
        if anchor:
            assert anchor in anchors(headings(there)), f"{target}: no heading of {there.name} has that anchor"


def test_there_are_links_to_look_at() -> None:
    assert sum(len(list(links(path))) for path in PAGES) > 100


@pytest.mark.parametrize("made", [messages, manual], ids=["errors", "manual"])
def test_pages_that_are_made_are_fresh(made: type[messages]) -> None:
    pages = made.pages()
    assert {path.name for path in made.DIRECTORY.glob("*.md")} == set(pages), HOW
    for name, text in pages.items():
        assert (made.DIRECTORY / name).read_text() == text, f"{name} is stale: {HOW}"


def test_every_page_is_in_a_list() -> None:
    lists = [ROOT / "docs/README.md", ROOT / "docs/troubleshooting.md", ROOT / "docs/manual/README.md"]
    listed = {(path.parent / target).resolve() for path in lists for target in links(path)}
    assert {*PAGES} - {ROOT / "README.md", ROOT / "docs/README.md"} <= listed


def test_every_error_has_its_anchor() -> None:
    found = messages.by_page()
    assert sum(map(len, found.values())) > 500
    for name, on_page in found.items():
        there = set(anchors(headings(messages.DIRECTORY / f"{name}.md")))
        for message in on_page:
            assert slug(message.text) in there, message.text


def test_every_place_that_makes_an_error_says_words_or_hands_on_those_of_another() -> None:
    """An error whose words cannot be read in the source has no anchor: write them where they are raised."""
    assert messages.handing_on() == messages.HANDED_ON


def test_words_of_ours_are_about_a_message_that_there_is() -> None:
    texts = {message.text for found in messages.by_page().values() for message in found}
    assert set(messages.words()) <= texts


CLUSTERS = (ROOT / "docs/clusters.md").read_text()


def test_each_part_about_clusters_names_tests_that_there_are() -> None:
    parts = CLUSTERS.split("\n## ")[2:]  # after the table of places
    assert len(parts) > 10
    for part in parts:
        named = re.findall(r"`(\w+/\w+\.py::\w+)`", part.partition("\nTests: ")[2])
        assert named, part.splitlines()[0]
        for test in named:
            assert exists(test), f"no such test: {test}"


def test_settings_for_clusters_are_settings() -> None:
    blocks = re.findall(r"^```yaml\n(.*?)^```", CLUSTERS, re.M | re.S)
    assert sum(len(yaml.parse("clusters.md", block.encode())) for block in blocks) > 8
    arguments = set(re.findall(r"`(\w+=[\w./]+)`", CLUSTERS))
    ours = {argument for argument in arguments if argument.partition("=")[0] in plugin_settings.all_settings()}
    assert len(ours) > 5
    plugin_settings.load(sorted(ours))


def test_places_of_the_settings_are_those_of_the_table() -> None:
    for row in re.findall(r"^\|.*?\| `(\w+_path)` \|.*\| (.*?) \|$", CLUSTERS, re.M):
        default = all_settings()[f"ENROOT_{row[0].upper()}"].default
        shown = default.replace("${XDG_CACHE_HOME}", "~/.cache").replace("${XDG_DATA_HOME}", "~/.local/share")
        shown = shown.replace("${XDG_CONFIG_HOME}", "~/.config").strip("${}").partition("}")[0]
        assert f"`{shown}`" in row[1]


SAMPLE = '''
LIMIT = 4 << 10
_WAY = "buy a disk"

class PenrootError(Exception): ...
class DiskError(PenrootError):
    """A disk."""
    exit_code = 3

def full(path, room):
    message = f"no room in {path} for {len(room)} files of {room[0]!r}"
    raise DiskError(message, hint=_WAY if path else f"at most {LIMIT >> 10} KiB")

def refuse(why, hint=""):
    raise PenrootError(f"{full.name}: {why}", hint=hint)

def ask(count):
    if count > 1:
        refuse("too many", "take fewer")
    refuse(_reason(count))

def _reason(count) -> str:
    if count:
        return "one is none"
    return "nothing" + " at all"

def hand_on(e):
    raise PenrootError(f"{e.path}: {e}") from e
'''


def test_messages_are_read_from_the_source(tmp_path: Path) -> None:
    (tmp_path / "enroot_py").mkdir()
    (tmp_path / "enroot_py/disk.py").write_text(SAMPLE)
    source = Source(tmp_path)
    kinds = messages.kinds(source)
    assert {name: kind.status for name, kind in kinds.items()} == {
        "PenrootError": 1,
        "DiskError": 3,
        "ValueError": 1,
    }
    found = messages.resolved(source)
    assert {kind: {m.text: list(m.hints) for m in said} for kind, said in found.items()} == {
        "DiskError": {"no room in PATH for COUNT files of 'ROOM'": ["buy a disk", "at most 4 KiB"]},
        "PenrootError": {
            "NAME: too many": ["take fewer"],
            "NAME: one is none": [],
            "NAME: nothing at all": [],
        },
    }


@pytest.mark.parametrize(
    ("text", "markdown"),
    [
        ("a_b _c_ *d*", r"a_b \_c\_ \*d\*"),
        ("[x](y) <z>", r"[x]\(y) \<z>"),
        ("`$HOME` \\", r"\`\$HOME\` \\"),
    ],
)
def test_text_is_shown_as_it_is(text: str, markdown: str) -> None:
    assert escaped(text) == markdown


def test_headings_that_are_the_same_have_numbers() -> None:
    assert list(anchors(["A b", "`A` b!", "A B"])) == ["a-b", "a-b-1", "a-b-2"]


@pytest.mark.parametrize("name", manual.sources())
def test_a_manual_page_has_every_word_that_man_shows(name: str) -> None:
    roff = [line for line in manual.sources()[name].splitlines()[1:] if not line.startswith(".")]
    page = re.sub(r"\]\([^)]*\)", "", (manual.DIRECTORY / f"{name}.md").read_text())
    words = iter(re.findall(_WORD, page))
    for word in re.findall(_WORD, manual.plain("\n".join(roff))):
        assert word in words, f"{word!r} is not where it should be"
