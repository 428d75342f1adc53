"""The packages, of which deb.py and rpm.py write what dpkg-deb(1) and rpmbuild(8) read: one table for both."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass

from packages.vendored import PYTHONS

MAINTAINER = "penroot maintainers <maintainers@penroot.invalid>"
LICENCE = "Apache-2.0"

LIBRARY = "usr/lib/penroot-package"  # of which scripts/packaged makes a version, /usr/lib/penroot-versions/…
SETUP = "/usr/libexec/penroot/packaged"


@dataclass(frozen=True)
class Package:
    """One package. ``files`` are patterns of fnmatch(3) without a leading slash: the first package has a file.

    ``on`` are calls of scripts/packaged: when it is installed, upgraded or triggered, and before it is removed.
    ``watches`` are files of other packages: who installs, replaces or removes one of them is a reason to call again.
    """

    name: str
    summary: str
    text: str
    files: tuple[str, ...]
    deb: dict[str, str]
    rpm: dict[str, str]
    native: bool = True
    on: str = ""
    watches: tuple[str, ...] = ()

    def owns(self, path: str) -> bool:
        return any(fnmatch.fnmatchcase(path, pattern) for pattern in self.files)


PLUGIN = Package(
    name="penroot-slurm-plugin",
    summary="container options for srun, sbatch and salloc",
    text="""\
The SPANK plugin of penroot, compiled for each release of Slurm; that of the
Slurm on the machine is taken, again whenever Slurm is upgraded. It gives srun,
sbatch and salloc the options that NVIDIA pyxis has, --container-image and
others. Slurm loads it once `pyxis-py install` has written its line.""",
    files=(f"{LIBRARY}/plugins/*", f"{LIBRARY}/PLUGINS", "usr/share/man/man7/penroot-srun.7*"),
    deb={"Depends": "penroot (= {version}), libc6 (>= 2.34)", "Enhances": "slurmd, slurm-client"},
    rpm={"Requires": "penroot = {version}"},
    on="plugin",
    watches=("/usr/bin/srun", "/usr/sbin/slurmd", "/usr/sbin/slurmd-wlm"),  # Debian has a link to the last
)
SIGNATURES = Package(
    name="penroot-signatures",
    summary="checks of image signatures, and images from node to node, for penroot",
    text="""\
The Python library cryptography, by which penroot checks signatures of images,
where a policy of the site asks for them, and by which the nodes of a step
prove to each other who they are when they give each other an image.""",
    files=(f"{LIBRARY}/cryptography/*",),
    deb={"Depends": "penroot (= {version}), libc6 (>= 2.34)"},
    rpm={"Requires": "penroot = {version}"},
    on="extra cryptography",
)
SSH = Package(
    name="penroot-ssh",
    summary="ssh into the containers of running jobs, for penroot",
    text="""\
The Python library asyncssh, by which users reach the containers of their jobs
with ssh, sftp and what is built on them.""",
    files=(f"{LIBRARY}/asyncssh/*", f"{LIBRARY}/typing_extensions.py"),
    deb={"Depends": "penroot (= {version}), penroot-signatures (= {version})"},
    rpm={"Requires": "penroot = {version}, penroot-signatures = {version}"},
    native=False,
    on="extra asyncssh",
)
NAMES = Package(
    name="penroot-enroot-names",
    summary="penroot under the names of enroot's programs",
    text="""\
Links by which scripts that call enroot, enroot-mount and others find penroot,
which has their commands and options.""",
    files=("usr/bin/enroot*", "usr/share/man/man1/enroot.1*", "usr/share/bash-completion/completions/enroot"),
    deb={"Depends": "penroot (>= {version})", "Conflicts": "enroot, enroot+caps, enroot-hardened"},
    rpm={"Requires": "penroot >= {version}", "Conflicts": "enroot, enroot+caps, enroot-hardened"},
    native=False,
)
MAIN = Package(
    name="penroot",
    summary="unprivileged containers for Slurm clusters, from Docker images",
    text="""\
Imports images from registries and runs them as containers of ordinary users,
without a daemon and without root: the commands of NVIDIA enroot, rebuilt as a
Python core over small C shims. What it needs of Python beside the standard
library is in the package, for Python 3.10 to 3.14.""",
    files=("*",),
    deb={
        "Depends": f"python3 (>= {PYTHONS[0]}), python3 (<< 3.15), libc6 (>= 2.34)",
        "Recommends": "ca-certificates, fuse3, penroot-signatures, penroot-ssh, squashfs-tools, squashfuse",
        "Suggests": "fuse-overlayfs, penroot-slurm-plugin",
    },
    rpm={
        "Requires": "libc.so.6(GLIBC_2.34)(64bit), (" + " or ".join(f"python(abi) = {each}" for each in PYTHONS) + ")",
        "Recommends": "squashfs-tools, squashfuse, fuse3, penroot-signatures, penroot-ssh",
    },
    on="library",
    watches=("/usr/bin/python3", "/etc/apparmor.d/abi/4.0"),
)
PACKAGES = (PLUGIN, SIGNATURES, SSH, NAMES, MAIN)  # in the order in which they are asked for a file


def owner(path: str) -> Package:
    return next(package for package in PACKAGES if package.owns(path))
