"""Compare penroot with enroot and pyxis: the first use of an image, the next use, a step, the first use on four nodes.

PENROOT_BENCH_ENROOT is the prefix of an installed enroot. PENROOT_BENCH_PYXIS is the path of pyxis's spank_pyxis.so.
Slurm cannot load both plugins at once, so two labs run one after the other. The chart of the seconds is
docs/static/figures.svg.
"""

from __future__ import annotations

import json
import os
import pathlib
import time
from collections.abc import Callable

from benchmarks.images import images_of
from benchmarks.tables import PREFIX
from tests import images
from tests.slurm.lab import Lab

NODES = 4
STEPS = 10
IMAGE = "registry.lab#bench/app:1"
CHART = pathlib.Path(__file__).parents[1] / "docs/static/figures.svg"
ROWS = ("first use", "next use", "step in a named container", f"first use on {NODES} nodes")


def bench_originals(rounds: int) -> bool:
    """Print the table and draw the chart, if enroot and pyxis are installed."""
    enroot, pyxis = (os.environ.get(f"PENROOT_BENCH_{name}") for name in ("ENROOT", "PYXIS"))
    if not enroot or not pyxis:
        print("\npenroot beside enroot + pyxis: MISSING, set PENROOT_BENCH_ENROOT and PENROOT_BENCH_PYXIS")
        return True
    ours = in_lab(rounds, clear_penroot, prefix=PREFIX)
    theirs = in_lab(rounds, clear_enroot, plugin=f"required {pyxis}", enroot=enroot)
    print(f"{'seconds':30} {'penroot':>8} {'enroot + pyxis':>15} {'ratio':>6}")
    for name in ROWS:
        print(f"{name:30} {ours[name]:8.2f} {theirs[name]:15.2f} {ours[name] / theirs[name]:6.2f}")
    CHART.write_text(chart(ours, theirs))
    return all(ours[name] < theirs[name] for name in ROWS)


def in_lab(
    rounds: int, clear: Callable[[Lab], None], *, prefix: str | None = None, plugin: str | None = None, enroot: str = ""
) -> dict[str, float]:
    """Return the least seconds of each row in a cluster with this plugin."""
    lab = Lab(f"{Lab().root}-originals")
    lab.up(NODES, prefix=prefix, plugin=plugin)
    try:
        for node in lab.nodes if enroot else ():
            lab.run(["mount", "--bind", f"{enroot}/bin", "/usr/local/bin"], user="root", node=node)
        push(lab)
        image = f"--container-image={IMAGE}"
        times: dict[str, list[float]] = {}
        steps = (
            ["-w", "n1", image],
            ["-w", "n1", image],
            ["-w", "n1", "--container-name=bench"],
            [f"-N{NODES}", image],
        )
        for _ in range(rounds):
            clear(lab)
            for name, words in zip(ROWS, steps, strict=True):
                if name == ROWS[2]:
                    lab.run(["srun", "--mem=0", "-w", "n1", image, "--container-name=bench", "true"])
                elif name == ROWS[3]:
                    clear(lab)
                for _ in range(STEPS if name == ROWS[2] else 1):
                    begin = time.monotonic()
                    lab.run(["srun", "--mem=0", *words, "true"], timeout=900)
                    times.setdefault(name, []).append(time.monotonic() - begin)
        return {name: min(taken) for name, taken in times.items()}
    finally:
        for node in lab.nodes if enroot else ():
            lab.run(["umount", "/usr/local/bin"], user="root", node=node, check=False)
        lab.down()


class Image(images.Image):
    """An image with a history. The registry converts manifests for enroot, and the conversion needs a history."""

    def config(self) -> bytes:
        return json.dumps(
            {**json.loads(super().config()), "history": [{"created_by": "bench"}] * len(self.layers)}
        ).encode()


def push(lab: Lab) -> None:
    """Push an image of this machine's programs with a Docker manifest, because enroot asks for no other manifest."""
    image = images_of("4 layers")[0]
    image = Image(image.layers, image.settings)
    index = images.index([(image, {"os": "linux", "architecture": image.architecture})])
    layout = pathlib.Path(lab.root, "home/alice/layout")
    images.write_layout(layout, (image.config(), image.manifest(), *(layer.blob for layer in image.layers)), index)
    copy = ["skopeo", "--insecure-policy", "copy", "-q", "--format=v2s2", "oci:/home/alice/layout"]
    lab.run([*copy, f"docker://{IMAGE.replace('#', '/')}"], user="root")
    print(f"\nan image of {sum(len(layer.blob) for layer in image.layers) / 1e6:.0f} MB")


def clear_penroot(lab: Lab) -> None:
    for node in lab.nodes:
        lab.run("penroot remove -f pyxis_bench; penroot cache prune --older 0", node=node, check=False)


def clear_enroot(lab: Lab) -> None:
    for node in lab.nodes:
        lab.run("enroot remove -f pyxis_bench; rm -rf /var/tmp/enroot-*", node=node, check=False)


def chart(ours: dict[str, float], theirs: dict[str, float]) -> str:
    """Return an SVG with two bars for each row. Each row has its own scale. The colors fit light and dark pages."""
    width, bar, gap, left = 760, 16, 14, 200
    lines, y = [], 40
    for name in ROWS:
        scale = (width - left - 90) / max(ours[name], theirs[name])
        lines.append(f'<text x="{left - 10}" y="{y + bar + 4}" text-anchor="end">{name}</text>')
        for kind, seconds in (("ours", ours[name]), ("theirs", theirs[name])):
            length = max(2, seconds * scale)
            lines.append(f'<rect class="{kind}" x="{left}" y="{y}" width="{length:.0f}" height="{bar}"/>')
            lines.append(f'<text x="{left + length + 6:.0f}" y="{y + bar - 3}">{seconds:.2f} s</text>')
            y += bar + 2
        y += gap
    key = "".join(
        f'<rect class="{kind}" x="{x}" y="8" width="{bar}" height="{bar}"/><text x="{x + 22}" y="21">{text}</text>'
        for kind, x, text in (("ours", left, "penroot"), ("theirs", left + 110, "enroot + pyxis"))
    )
    style = "text{font:13px sans-serif;fill:#777}.ours{fill:#2a7de1}.theirs{fill:#999}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y}" role="img" '
        f'aria-label="Seconds of penroot beside enroot and pyxis"><style>{style}</style>{key}{"".join(lines)}</svg>\n'
    )
