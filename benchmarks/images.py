"""What images cost: first use, one layer changed, stored; next to the plain tools.

Images are made of what is on this machine and pushed to a registry on loopback. Seconds
are wall time of one run each, page cache warm; CPU is that of all processes;
memory is the greatest sum of anonymous memory that all processes had at one moment.
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

from tests.images import Image, Layer, busybox, entry, tar
from tests.kernel.conftest import PREFIX, UID, User
from tests.kernel.registry import Server, serve

PLAIN = pathlib.Path(__file__).with_name("plain.py")
# Where layers come from: what a distribution and a wheel have, small files and large ones.
LAYERS = {
    "4 layers": (("/usr/lib/python3.11", "/usr/lib/python3"), ("/usr/bin",), ("/usr/include", "/usr/sbin")),
    "large": (
        ("/usr/lib/x86_64-linux-gnu",),
        ("/usr/share",),
        ("/usr/lib/python3.11", "/usr/lib/python3"),
        ("/usr/bin", "/usr/sbin"),
        ("/usr/lib/gcc", "/usr/include", "/usr/local/lib", "/usr/lib/llvm-14"),
    ),
}


@dataclass
class Cost:
    """What one run took."""

    seconds: float
    cpu: float
    memory: int
    fetched: int

    def __str__(self) -> str:
        return f"{self.seconds:9.2f} {self.cpu:8.2f} {self.memory / 1e6:9.0f} {self.fetched / 1e6:9.1f}"


def compressed(paths: Sequence[str]) -> tuple[Layer, int]:
    """A layer of some directories of this machine, gzip."""
    from isal import igzip

    there = [path.lstrip("/") for path in paths if os.path.isdir(path)]
    command = ["tar", "-C", "/", "--sort=name", "--exclude=*.sock", "-cf", "-", *there]
    data = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    return Layer(data, blob=igzip.compress(data, 1)), len(data)


def anonymous(uid: int) -> int:
    """Bytes of anonymous memory that all processes of a user have now."""
    total = 0
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{pid}").st_uid != uid:
                continue
            with open(f"/proc/{pid}/status") as f:
                found = re.search(r"RssAnon:\s+(\d+) kB", f.read())
        except OSError:
            continue
        total += int(found[1]) * 1024 if found else 0
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
    return Cost(took, used.ru_utime + used.ru_stime, peak, sent(server) - before)


def show(name: str, cost: Cost | None, against: Cost | None = None, budget: float = 0) -> bool:
    """Print a row; False where it took longer than ``budget`` times what ``against`` took."""
    if cost is None:
        print(f"{name:48} {'MISSING':>9}")
        return True
    verdict, good = "", True
    if against is not None:
        ratio = cost.seconds / against.seconds
        good = not budget or ratio <= budget
        verdict = f"  {ratio:6.2f}x" + (f" <= {budget:g}x {'ok' if good else 'TOO SLOW'}" if budget else "")
    print(f"{name:48} {cost}{verdict}", flush=True)
    return good


@contextmanager
def place() -> Iterator[tuple[User, Server]]:
    home = pathlib.Path(tempfile.mkdtemp(prefix="penroot-bench-", dir="/var/tmp"))
    home.chmod(0o755)
    user = User(home)
    user.own(home)
    try:
        with serve(home / "registry") as server:
            yield user, server
    finally:
        shutil.rmtree(home)


def bench_images(rounds: int) -> bool:
    """First use of an image, one layer changed, stored; to a running container and to a file."""
    good = True
    base = busybox().layers[0]
    with place() as (user, server):
        for name in ("small", *LAYERS):
            made = [compressed(paths)[0] for paths in LAYERS.get(name, ())]
            changed = [Layer(tar([entry("changed", os.urandom(1 << 20) * 10)])) for _ in range(2)]
            images = [Image([base, *made, change], busybox().settings) for change in changed]
            for tag, image in enumerate(images):
                server.pusher.image("bench/it", str(tag), image)
            size = sum(len(layer.tar) for layer in images[0].layers)
            packed = sum(len(layer.blob) for layer in images[0].layers)
            count = len(images[0].layers)
            del made, changed, images
            print(f"\n{name}: {count} layers, {size / 1e6:.0f} MB, {packed / 1e6:.0f} MB compressed")
            print(f"{'':48} {'seconds':>9} {'CPU':>8} {'MB anon':>9} {'MB net':>9}")
            good &= rows(user, server, f"{server.host}/bench/it", slow=rounds > 1 or name != "large")
    return good


def rows(user: User, server: Server, image: str, *, slow: bool) -> bool:
    """The table of one image, whose tag 1 differs from 0 in the last layer; with ``slow`` the slow tools too."""
    penroot = f"{PREFIX}/bin/penroot"
    cache, out = user.home / "cache", user.home / "out"

    def fresh() -> None:
        for path in (cache, out):
            if path.exists():
                shutil.rmtree(path)
        out.mkdir()
        user.own(out)

    fresh()
    arguments = (f"http://{server.host}", "bench/it", "0", str(out))
    path = {"PYTHONPATH": f"{PREFIX}/lib/penroot"}  # for isal
    plain = measure(user, server, "/usr/bin/python3", str(PLAIN), *arguments, **path)
    show("fetch, isal | tar -x, 2 at a time", plain)
    fresh()
    cold = measure(user, server, penroot, "start", f"docker://{image}:0", "true")
    large = plain.seconds > 1  # below it the start of Python is what is measured
    good = show("penroot start REF, cold", cold, plain, 1.3 if large else 0)
    good &= show("  stored", measure(user, server, penroot, "start", f"docker://{image}:0", "true"), plain)
    good &= show("  last layer changed", measure(user, server, penroot, "start", f"docker://{image}:1", "true"), plain)
    if cold.memory > 300e6:
        good = False
        print("  more than 300 MB of anonymous memory: TOO MUCH")
    fresh()
    file = str(out / "image.sqsh")
    show("penroot import -o, cold", measure(user, server, penroot, "import", "-o", file, f"docker://{image}:0"), plain)
    fresh()
    if not slow:
        print("umoci, mksquashfs, enroot: with --rounds 2")
        return good
    if shutil.which("umoci") and shutil.which("skopeo"):
        layout = f"oci:{out}/layout:x"
        script = (
            f"skopeo --insecure-policy copy -q --src-tls-verify=false docker://{image}:0 {layout} && "
            f"umoci --log=error unpack --rootless --image {out}/layout:x {out}/bundle"
        )
        unpacked = measure(user, server, "sh", "-c", script)
        show("skopeo copy, umoci unpack --rootless", unpacked, plain)
        squash = ("mksquashfs", f"{out}/bundle/rootfs", file, "-quiet", "-no-progress", "-comp", "zstd",
                  "-Xcompression-level", "1", "-b", "256K", "-mem", "512M")  # fmt: skip
        show("  then mksquashfs", measure(user, server, *squash), plain)
    else:
        show("skopeo copy, umoci unpack --rootless", None)
    if shutil.which("enroot"):
        fresh()
        environ = {"ENROOT_ALLOW_HTTP": "yes"}
        reference = image.replace("/", "#", 1)
        show("enroot import", measure(user, server, "enroot", "import", "-o", file, f"docker://{reference}:0",
                                      **environ), plain)  # fmt: skip
    else:
        show("enroot import", None)
    fresh()
    return good


if __name__ == "__main__":
    sys.exit(not bench_images(1))
