"""Compare the first use of a large image through srun on a cluster node with plain tools in the same kind of step."""

from __future__ import annotations

import contextlib
import pathlib
import shutil
import subprocess
import time
from collections.abc import Iterator

from benchmarks.images import PLAIN, images_of
from benchmarks.tables import PREFIX, judge
from tests.installation import LIBRARY
from tests.kernel.registry import Server, serve
from tests.slurm.lab import Lab
from tests.slurm.lab.cluster import end

NODE = "n1"
MAX_COLD_RATIO = 1.3  # the first use, relative to the plain tools
MAX_CHANGED_RATIO = 1 / 20  # the use with one changed layer, relative to the first use


def bench_first(rounds: int) -> bool:
    """Measure steps on a node that has no layer of the image, all layers, and all layers except a small one."""
    lab = Lab()
    was_up = lab.is_up()
    lab.up(2, prefix=PREFIX)
    storage = pathlib.Path(lab.root, "home/registry")  # /home/registry on the nodes
    storage.mkdir()
    try:
        with serve(storage) as server:
            packed = push(server)
        with on_node(lab, storage) as host:
            return rows(lab, host, packed, rounds)
    finally:
        shutil.rmtree(storage)
        lab.run(["rm", "-rf", "/var/tmp/bench"], node=NODE)
        if not was_up:
            lab.down()


def push(server: Server) -> int:
    """Push both tags of the large image. Return its compressed size in bytes."""
    images = images_of("large")
    for tag, image in enumerate(images):
        server.pusher.image("bench/it", str(tag), image)
    return sum(len(layer.blob) for layer in images[0].layers)


@contextlib.contextmanager
def on_node(lab: Lab, directory: pathlib.Path) -> Iterator[str]:
    """Serve the registry in ``directory`` on the node's loopback, to leave the network out of the measurement."""
    port = 5555
    lines = (directory / "config.yml").read_text().replace(str(directory), f"/home/{directory.name}").splitlines()
    lines = [line for line in lines if not line.startswith("http:")]
    config = directory / "node.yml"
    config.write_text("\n".join([*lines, f'http: {{addr: "127.0.0.1:{port}"}}']))
    command = f"exec docker-registry serve /home/{directory.name}/{config.name} >/dev/null 2>&1"
    process = lab.popen(command, user="root", node=NODE)
    ready = f"until curl -s http://127.0.0.1:{port}/v2/ >/dev/null; do sleep 0.1; done"
    lab.run(["timeout", "60", "bash", "-c", ready], node=NODE)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        end(process)


def rows(lab: Lab, host: str, packed: int, rounds: int) -> bool:
    plain, cold, stored, changed = "fetch, isal | tar -x, 2 at a time", "cold", "stored", "10 MB layer changed"
    times: dict[str, list[float]] = {}
    for number in range(rounds):
        unpacked = f"/var/tmp/bench/plain{number}"
        # Move the store instead of deleting it: see images.py.
        lab.run(f"cd /var/tmp && mkdir -p enroot-cache-$UID {unpacked} && mv enroot-cache-$UID {unpacked}", node=NODE)
        images = [[f"--container-image={host}#bench/it:{tag}", "true"] for tag in (0, 0, 1)]
        tools = [*PLAIN, f"http://{host}", "bench/it", "0", unpacked]
        for name, words in zip((plain, cold, stored, changed), (tools, *images), strict=True):
            times.setdefault(name, []).append(seconds(lab, words))
    print(f"\n{f'srun -c2 --container-image=REF true, {packed / 1e6:.0f} MB compressed':58} {'seconds':>8}")
    least = {name: min(taken) for name, taken in times.items()}
    good = True
    compared = [
        (plain, plain, None),
        (cold, plain, MAX_COLD_RATIO),
        (stored, cold, None),
        (changed, cold, MAX_CHANGED_RATIO),
    ]
    for name, other, budget in compared:
        ratio = least[name] / least[other]
        within, verdict = judge(ratio, budget)
        good &= within
        print(f"{name:58} {least[name]:8.2f} {ratio:7.3f}x of {other[:5]} {verdict}")
    return good


def seconds(lab: Lab, words: list[str]) -> float:
    """Time a step with one task on two CPUs."""
    environ = {"PYTHONPATH": LIBRARY}  # for isal
    subprocess.run(["sync"], check=True)
    started = time.perf_counter()
    lab.run(["srun", "-w", NODE, "-c2", *words], env=environ, timeout=900)
    return time.perf_counter() - started
