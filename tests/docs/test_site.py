"""The site in a browser: pages fit phones and desktops, load nothing from other sites, and can be searched."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.docs import ROOT
from tests.docs.conftest import BUILT, Browser

PAGES = sorted(str(path.relative_to(BUILT)) for path in BUILT.rglob("*.html"))
SHOTS = ROOT / "build/docs"


class Page(HTMLParser):
    """The anchors, links and loaded files of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: set[str] = set()
        self.loads: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {key: value or "" for key, value in attrs}
        self.anchors |= {values["id"]} if "id" in values else set()
        if tag == "a" and "href" in values:
            self.links.add(values["href"])
        elif tag == "link" or "src" in values:
            self.loads.add(values.get("src") or values.get("href", ""))


@pytest.fixture(scope="module")
def pages() -> dict[Path, Page]:
    return {BUILT / path: Page(BUILT / path) for path in PAGES}


def test_links_and_anchors_of_the_site_are_there(pages: dict[Path, Page]) -> None:
    wrong = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            there = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if parts.scheme:
                continue
            if not there.is_file() or parts.fragment and unquote(parts.fragment) not in pages[there].anchors:
                wrong.append(f"{path.relative_to(BUILT)}: {link}")
    assert not wrong
    assert sum(len(page.links) for page in pages.values()) > 3000


@pytest.mark.parity("a site from the Markdown of this repository")
def test_nothing_comes_from_elsewhere(pages: dict[Path, Page]) -> None:
    loads = {load for page in pages.values() for load in page.loads}
    assert loads and not [load for load in loads if urlsplit(load).netloc]
    styles = "".join(path.read_text() for path in BUILT.rglob("*.css"))
    assert not re.findall(r"""(?:url\(|@import )["']?(?:https?:)?//[^)"']*""", styles)


@pytest.mark.parity("a site from the Markdown of this repository")
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 390, 1440])
def test_pages_fit(browser: Browser, width: int, theme: str) -> None:
    script = f"""
      for (const path of {json.dumps(PAGES)}) {{
        const [page, close] = await open(path, {width}, "{theme}");
        const root = page.documentElement;
        if (root.scrollWidth > root.clientWidth) print(`${{path}} is ${{root.scrollWidth}} pixels wide`);
        const light = getComputedStyle(page.body).backgroundColor.match(/\\d+/g)[0] > 127;
        if (light !== ("{theme}" === "light")) print(`${{path}} is not {theme}`);
        close();
      }}
      print({len(PAGES)});
    """
    assert browser.look(script) == [str(len(PAGES)), "end"]


@pytest.mark.parity("a site from the Markdown of this repository")
def test_search_needs_no_server(browser: Browser) -> None:
    document = browser.show(f"file://{browser.site}/search.html?q=flock", "--dump-dom")
    results = re.findall(r'<a href="([^"]*)"', document.partition('id="search-results"')[2])
    assert any(result.startswith("docs/howto/clusters.html") for result in results), document


@pytest.mark.parametrize("page", ["index", "docs/tutorials/user", "docs/howto/mount-data", "docs/reference/events"])
def test_pictures_for_people(browser: Browser, page: str) -> None:
    """Write screenshots to build/docs for a human to check."""
    SHOTS.mkdir(parents=True, exist_ok=True)
    shot = browser.directory / "profile/shot.png"
    for size in ("1440,1000", "500,900"):
        browser.show(f"file://{browser.site}/{page}.html", f"--window-size={size}", f"--screenshot={shot}")
        data = shot.read_bytes()
        assert data.startswith(b"\x89PNG") and len(data) > 20_000
        (SHOTS / f"{page.replace('/', '-')}-{size.partition(',')[0]}.png").write_bytes(data)
