"""What images cost: first use, one layer changed, stored; next to the plain tools.

Images are made of what is on this machine and pushed to a registry on loopback. Seconds
are the least wall time of some runs in turn, page cache warm; CPU is that of all processes;
memory is the greatest sum of anonymous memory that all processes had at one moment, but
for mksquashfs, which has a bound of its own; disk is what was written, by getrusage(2).

Nothing is deleted between runs: for minutes ext4 looks for inodes that were not freed
lately, and what comes after a deletion would be charged several times its own cost
(fs/ext4/ialloc.c, recently_deleted). Others' deletions count too: PENROOT_BENCH_DIR can
name a directory on a file system of its own.
"""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from benchmarks.tables import judge
from enroot_py.config.table import SETTINGS
from tests.images import Image, Layer, busybox, entry, tar
from tests.installation import LIBRARY
from tests.kernel.conftest import PREFIX, UID, User
from tests.kernel.registry import Server, serve

PLACE = os.environ.get("PENROOT_BENCH_DIR", "/var/tmp")
# Peers, as text: the user whom they run as may have no way to this directory.
PLAIN = ("/usr/bin/python3", "-c", pathlib.Path(__file__).with_name("plain.py").read_text())
STEPS = ("bash", "-c", pathlib.Path(__file__).with_name("steps.sh").read_text(), "steps.sh")
# Where layers come from: what a distribution and a wheel have, small files and large ones.
LAYERS = {
    "4 layers": (("/usr/lib/python3.11", "/usr/lib/python3"), ("/usr/bin",), ("/usr/include", "/usr/sbin")),
    "large": (
        ("/usr/lib/x86_64-linux-gnu",),
        ("/usr/share",),
        ("/usr/lib/python3.11", "/usr/lib/python3"),
        ("/usr/bin", "/usr/sbin"),
        ("/usr/lib/gcc", "/usr/include", "/usr/local/lib", "/usr/lib/llvm-14"),
        ("/usr/lib/x86_64-linux-gnu", "again"),
    ),
}


@dataclass
class Cost:
    """What one run took."""

    seconds: float
    cpu: float
    memory: int
    fetched: int
    written: int

    def __str__(self) -> str:
        rest = (self.memory, self.fetched, self.written)
        return f"{self.seconds:8.2f} {self.cpu:8.2f}" + "".join(f" {number / 1e6:9.1f}" for number in rest)


HEAD = f"{'':44} {'seconds':>8} {'CPU':>8} {'MB anon':>9} {'MB net':>9} {'MB disk':>9}"


def compressed(paths: Sequence[str]) -> Layer:
    """A layer of some directories of this machine, gzip; what has no slash in ``paths`` is the directory to be in."""
    from isal import igzip

    there = [path.lstrip("/") for path in paths if os.path.isdir(path)]
    moved = [f"--transform=s,^,{name}/,rSh" for name in paths if "/" not in name]
    command = ["tar", "-C", "/", "--sort=name", "--exclude=*.sock", *moved, "-cf", "-", *there]
    data = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    return Layer(data, blob=igzip.compress(data, 1))


def images_of(name: str) -> list[Image]:
    """Two images that differ in their last layer, of 10 MB."""
    made = [compressed(paths) for paths in LAYERS.get(name, ())]
    changed = [Layer(tar([entry("changed", os.urandom(1 << 20) * 10)])) for _ in range(2)]
    base = busybox()
    return [Image([*base.layers, *made, change], base.settings) for change in changed]


def anonymous(uid: int) -> int:
    """Bytes of anonymous memory that all processes of a user have now, but for mksquashfs."""
    total = 0
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{pid}").st_uid != uid:
                continue
            status = pathlib.Path(f"/proc/{pid}/status").read_text()
        except OSError:
            continue
        found = re.search(r"RssAnon:\s+(\d+) kB", status)
        if found and not status.startswith("Name:\tmksquashfs\n"):
            total += int(found[1]) * 1024
    return total


def sent(server: Server) -> int:
    """Bytes of all blobs that the registry has sent."""
    lines = server.log.read_text().splitlines()
    return sum(int(line.split('" 20', 1)[1].split()[1]) for line in lines if '"GET /v2/' in line and '" 20' in line)


def measure(user: User, server: Server, *command: str, **environ: str) -> Cost:
    """Run a command as the user."""
    before, peak, over = sent(server), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not over.wait(0.03):
            peak = max(peak, anonymous(UID))

    watcher = threading.Thread(target=watch)
    watcher.start()
    os.sync()
    begun = time.perf_counter()
    with tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups", "--", *command],
            env={**user.environ, **environ}, cwd=user.home, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=err,
        )  # fmt: skip
        _, status, used = os.wait4(process.pid, 0)
        took = time.perf_counter() - begun
        over.set()
        watcher.join()
        err.seek(0)
        if status:
            raise RuntimeError(f"{command}: {err.read().decode()}")
    return Cost(took, used.ru_utime + used.ru_stime, peak, sent(server) - before, used.ru_oublock * 512)


def show(name: str, cost: Cost | None, against: Cost | None = None, budget: float | None = None) -> bool:
    """Print a row; False where it took longer than ``budget`` times what ``against`` took."""
    if cost is None:
        print(f"{name:44} {'MISSING':>8}")
        return True
    said, good = "", True
    if against is not None:
        ratio = cost.seconds / against.seconds
        good, verdict = judge(ratio, budget)
        said = f"  {ratio:6.2f}x {verdict}"
    print(f"{name:44} {cost}{said}", flush=True)
    return good


@contextmanager
def place() -> Iterator[tuple[User, Server]]:
    home = pathlib.Path(tempfile.mkdtemp(prefix="penroot-bench-", dir=PLACE))
    home.chmod(0o755)
    user = User(home)
    user.own(home)
    try:
        with serve(home / "registry") as server:
            yield user, server
    finally:
        shutil.rmtree(home)


def bench_images(rounds: int, names: Sequence[str] = ("small", *LAYERS)) -> bool:
    """First use of an image, one layer changed, stored; to a running container and to a file."""
    good = True
    for name in names:
        with place() as (user, server):
            images = images_of(name)
            for tag, image in enumerate(images):
                server.pusher.image("bench/it", str(tag), image)
            size = sum(len(layer.tar) for layer in images[0].layers)
            packed = sum(len(layer.blob) for layer in images[0].layers)
            count = len(images[0].layers)
            del images
            print(f"\n{name}: {count} layers, {size / 1e6:.0f} MB, {packed / 1e6:.0f} MB compressed\n{HEAD}")
            good &= rows(user, server, f"{server.host}/bench/it", rounds, judged=name == "large")
    return good


def rows(user: User, server: Server, image: str, rounds: int, *, judged: bool) -> bool:
    """The table of one image, whose tag 1 differs from 0 in the last layer; ``judged``: the budgets are for it."""
    penroot = f"{PREFIX}/bin/penroot"
    number = 0

    def place() -> str:
        """A new directory: see the head of this module."""
        nonlocal number
        number += 1
        made = user.home / str(number)
        made.mkdir()
        user.own(made)
        return str(made)

    def plain() -> Cost:
        path = {"PYTHONPATH": LIBRARY}  # for isal
        arguments = (f"http://{server.host}", "bench/it", "0", place())
        return measure(user, server, *PLAIN, *arguments, **path)

    def start(cache: str, tag: int) -> Cost:
        command = (penroot, "start", f"docker://{image}:{tag}", "true")
        return measure(user, server, *command, ENROOT_CACHE_PATH=cache)

    def import_(cache: str, tag: int) -> Cost:
        command = (penroot, "import", "-o", f"{place()}/image.sqsh", f"docker://{image}:{tag}")
        return measure(user, server, *command, ENROOT_CACHE_PATH=cache)

    def of_enroot() -> Cost:
        work = place()
        helpers = f"{LIBRARY}/libexec"
        return measure(user, server, *STEPS, f"http://{server.host}", "bench/it", "0", work, helpers)

    turns: dict[str, list[Cost]] = {}
    for _ in range(rounds):
        cache, other = place(), place()
        turn = {"plain": plain()}
        turn |= {"cold": start(cache, 0), "stored": start(cache, 0), "changed": start(cache, 1)}
        turn |= {"file": import_(other, 0), "file stored": import_(other, 0), "file changed": import_(other, 1)}
        turn["steps"] = of_enroot()
        for name, cost in turn.items():
            turns.setdefault(name, []).append(cost)
    costs = {name: min(runs, key=lambda cost: cost.seconds) for name, runs in turns.items()}

    base, steps = costs["plain"], costs["steps"]
    show("fetch, isal | tar -x, 2 at a time", base)
    good = show("penroot start REF, cold", costs["cold"], base, 1.3 if judged else None)
    good &= show("  stored", costs["stored"], base)
    good &= show("  last layer changed", costs["changed"], base)
    show("the steps of enroot import, with its programs", steps)
    good &= show("penroot import -o, cold", costs["file"], steps, 1 / 3 if judged else None)
    good &= show("  stored", costs["file stored"], steps)
    good &= show("  last layer changed", costs["file changed"], steps)
    for name in ("cold", "file"):
        if costs[name].memory > 300e6:
            good = False
            print(f"  {name}: more than 300 MB of anonymous memory: TOO MUCH")
    if shutil.which("umoci") and shutil.which("skopeo"):
        out = place()
        script = (
            f"skopeo --insecure-policy copy -q --src-tls-verify=false docker://{image}:0 oci:{out}/layout:x && "
            f"umoci --log=error unpack --rootless --image {out}/layout:x {out}/bundle"
        )
        unpacked = measure(user, server, "sh", "-c", script)
        show("skopeo copy, umoci unpack --rootless", unpacked, base)
        squash = ("mksquashfs", f"{out}/bundle/rootfs", f"{out}/image.sqsh", "-quiet", "-no-progress",
                  *SETTINGS["ENROOT_SQUASH_OPTIONS"].default.split(), "-mem", "512M")  # fmt: skip
        show("  then mksquashfs", measure(user, server, *squash), base)
    else:
        show("skopeo copy, umoci unpack --rootless", None)
    if shutil.which("enroot"):
        reference = image.replace("/", "#", 1)
        command = ("enroot", "import", "-o", f"{place()}/image.sqsh", f"docker://{reference}:0")
        found = measure(user, server, *command, ENROOT_ALLOW_HTTP="yes", ENROOT_CACHE_PATH=place())
        show("enroot import", found, base)
    else:
        show("enroot import", None)
    return good


if __name__ == "__main__":
    sys.exit(not bench_images(1))
