"""Compare reads inside four containers of an image: an overlay of 11 layers, a directory, and twice a squashfs file.

A FUSE server provides the squashfs file. The second container of the file shares the server of the first. Each row is
the minimum of several rounds with a warm page cache. The same program of the image runs in all four containers. The
containers take turns at each read, because the speed of a shared machine varies.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import subprocess
from collections.abc import Iterator

from benchmarks.images import compressed, user_and_registry
from benchmarks.tables import judge
from tests.images import Image, Layer, busybox, entry, symlink, tar
from tests.kernel.conftest import PREFIX, UID

INSIDE = pathlib.Path(__file__).with_name("inside.py")
# Python and its libraries, and many small files.
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
# Budgets of each test with the overlay, as ratios to the directory.
BUDGETS = {"read 1 GB of libraries": 1.1, "python imports": 1.1, "walk and stat": 3.0, "open many small files": 3.0}


def bench_reading(rounds: int) -> bool:
    links = [Layer(tar([symlink(n, os.readlink(f"/{n}")) for n in ("lib", "lib64") if os.path.islink(f"/{n}")]))]
    more = [Layer(tar([entry("opt/inside.py", INSIDE.read_bytes())]))]
    layers = [*busybox().layers, *links, *(compressed(paths) for paths in LAYERS), *more]
    with user_and_registry() as (user, server):
        server.pusher.image("bench/reading", "1", Image(layers, busybox().settings))
        count = len(layers)
        del layers
        name, file = f"docker://{server.host}/bench/reading:1", str(user.home / "x.sqsh")
        user.penroot("import", "-o", file, name)
        user.penroot("create", "-n", "plain", file)
        if os.geteuid() == 0:
            os.chmod("/dev/fuse", 0o666)
        kinds = {"overlay": [name], "directory": ["--rw", "plain"], "FUSE": [file], "second": [file]}
        least: dict[str, dict[str, float]] = {kind: {} for kind in kinds}
        with contextlib.ExitStack() as stack:
            insides = {kind: stack.enter_context(_inside(user.environ, words)) for kind, words in kinds.items()}
            for test in BUDGETS:
                for number in range(rounds + 1):  # the first round warms the cache
                    for kind, inside in insides.items():
                        if kind in ("FUSE", "second") and number > 3:
                            continue  # three rounds are enough: FUSE takes much longer than the others
                        seconds = _ask(inside, test)
                        if number:
                            least[kind][test] = min(seconds, least[kind].get(test, seconds))
    return _table(count, least)


@contextlib.contextmanager
def _inside(environ: dict[str, str], arguments: list[str]) -> Iterator[subprocess.Popen[str]]:
    command = ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups", "--", f"{PREFIX}/bin/penroot", "start"]
    command += [*arguments, "/usr/bin/python3", "-IS", "/opt/inside.py"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environ, cwd="/", stdin=pipe, stdout=pipe, text=True) as process:
        yield process


def _ask(inside: subprocess.Popen[str], test: str) -> float:
    assert inside.stdin is not None
    assert inside.stdout is not None
    inside.stdin.write(test + "\n")
    inside.stdin.flush()
    return float(inside.stdout.readline())


def _table(count: int, least: dict[str, dict[str, float]]) -> bool:
    head = f"inside a container of {count} layers"
    print(f"\n{head:44} {'overlay':>9} {'directory':>9} {'FUSE':>9} {'second':>9} {'ratio':>7}  budget, ms")
    good = True
    for test, budget in BUDGETS.items():
        kinds = ("overlay", "directory", "FUSE", "second")
        overlay, directory, fuse, second = (least[kind][test] * 1000 for kind in kinds)
        within, verdict = judge(overlay / directory, budget, also=budget < 2 or overlay < fuse)
        good &= within
        times = "".join(f" {time:9.1f}" for time in (overlay, directory, fuse, second))
        print(f"{test:44}{times} {overlay / directory:6.2f}x  {verdict}")
    return good
