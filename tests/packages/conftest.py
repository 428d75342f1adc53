"""Packages of a release, and Debians without compiler and pip to install them in."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from packages import place
from packages.__main__ import RELEASE
from tests.matrix import roots
from tests.slurm.lab import images

PROJECT = Path(__file__).parents[2]
# Slurm, and other packages for the lab.
SLURM = ("slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins", "munge", "docker-registry", "openssl")
# Slurm's PMIx: the package's name ends in t64 since trixie; bookworm's Slurm opens the library by its -dev name.
TOOLS = ("'libpmix2*'", "libpmix-dev", "procps", "util-linux-extra", "busybox-static", "git")
# Slurm's release in each Debian.
PLUGINS = {"bookworm": "22.05", "trixie": "24.11"}
# Programs for image files.
NEEDS = "fuse3 squashfs-tools squashfuse"
# Files of apt, dpkg and the tests.
KEPT = ("/var/lib/dpkg", "/var/lib/apt", "/var/cache", "/var/log", "/tmp", "/root", "/srv", "/usr/src")
CHECKOUT = "/usr/src/penroot"
# Use penroot, and report failures, until /srv/stop exists.
USED = "while [ ! -e /srv/stop ]; do penroot version 2>&1; [ -e /usr/lib/penroot/spank_pyxis.so ] || echo none; done"


@dataclass(frozen=True)
class Machine:
    """A fresh Debian in a directory."""

    release: str
    path: Path

    def run(self, script: str, *, check: bool = True, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run a shell script there as root, in separate namespaces."""
        root = roots.Root(self.release, self.path, environ={"DEBIAN_FRONTEND": "noninteractive", **environ})
        command = root.command("sh", "-ec", script)
        done = subprocess.run(
            command, capture_output=True, text=True, stdin=subprocess.DEVNULL, env={**os.environ, "OVER": ""}
        )
        assert not check or done.returncode == 0, f"{script}\n{done.stdout}{done.stderr}"
        return done

    def files(self) -> dict[str, str]:
        """Map each file to "file", link to its target, and directory to "". Leave out files of apt and dpkg."""
        found = {}
        for directory, names, files in os.walk(self.path):
            for name in (*names, *files):
                path = Path(directory, name)
                inside = f"/{path.relative_to(self.path)}"
                if not inside.startswith(KEPT):
                    found[inside] = os.readlink(path) if path.is_symlink() else "" if path.is_dir() else "file"
        return found

    def put(self, file: Path) -> str:
        """Copy a file to the machine. Return its path there."""
        (self.path / "srv").mkdir(exist_ok=True)
        shutil.copy(file, self.path / "srv")
        return f"/srv/{file.name}"


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build all files of a release once for the tests, and print their sizes."""
    if given := os.environ.get("PENROOT_PACKAGES_MADE"):
        return Path(given).resolve()
    to = tmp_path_factory.mktemp("packages")
    print(make_packages(to))
    return to


def make_packages(to: Path, **environ: str) -> str:
    """Build all kinds. Return the printed sizes."""
    command = [sys.executable, "-m", "packages", *RELEASE, "--output", to]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, env={**os.environ, **environ})
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextlib.contextmanager
def machine(release: str, name: str, *, slurm: bool) -> Iterator[Machine]:
    """Copy a Debian, with Debian's Slurm if ``slurm``."""
    base = base_of(release, slurm=slurm)
    path = place.CACHE / f"machine-{name}-{os.getpid()}"
    shutil.rmtree(path, ignore_errors=True)
    subprocess.run(["cp", "-a", "--reflink=auto", base, path], check=True)
    roots.settle(path)
    try:
        yield Machine(release, path)
    finally:
        shutil.rmtree(path)


def base_of(release: str, *, slurm: bool) -> Path:
    """Make a directory with a Debian release by debootstrap(8), and add Slurm by apt(8) if ``slurm``."""
    (place.CACHE / "roots").mkdir(parents=True, exist_ok=True)
    with open(place.CACHE / f"{release}.lock", "w") as lock:  # tests of another checkout may run at the same time
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _made(release, place.CACHE / "roots" / release, slurm)


def _made(release: str, fresh: Path, slurm: bool) -> Path:
    log = place.CACHE / f"{release}.log"
    if not fresh.exists():
        roots.bootstrap(release, fresh, ("ca-certificates",), log)
    if not slurm:
        return fresh
    path = fresh.with_name(f"{release}-slurm")
    if not path.exists():
        new = path.with_name(f"{path.name}.new")
        shutil.rmtree(new, ignore_errors=True)
        subprocess.run(["cp", "-a", fresh, new], check=True)
        roots.settle(new)
        (new / "usr/sbin/policy-rc.d").write_text("#!/bin/sh\nexit 101\n")
        (new / "usr/sbin/policy-rc.d").chmod(0o755)
        install = f"apt-get -qq update; apt-get -qq install --yes --no-install-recommends {' '.join(SLURM + TOOLS)}"
        Machine(release, new).run(install)
        new.rename(path)
    return path


def bring_lab(machine: Machine) -> dict[str, str]:
    """Copy the lab, its images and Python modules to a machine without network. Return the variables with the paths."""
    roots.copy_checkout(machine.path / CHECKOUT[1:])
    cache = "/var/cache/penroot-lab"
    subprocess.run(["cp", "-al", Path(images.build()), machine.path / "srv/images"], check=True)
    (machine.path / cache[1:]).mkdir(parents=True)
    (machine.path / "srv/images").rename(machine.path / cache[1:] / Path(images.storage()).name)
    (site,) = (PROJECT / ".venv/lib").glob("python3*/site-packages/pyroute2")
    shutil.copytree(site, machine.path / "srv/python/pyroute2")
    lab = f"/srv/lab-{machine.path.name}"
    return {"PYTHONPATH": "/srv/python", "PENROOT_LAB": lab, "PENROOT_LAB_CACHE": cache, "PENROOT_PREFIX": "/usr"}


def demo(machine: Machine, environ: dict[str, str]) -> None:
    """Run the tour of make demo on the machine."""
    shown = machine.run(f"cd {CHECKOUT}; python3 -B examples/demo.py", **environ).stdout
    assert "sum 6" in shown
    assert "No mount, process, cgroup or file is left on the nodes." in shown
