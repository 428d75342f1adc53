"""An import that exceeds the step's memory dies in the step's cgroup, is reported, and leaves nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.slurm.lab import Lab
from tests.slurm.steps import assert_nothing_left, sh

# An OCI layout with one layer of 150 MB, whose decompression needs a window of 128 MiB.
MAKE = """
import hashlib, json, os, subprocess, tarfile
os.makedirs("greedy/blobs/sha256")

def blob(data):
    digest = hashlib.sha256(data).hexdigest()
    with open(f"greedy/blobs/sha256/{digest}", "wb") as f:
        f.write(data)
    return {"digest": f"sha256:{digest}", "size": len(data)}

with tarfile.open("greedy/layer", "w") as tar, open("/dev/zero", "rb") as zero:
    info = tarfile.TarInfo("zero")
    info.size = 150_000_000
    tar.addfile(info, zero)
with open("greedy/layer", "rb") as f:
    diff_id = hashlib.sha256(f.read()).hexdigest()
layer = blob(subprocess.run(["zstd", "-qc1", "--long=27", "greedy/layer"], stdout=subprocess.PIPE, check=True).stdout)
os.unlink("greedy/layer")
kind = "application/vnd.oci.image."
config = blob(json.dumps({"architecture": "amd64", "os": "linux", "config": {},
                          "rootfs": {"type": "layers", "diff_ids": ["sha256:" + diff_id]}}).encode())
manifest = blob(json.dumps({"schemaVersion": 2, "mediaType": kind + "manifest.v1+json",
                            "config": {"mediaType": kind + "config.v1+json", **config},
                            "layers": [{"mediaType": kind + "layer.v1.tar+zstd", **layer}]}).encode())
with open("greedy/index.json", "w") as f:
    json.dump({"schemaVersion": 2, "manifests": [{"mediaType": kind + "manifest.v1+json", **manifest}]}, f)
with open("greedy/oci-layout", "w") as f:
    f.write('{"imageLayoutVersion": "1.0.0"}')
"""


@pytest.fixture
def image(lab: Lab) -> Iterator[str]:
    lab.run(["/usr/bin/python3", "-c", MAKE])
    yield "--container-image=oci:./greedy"
    lab.run(["rm", "-r", "greedy"])
    lab.run(["penroot", "cache", "prune"], node="n1")


@pytest.mark.parity(
    "an import that needs more memory than --mem fails with a hint",
    "if an import runs out of memory, only its step fails",
)
def test_an_import_that_exceeds_the_memory_of_the_step(lab: Lab, image: str) -> None:
    store = "find /var/tmp/enroot-*-2001 2>/dev/null | grep -v -e '/locks*' -e lock$ | sort"
    lab.run(["penroot", "cache", "prune"], node="n1")
    before = lab.run(store, node="n1").stdout
    done = lab.run(["srun", "-w", "n1", "--mem=60M", image, *sh("echo ran")], check=False)
    assert done.returncode != 0
    assert done.stdout == ""
    assert "killed" in done.stderr
    assert "--mem" in done.stderr
    assert "oom" in done.stderr.lower()  # from Slurm: the kernel has charged the memory to the step
    assert "Traceback" not in done.stderr
    assert_nothing_left(lab, "n1")
    # The next step has enough memory, and no leftovers block it.
    assert before == lab.run(store, node="n1").stdout
    out = lab.run(["srun", "-w", "n1", "--mem=800M", image, "/zero"], check=False)
    assert "Permission denied" in out.stderr  # the container has started, but its file /zero is not a program
