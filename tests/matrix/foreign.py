"""Another architecture than this machine's: qemu-user(1) runs its programs; penroot comes from packages made here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from .roots import PROJECT, MatrixError, Root, output

# By Debian's name, that of uname(2).
MACHINES = {"arm64": "aarch64"}
BINFMT = Path("/proc/sys/fs/binfmt_misc")
PACKAGES = "/srv/packages"
# Without --reinstall, packages of the same version as the last ones stay.
OPTIONS = "-qq --yes --reinstall --allow-downgrades --no-install-recommends"
INSTALL = f"DEBIAN_FRONTEND=noninteractive apt-get install {OPTIONS} {PACKAGES}/*.deb && make .venv/done"


def emulate(arch: str) -> None:
    """Have the kernel run programs of ``arch`` in qemu-user(1). Raises MatrixError."""
    emulator = f"qemu-{MACHINES[arch]}"
    settings = Path(f"/usr/lib/binfmt.d/{emulator}.conf")
    if not settings.exists():
        raise MatrixError(f"not installed: {emulator}: apt-get install qemu-user-static")
    if not os.path.exists(BINFMT / "register"):
        output("mount", "-t", "binfmt_misc", "binfmt_misc", str(BINFMT))
    if not os.path.exists(BINFMT / emulator):
        (BINFMT / "register").write_text(settings.read_text())


def installed(root: Root, arch: str, log: Path, say: Callable[[str], None]) -> Root:
    """Install packages of the working tree for ``arch``, which a cross compiler makes. Raises MatrixError."""
    say(f"{root.release}: making and installing packages")
    to = Path(f"{root.path}{PACKAGES}")
    shutil.rmtree(to, ignore_errors=True)
    command = [sys.executable, "-m", "packages", "deb", "--output", str(to)]
    environ = {**os.environ, "ARCH": arch}
    with log.open("ab") as file:
        done = subprocess.run(command, cwd=PROJECT, env=environ, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
    if done.returncode != 0:
        raise MatrixError(f"ARCH={arch} {' '.join(command)}: failed; its output is in {log}")
    root.must(INSTALL, log)
    return replace(root, environ={**root.environ, "PENROOT_PREFIX": "/usr"})
