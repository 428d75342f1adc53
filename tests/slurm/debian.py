"""A stand-in for the image debian:12 of Docker Hub, with the programs that pages of docs/ use."""

from __future__ import annotations

import gzip
import hashlib
import json
from pathlib import Path

from tests.images import entry, tar
from tests.slurm.lab import Lab

# The lab cannot reach Debian's mirrors: this script replaces apt-get, and installs a fake git.
APT = b"""#!/bin/sh
[ "$1" != install ] || printf '#!/bin/sh\\necho git version 2.39.5\\n' > /usr/bin/git
[ "$1" != install ] || exec chmod 755 /usr/bin/git
"""


def push(lab: Lab) -> None:
    """Add the fake apt-get to the smallest image of the lab, and push it to the lab's registry."""
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
