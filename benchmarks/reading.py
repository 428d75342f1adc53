"""What it costs to read inside a container: an overlay of ten layers, next to the same tree as one directory, and FUSE.

Each row is the least of some rounds in turn, page cache warm: the same program of the
image runs in each of the three, one after the other.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess

from benchmarks.images import compressed, place
from tests.images import Image, Layer, busybox, entry, symlink, tar
from tests.kernel.conftest import PREFIX, UID

INSIDE = pathlib.Path(__file__).with_name("inside.py")
# Python and what it needs, libraries by their names so that layers are alike, and many small files.
LAYERS = (
    ("/usr/bin", "/usr/lib64"),
    ("/usr/lib/python3.11", "/usr/lib/python3"),
    ("/usr/lib/x86_64-linux-gnu",),
    ("/usr/include", "/usr/sbin"),
    ("/usr/share/doc", "/usr/share/perl"),
    ("/usr/share/man", "/usr/share/zoneinfo"),
    ("/usr/share/python-wheels", "/usr/share/icons"),
    ("/usr/lib/gcc",),
)
# What an overlay may cost in units of the directory.
BUDGETS = {"read 1 GB of libraries": 1.1, "python imports": 1.1, "walk and stat": 3.0, "open many small files": 3.0}


def bench_reading(rounds: int) -> bool:
    """Inside a container of ten layers."""
    links = [Layer(tar([symlink(n, os.readlink(f"/{n}")) for n in ("lib", "lib64") if os.path.islink(f"/{n}")]))]
    more = [Layer(tar([entry("opt/inside.py", INSIDE.read_bytes())]))]
    layers = [*busybox().layers, *links, *(compressed(paths) for paths in LAYERS), *more]
    with place() as (user, server):
        server.pusher.image("bench/reading", "1", Image(layers, busybox().settings))
        count = len(layers)
        del layers
        name, file = f"docker://{server.host}/bench/reading:1", str(user.home / "x.sqsh")
        user.penroot("import", "-o", file, name)
        user.penroot("create", "-n", "plain", file)
        if os.geteuid() == 0:
            os.chmod("/dev/fuse", 0o666)
        kinds = {"overlay": [name], "directory": ["--rw", "plain"], "FUSE": [file]}
        least: dict[str, dict[str, float]] = {kind: {} for kind in kinds}
        for _ in range(rounds):
            for kind, arguments in kinds.items():
                for what, seconds in json.loads(_run(user.environ, arguments)).items():
                    least[kind][what] = min(seconds, least[kind].get(what, seconds))
    return _table(count, least)


def _run(environ: dict[str, str], arguments: list[str]) -> str:
    command = ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups", "--", f"{PREFIX}/bin/penroot", "start"]
    command += [*arguments, "/usr/bin/python3", "-IS", "/opt/inside.py"]
    done = subprocess.run(command, env=environ, cwd="/", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True)
    return done.stdout.decode()


def _table(count: int, least: dict[str, dict[str, float]]) -> bool:
    head = f"inside a container of {count} layers"
    print(f"\n{head:44} {'overlay':>9} {'directory':>9} {'FUSE':>9} {'ratio':>7}  budget, ms")
    good = True
    for what, budget in BUDGETS.items():
        overlay, directory, fuse = (least[kind][what] * 1000 for kind in ("overlay", "directory", "FUSE"))
        within = overlay <= budget * directory and (budget < 2 or overlay < fuse)
        good &= within
        verdict = f"<= {budget:g}x {'ok' if within else 'TOO SLOW'}"
        times = "".join(f" {time:9.1f}" for time in (overlay, directory, fuse))
        print(f"{what:44}{times} {overlay / directory:6.2f}x  {verdict}")
    return good
