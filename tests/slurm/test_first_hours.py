"""Pages of examples, a first hour and one on errors: each command, in its order, prints what stands below it."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs import ROOT
from tests.docs.console import examples
from tests.images import entry, tar
from tests.installation import LIBRARY
from tests.slurm.lab import Lab
from tests.slurm.steps import assert_nothing_left

# Debian's mirrors are not in the lab: its git is made by what stands for apt-get.
APT = b"""#!/bin/sh
[ "$1" != install ] || printf '#!/bin/sh\\necho git version 2.39.5\\n' > /usr/bin/git
[ "$1" != install ] || exec chmod 755 /usr/bin/git
"""


@pytest.fixture(scope="module")
def debian(lab: Lab) -> None:
    """The image debian:12 of Docker Hub, as far as the pages need it: the smallest of the lab, and apt-get."""
    copy = ["skopeo", "--insecure-policy", "copy", "-q"]
    lab.run([*copy, "docker://registry.lab/minimal:docker", "dir:debian"])
    place = Path(lab.root, "home/alice/debian")
    manifest = json.loads((place / "manifest.json").read_text())
    config = json.loads((place / manifest["config"]["digest"].partition(":")[2]).read_text())

    def put(data: bytes) -> dict[str, object]:
        digest = hashlib.sha256(data).hexdigest()
        (place / digest).write_bytes(data)
        return {"digest": f"sha256:{digest}", "size": len(data)}

    layer = tar([entry("usr/bin/apt-get", APT, mode=0o755)])
    manifest["layers"].append({**manifest["layers"][0], **put(gzip.compress(layer, mtime=0))})
    config["rootfs"]["diff_ids"].append(f"sha256:{hashlib.sha256(layer).hexdigest()}")
    manifest["config"].update(put(json.dumps(config).encode()))
    (place / "manifest.json").write_text(json.dumps(manifest))
    lab.run([*copy, "dir:debian", "docker://registry.lab/library/debian:12"])
    lab.run(["rm", "-r", "debian"])


# What a page says, and what the lab has in its place.
PLACES = {
    "/usr/lib/penroot": LIBRARY,
    "/local/": "/var/tmp/",
    "/scratch": "/media",
    "registry.example.org": "registry.lab",
}
WHO = {"$": {"user": "alice"}, "#": {"user": "root", "node": "n1"}}


def follow(lab: Lab, page: str) -> None:
    """Type all that a page shows. Whether a job has to wait for the node that the last one leaves is left out."""
    for example in examples(ROOT / "docs" / page):
        command = f"exec 2>&1\n{example.command}"
        for there, here in PLACES.items():
            command = command.replace(there, here)
        printed = lab.run(["bash", "-c", command], check=False, **WHO[example.prompt]).stdout
        for there, here in PLACES.items():
            printed = printed.replace(here, there)
        printed = re.sub(
            "^srun: job .* (queued and waiting for|has been allocated) resources\n", "", printed, flags=re.M
        )
        assert example.fits(printed), f"{page}: {example.prompt} {example.command}\n{printed}"


@pytest.fixture
def home(lab: Lab) -> Iterator[None]:
    yield
    lab.run("rm -rf first .edf")
    lab.run("penroot remove -f box", check=False)
    assert_nothing_left(lab)


@pytest.mark.parity("a first hour for a user and for an admin")
def test_of_a_user(lab: Lab, debian: None, home: None) -> None:
    follow(lab, "tutorials/user.md")


@pytest.fixture
def site(lab: Lab) -> Iterator[None]:
    """The configuration of Slurm and of penroot is put back after the test."""
    plugin = Path(lab.root, "etc/slurm/plugstack.conf.d/pyxis.conf")
    line = plugin.read_text().strip()
    yield
    lab.install_plugin(line)
    for name in ("penroot.yaml", "registries.conf", "environ.d", "mounts.d"):
        lab.run(["rm", "-rf", f"/etc/enroot/{name}"], user="root")
    for node in lab.nodes:
        # Of penroot.yaml what was parsed is kept where XDG_RUNTIME_DIR would be: the lab has no /run/user.
        kept = ("/var/tmp/enroot", "/var/log/penroot", "/tmp/penroot-2001", "/tmp/penroot-0")
        lab.run(["rm", "-rf", *kept], user="root", node=node)
        assert_nothing_left(lab, node)


@pytest.mark.clusters("Homes on NFS, a local disk in each node")
@pytest.mark.parity("a first hour for a user and for an admin")
def test_of_an_admin(lab: Lab, debian: None, site: None) -> None:
    follow(lab, "tutorials/admin.md")


def test_of_who_looks_for_an_error(lab: Lab, debian: None) -> None:
    follow(lab, "reference/troubleshooting.md")
    assert_nothing_left(lab)
