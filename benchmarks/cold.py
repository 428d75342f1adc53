"""Measure a large image: the first use, compared with plain tools, and its programs with a cold page cache.

pytorch.py makes the image. For the first use we compare the time, the time until all data is on disk, and the bytes
written to the disk. Other processes may write to the disk too, so PENROOT_BENCH_DIR can name a directory on a separate
disk. The benchmark needs 40 GB. Before each program runs, we drop the kernel's caches for the whole machine.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import time

from benchmarks import pytorch
from benchmarks.images import BENCH_DIRECTORY, PLAIN, Cost, measure, user_and_registry
from benchmarks.tables import judge
from tests.installation import LIBRARY
from tests.kernel.conftest import PREFIX, User
from tests.kernel.registry import Server

IMAGE = "bench/pytorch"
# Budgets of the first use, as ratios to the plain tools. Plain tools check no digest, so they are faster, unless the
# disk is the bottleneck.
MAX_FIRST_RATIO = 2.2
MAX_WRITTEN_RATIO = 1.02
# By name: a program, its budget in a container of layers, and its budget in a container of a squashfs file. The budgets
# are ratios to the seconds in an unpacked directory.
PROGRAMS = {
    "import torch": ("import torch", 1.1, 1.3),
    "read all .py": (
        "import os\nfor top, _, names in os.walk('/usr/local'):\n"
        "  for name in names:\n    if name.endswith('.py'): open(f'{top}/{name}', 'rb').read()",
        1.3,
        None,
    ),
}
CLOCK = "import time\nbegun = time.perf_counter()\n{}\nprint(time.perf_counter() - begun)"


def bench_pytorch(rounds: int) -> bool:
    """Measure the first use of an image with PyTorch and CUDA's libraries, and reads of its files with cold caches."""
    with user_and_registry() as (user, server):
        wheels = pathlib.Path(os.environ.get("PENROOT_BENCH_WHEELS", user.home / "wheels"))
        wheels.mkdir(exist_ok=True)
        pytorch.download(wheels)
        pytorch.push(server.pusher, IMAGE, wheels, _directory(user, "scratch"))
        good = _first_use(user, server)
        return _cold(user, server, rounds) and good


def _directory(user: User, name: str) -> pathlib.Path:
    path = user.home / name
    path.mkdir()
    user.own(path)
    return path


# ---------------------------------------------------------------------------
# First use


def _first_use(user: User, server: Server) -> bool:
    plain = [*PLAIN, f"http://{server.host}", IMAGE, "1", str(_directory(user, "plain"))]
    uses = {
        "fetch, isal | tar -x, 2 at a time": _first(user, server, *plain, PYTHONPATH=LIBRARY),
        "penroot start REF, cold": _first(user, server, f"{PREFIX}/bin/penroot", "start", _reference(server), "true"),
    }
    if shutil.which("enroot"):
        work = _directory(user, "enroot")
        script = f"enroot import -o x.sqsh docker://{server.host}#{IMAGE}:1 && enroot create -n x x.sqsh"
        environ = {"ENROOT_ALLOW_HTTP": "yes", "ENROOT_CACHE_PATH": str(work), "ENROOT_DATA_PATH": str(work)}
        script = f"cd {work} && {script} && enroot start x true"
        uses["enroot import, create and start"] = _first(user, server, "sh", "-c", script, **environ)
    head = f"{'seconds':>8} {'on disk':>8} {'CPU':>8} {'MB anon':>9} {'MB disk':>9}"
    print(f"\n{'first use of an image with PyTorch':44} {head}")
    good, (base, _, written_by_base) = True, uses["fetch, isal | tar -x, 2 at a time"]
    for name, (cost, on_disk, written) in uses.items():
        ours = name.startswith("penroot")
        ratio, more = cost.seconds / base.seconds, written / max(written_by_base, 1)
        fast, verdict = judge(ratio, MAX_FIRST_RATIO if ours else None)
        lean, amount = judge(more, MAX_WRITTEN_RATIO if ours else None)
        good &= fast and lean
        numbers = f"{cost.seconds:8.1f} {on_disk:8.1f} {cost.cpu:8.1f} {cost.memory / 1e6:9.1f} {written / 1e6:9.0f}"
        print(f"{name:44} {numbers}  {ratio:.2f}x {verdict}  disk {more:.3f}x {amount}", flush=True)
    return good


def _first(user: User, server: Server, *command: str, **environ: str) -> tuple[Cost, float, int]:
    """Return the cost of a command, the seconds until all data is on disk, and the bytes that the disk wrote."""
    subprocess.run(["sync", "-f", BENCH_DIRECTORY], check=True)
    before, begun = _written(), time.perf_counter()
    cost = measure(user, server, *command, **environ)
    subprocess.run(["sync", "-f", BENCH_DIRECTORY], check=True)
    return cost, time.perf_counter() - begun, _written() - before


def _written() -> int:
    """Return the bytes that the disk of BENCH_DIRECTORY has written, from the kernel's block/stat; 0 without a disk."""
    device = os.stat(BENCH_DIRECTORY).st_dev
    try:
        text = pathlib.Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat").read_text()
    except FileNotFoundError:
        return 0
    return 512 * int(text.split()[6])


def _reference(server: Server) -> str:
    return f"docker://{server.host}/{IMAGE}:1"


# ---------------------------------------------------------------------------
# Reads


def _cold(user: User, server: Server, rounds: int) -> bool:
    if os.geteuid() != 0:
        print(f"{'programs with cold caches: need root':44} {'MISSING':>8}")
        return True
    os.chmod("/dev/fuse", 0o666)
    file = str(user.home / "x.sqsh")
    for words in (["import", "-o", file, _reference(server)], ["create", "-n", "plain", file]):
        subprocess.run(user.command(f"{PREFIX}/bin/penroot", *words), env=user.environ, cwd="/", check=True)
    kinds = {"layers": [_reference(server)], "directory": ["--rw", "plain"], "FUSE": [file]}
    print(f"\n{'in a container, caches cold':44} {'layers':>9} {'directory':>9} {'FUSE':>9}  seconds")
    good = True
    for name, (code, over_layers, over_file) in PROGRAMS.items():
        least = dict.fromkeys(kinds, float("inf"))
        for _ in range(rounds):
            for kind, words in kinds.items():
                least[kind] = min(least[kind], _seconds(user, words, code))
        layers, directory, fuse = least.values()
        fast, verdict = judge(layers / directory, over_layers)
        file_is_fast, file_verdict = judge(fuse / directory, over_file)
        good &= fast and file_is_fast
        ratios = f"{layers / directory:.2f}x {verdict}, FUSE {fuse / directory:.2f}x {file_verdict}"
        print(f"{name:44} {layers:9.2f} {directory:9.2f} {fuse:9.2f}  {ratios}", flush=True)
    return good


def _seconds(user: User, words: list[str], code: str) -> float:
    """Drop the caches, and return the seconds that a program in the container takes, by its own clock."""
    os.sync()
    pathlib.Path("/proc/sys/vm/drop_caches").write_text("3")
    command = user.command(f"{PREFIX}/bin/penroot", "start", *words, "/usr/bin/python3", "-c", CLOCK.format(code))
    done = subprocess.run(
        command, env=user.environ, cwd="/", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True
    )
    return float(done.stdout)
