"""The terminal recording of the front page: an SVG made from a real run in the lab.

``PENROOT_PREFIX=PREFIX .venv/bin/python -m tests.docs.recording`` recreates docs/static/recording.svg;
``tests/slurm/test_pages.py`` runs the commands again and compares the output.
"""

from __future__ import annotations

import html
import re

from tests.docs import ROOT, console
from tests.installation import PREFIX
from tests.slurm import debian
from tests.slurm.lab import Lab

FILE = ROOT / "docs/static/recording.svg"
COMMANDS = (
    "srun -N2 --container-image=debian:12 grep PRETTY /etc/os-release",
    "time srun -N2 --container-image=debian:12 true",
    "srun --container-image=Debian:12 true",
    "penroot start --explain docker://debian:12 true 2>/dev/null | tail -4",
)
_LINE_PX, _TOP_PX, _WIDTH_PX = 20, 44, 900
_PAUSE_S = 2.0  # seconds before each command
_STYLE = (
    "rect{fill:#16181d}text{font:14px ui-monospace,monospace;fill:#d6d9df;white-space:pre}"
    ".typed{fill:#8ec07c}g{opacity:0;animation:show .2s forwards}@keyframes show{to{opacity:1}}"
    "@media (prefers-reduced-motion:reduce){g{animation-delay:0s!important}}"
)


def run(lab: Lab, command: str) -> list[str]:
    """Run a command as alice and return the lines of its output."""
    return console.run(lab, f"TIMEFORMAT='%1R seconds'\n{command}").splitlines()


def steady(line: str) -> str:
    """Replace the parts of a line that differ between two runs: times, sizes, progress and digests."""
    return re.sub(r"[0-9a-f]{12,}|\d+(\.\d+)?", "N", line)


def svg(blocks: list[tuple[str, list[str]]]) -> str:
    """Return an SVG in which each command appears, followed by its output."""
    groups, y = [], _TOP_PX
    for number, (command, lines) in enumerate(blocks):
        texts = []
        for kind, text in (("typed", f"$ {command}"), *(("", line) for line in lines)):
            texts.append(f'<text class="{kind}" x="16" y="{y}">{html.escape(text[:105])}</text>')
            y += _LINE_PX
        groups.append(f'<g style="animation-delay:{number * _PAUSE_S}s">{"".join(texts)}</g>')
        y += _LINE_PX // 2
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH_PX} {y}" role="img" aria-label="A terminal">'
    return f'{head}<style>{_STYLE}</style><rect width="100%" height="100%" rx="8"/>{"".join(groups)}</svg>\n'


def recorded() -> list[tuple[str, list[str]]]:
    """Return the commands of the file, with the lines below each."""
    blocks: list[tuple[str, list[str]]] = []
    for kind, text in re.findall(r'<text class="(.*?)".*?>(.*?)</text>', FILE.read_text()):
        if kind:
            blocks.append((html.unescape(text).removeprefix("$ "), []))
        else:
            blocks[-1][1].append(html.unescape(text))
    return blocks


def main() -> None:
    lab = Lab()
    was_up = lab.is_up()
    lab.up(2, prefix=PREFIX)
    try:
        debian.push(lab)
        for node in lab.nodes:
            lab.run("penroot cache prune --older 0", node=node, check=False)
        FILE.write_text(svg([(command, run(lab, command)) for command in COMMANDS]))
    finally:
        if not was_up:
            lab.down()


if __name__ == "__main__":
    main()
