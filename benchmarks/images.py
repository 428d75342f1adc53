"""Compare the use of an image with plain tools: first use, use after a layer has changed, and use of a stored image.

We make images from files of this machine, and push them to a registry on loopback. Seconds are the minimum wall time of
several alternating runs with a warm page cache. CPU is the time of all processes. Memory is the peak sum of anonymous
memory of all processes except mksquashfs, which has its own limit. Disk is the written data by getrusage(2).

Runs delete nothing: for minutes after a deletion, ext4 avoids recently freed inodes, and the next command would take
several times as long (fs/ext4/ialloc.c, recently_deleted). Deletions by other processes have the same effect, so
PENROOT_BENCH_DIR can name a directory on a separate file system.
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

BENCH_DIRECTORY = os.environ.get("PENROOT_BENCH_DIR", "/var/tmp")
# The scripts of the plain tools as text: the user who runs them may have no access to this directory.
PLAIN = ("/usr/bin/python3", "-c", pathlib.Path(__file__).with_name("plain.py").read_text())
STEPS = ("bash", "-c", pathlib.Path(__file__).with_name("steps.sh").read_text(), "steps.sh")
# Directories for the layers: small and large files, as in distributions and wheels.
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
    """The cost of one run: seconds, and bytes of memory, network and disk."""

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
    """Make a gzip layer of this machine's directories. A name without a slash becomes their parent in the layer."""
    from isal import igzip

    existing = [path.lstrip("/") for path in paths if os.path.isdir(path)]
    moved = [f"--transform=s,^,{name}/,rSh" for name in paths if "/" not in name]
    command = ["tar", "-C", "/", "--sort=name", "--exclude=*.sock", *moved, "-cf", "-", *existing]
    data = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    return Layer(data, blob=igzip.compress(data, 1))


def images_of(name: str) -> list[Image]:
    """Make two images that differ in their last layer of 10 MB."""
    layers = [compressed(paths) for paths in LAYERS.get(name, ())]
    changed = [Layer(tar([entry("changed", os.urandom(1 << 20) * 10)])) for _ in range(2)]
    base = busybox()
    return [Image([*base.layers, *layers, change], base.settings) for change in changed]


def anonymous(uid: int) -> int:
    """Return the bytes of anonymous memory of a user's processes, except mksquashfs."""
    total = 0
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{pid}").st_uid != uid:
                continue
            status = pathlib.Path(f"/proc/{pid}/status").read_text()
        except OSError:
            continue
        match = re.search(r"RssAnon:\s+(\d+) kB", status)
        if match and not status.startswith("Name:\tmksquashfs\n"):
            total += int(match[1]) * 1024
    return total


def sent(server: Server) -> int:
    """Return the bytes of the blobs and manifests that the registry has sent."""
    lines = server.log.read_text().splitlines()
    return sum(int(line.split('" 20', 1)[1].split()[1]) for line in lines if '"GET /v2/' in line and '" 20' in line)


def measure(user: User, server: Server, *command: str, **environ: str) -> Cost:
    """Run a command as the user, and return its cost."""
    before, peak, ended = sent(server), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not ended.wait(0.03):
            peak = max(peak, anonymous(UID))

    watcher = threading.Thread(target=watch)
    watcher.start()
    os.sync()
    started = time.perf_counter()
    with tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups", "--", *command],
            env={**user.environ, **environ}, cwd=user.home, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=err,
        )  # fmt: skip
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - started
        ended.set()
        watcher.join()
        err.seek(0)
        if status:
            raise RuntimeError(f"{command}: {err.read().decode()}")
    return Cost(seconds, usage.ru_utime + usage.ru_stime, peak, sent(server) - before, usage.ru_oublock * 512)


def show(name: str, cost: Cost | None, against: Cost | None = None, budget: float | None = None) -> bool:
    """Print a row. Return False if the command took longer than ``budget`` times the seconds of ``against``."""
    if cost is None:
        print(f"{name:44} {'MISSING':>8}")
        return True
    comparison, good = "", True
    if against is not None:
        ratio = cost.seconds / against.seconds
        good, verdict = judge(ratio, budget)
        comparison = f"  {ratio:6.2f}x {verdict}"
    print(f"{name:44} {cost}{comparison}", flush=True)
    return good


@contextmanager
def user_and_registry() -> Iterator[tuple[User, Server]]:
    home = pathlib.Path(tempfile.mkdtemp(prefix="penroot-bench-", dir=BENCH_DIRECTORY))
    home.chmod(0o755)
    user = User(home)
    user.own(home)
    try:
        with serve(home / "registry") as server:
            yield user, server
    finally:
        shutil.rmtree(home)


def bench_images(rounds: int, names: Sequence[str] = ("small", *LAYERS)) -> bool:
    """Measure the first use, the use with one changed layer, and the use of a stored image.

    The result of a use is a running container or a file.
    """
    good = True
    for name in names:
        with user_and_registry() as (user, server):
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
    """Print the table of one image. Tags 0 and 1 differ in the last layer. Budgets apply if ``judged``."""
    penroot = f"{PREFIX}/bin/penroot"
    number = 0

    def new_directory() -> str:
        nonlocal number
        number += 1
        path = user.home / str(number)
        path.mkdir()
        user.own(path)
        return str(path)

    def plain() -> Cost:
        path = {"PYTHONPATH": LIBRARY}  # for isal
        arguments = (f"http://{server.host}", "bench/it", "0", new_directory())
        return measure(user, server, *PLAIN, *arguments, **path)

    def start(cache: str, tag: int) -> Cost:
        command = (penroot, "start", f"docker://{image}:{tag}", "true")
        return measure(user, server, *command, ENROOT_CACHE_PATH=cache)

    def import_(cache: str, tag: int) -> Cost:
        command = (penroot, "import", "-o", f"{new_directory()}/image.sqsh", f"docker://{image}:{tag}")
        return measure(user, server, *command, ENROOT_CACHE_PATH=cache)

    def steps_of_enroot() -> Cost:
        work = new_directory()
        helpers = f"{LIBRARY}/libexec"
        return measure(user, server, *STEPS, f"http://{server.host}", "bench/it", "0", work, helpers)

    turns: dict[str, list[Cost]] = {}
    for _ in range(rounds):
        cache, other = new_directory(), new_directory()
        turn = {"plain": plain()}
        turn |= {"cold": start(cache, 0), "stored": start(cache, 0), "changed": start(cache, 1)}
        turn |= {"file": import_(other, 0), "file stored": import_(other, 0), "file changed": import_(other, 1)}
        turn["steps"] = steps_of_enroot()
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
        out = new_directory()
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
        command = ("enroot", "import", "-o", f"{new_directory()}/image.sqsh", f"docker://{reference}:0")
        environ = {"ENROOT_ALLOW_HTTP": "yes", "ENROOT_CACHE_PATH": new_directory()}
        show("enroot import", measure(user, server, *command, **environ), base)
    else:
        show("enroot import", None)
    return good


if __name__ == "__main__":
    sys.exit(not bench_images(1))
