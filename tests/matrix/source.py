"""Slurm built from a user's source in a root, where it takes precedence over the release's Slurm."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from .roots import MatrixError, Root

# Packages for Slurm's configure, and for the lab: munge, cgroup/v2, mpi/pmix.
PACKAGES = "autoconf automake libtool pkgconf bzip2 libmunge-dev libdbus-1-dev libhwloc-dev libpmix-dev"
OPTIONS = "--prefix=/usr/local --sysconfdir=/etc/slurm --disable-slurmrestd --without-rdkafka --with-pmix"
BUILD = f"""\
set -e
apt-get -qq update
DEBIAN_FRONTEND=noninteractive apt-get -qq install --yes --no-install-recommends {PACKAGES}
cd {{built}}
test -e config.status || ./configure --quiet {OPTIONS} CFLAGS=-O1
rm -rf {{installed}}
# Without the manual and contribs/.
nice make --quiet -j"$(nproc)" -C src
make --quiet -C src install DESTDIR={{installed}}
make --quiet install-pkgincludeHEADERS DESTDIR={{installed}}
"""


def built(root: Root, source: str, log: Path, say: Callable[[str], None]) -> Root:
    """Return the root with this Slurm as /usr/local. A rebuild compiles changed files only."""
    if not os.path.exists(f"{source}/META"):
        raise MatrixError(f"SLURM_SOURCE={source}: not a source of Slurm: it has no file META")
    key = hashlib.sha256(os.path.realpath(source).encode()).hexdigest()[:8]
    build, installed = f"/usr/src/slurm-{key}", f"/opt/slurm-{key}"
    say(f"{root.release}: building {source}, see {log}")
    # Copy only newer files, so that make(1) compiles only these. Copy symlinks as symlinks.
    subprocess.run(["cp", "-a", "--update", f"{source}/.", f"{root.path}{build}"], check=True)
    root.must(BUILD.format(built=build, installed=installed), log)
    root = replace(root, over=f"{root.path}{installed}/usr/local")
    root.must("ldconfig", log)
    return root
