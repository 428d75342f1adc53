"""Manual pages as Markdown."""

from __future__ import annotations

import re
from functools import cache

from enroot_py.cli import manual
from enroot_py.cli.verbs import penroot
from pyxis_py.admin import manual as of_plugin
from pyxis_py.admin.cli import commands
from tests.docs import NOTE, escaped

# Ordered by audience; the verbs follow.
FIRST = ("penroot.1", "penroot-srun.7", "penroot.yaml.5", "pyxis-py.1")
_ESCAPES = {"\\e": "\\", "\\-": "-", "\\(ti": "~", "\\(ha": "^", "\\(aq": "'", "\\&": "", "\\fB": "", "\\fR": ""}


@cache
def sources() -> dict[str, str]:
    """Return the pages as roff, by name."""
    return {**dict(manual.pages(penroot)), **dict(of_plugin.pages(commands))}


def pages() -> dict[str, str]:
    """Return the pages as Markdown, by file."""
    made = {f"{name}.md": _page(name, source) for name, source in sources().items()}
    names = [*FIRST, *sorted(set(sources()) - set(FIRST))]
    rows = [f"- [{_reference(name)}]({name}.md): {_summary(sources()[name])}" for name in names]
    made["README.md"] = "\n".join((NOTE, "", "# Manual pages", "", "`man` shows the same pages.", "", *rows)) + "\n"
    return made


def _reference(name: str) -> str:
    """Return the reference to a page, such as penroot(1) for penroot.1."""
    stem, _, number = name.rpartition(".")
    return f"{stem}({number})"


def _summary(source: str) -> str:
    line = source.splitlines()[2]
    return escaped(plain(line).partition(" - ")[2])


def plain(roff: str) -> str:
    """Strip roff's markup from words."""
    return re.sub(r"\\(e|-|\(ti|\(ha|\(aq|&|fB|fR)", lambda match: _ESCAPES[match[0]], roff)


def _page(name: str, source: str) -> str:
    out = [NOTE, "", f"# {_reference(name)}", ""]
    verbatim = entry = ""
    for line in source.splitlines()[1:]:
        macro, _, rest = line.partition(" ")
        words = plain(line)
        if macro == ".SH":
            out += ["", f"## {rest.capitalize()}", ""]
        elif macro in (".nf", ".fi"):
            verbatim = ".nf" if macro == ".nf" else ""
            out += ["```"] if macro == ".fi" else ["```yaml"]
        elif macro == ".TP":
            entry = ".TP"
        elif macro in (".PP", ".br"):
            out.append("")
        elif verbatim:
            out.append(words)
        elif entry == ".TP":
            out.append(f"- `` {words} ``" if "`" in words else f"- `{words}`")
            entry = "meaning"
        elif entry:
            out[-1] += f": {_linked(words)}" if words else ""
            entry = ""
        elif out[-2:] == ["## Synopsis", ""] or out[-1:] == [""] and words.startswith(("penroot ", "pyxis-py ")):
            out.append(f"`{words}`")
        else:
            out.append(_linked(words))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(out)) + "\n"


def _linked(words: str) -> str:
    """Link words to the manual pages that they name."""

    def link(match: re.Match[str]) -> str:
        page = f"{match[1]}.{match[2]}"
        return f"[{match[0]}]({page}.md)" if page in sources() else match[0]

    return re.sub(r"\b([a-z][\w.-]*)\((\d)\)", link, escaped(words))
