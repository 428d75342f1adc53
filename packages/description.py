"""The table of packages. From it, deb.py writes the input of dpkg-deb(1), and rpm.py the input of rpmbuild(8)."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass

from packages.vendored import PYTHONS

MAINTAINER = "penroot maintainers <maintainers@penroot.invalid>"
LICENCE = "Apache-2.0"

LIBRARY = "usr/lib/penroot-package"  # scripts/packaged makes a version from these files: /usr/lib/penroot-versions/…
SETUP = "/usr/libexec/penroot/packaged"


@dataclass(frozen=True)
class Package:
    """One package. ``files`` are patterns of fnmatch(3) without a leading slash.

    The first package of PACKAGES with a matching pattern owns a file.

    ``setup_arguments`` are the arguments of scripts/packaged after an installation, upgrade or trigger, and before a
    removal. ``watches`` are files of other packages: when one of them is installed or replaced (for dpkg, also when it
    is removed), a trigger runs scripts/packaged.
    """

    name: str
    summary: str
    text: str
    files: tuple[str, ...]
    deb: dict[str, str]
    rpm: dict[str, str]
    native: bool = True
    setup_arguments: str = ""
    watches: tuple[str, ...] = ()

    def owns(self, path: str) -> bool:
        return any(fnmatch.fnmatchcase(path, pattern) for pattern in self.files)


PLUGIN = Package(
    name="penroot-slurm-plugin",
    summary="container options for srun, sbatch and salloc",
    text="""\
The SPANK plugin of penroot, compiled for each release of Slurm. The package
chooses the plugin for the installed Slurm, and again when Slurm is upgraded.
It adds the options of NVIDIA pyxis, such as --container-image, to srun, sbatch
and salloc. Run `pyxis-py install` to have Slurm load it.""",
    files=(f"{LIBRARY}/plugins/*", f"{LIBRARY}/PLUGINS", "usr/share/man/man7/penroot-srun.7*"),
    deb={"Depends": "penroot (= {version}), libc6 (>= 2.34)", "Enhances": "slurmd, slurm-client"},
    rpm={"Requires": "penroot = {version}"},
    setup_arguments="plugin",
    watches=("/usr/bin/srun", "/usr/sbin/slurmd", "/usr/sbin/slurmd-wlm"),  # on Debian, slurmd is a link to slurmd-wlm
)
SIGNATURES = Package(
    name="penroot-signatures",
    summary="image signatures and image transfer between nodes, for penroot",
    text="""\
The Python library cryptography. penroot needs the library to verify image
signatures, if a policy of the site requires them, and to authenticate the
nodes of a step before an exchange of images.""",
    files=(f"{LIBRARY}/cryptography/*",),
    deb={"Depends": "penroot (= {version}), libc6 (>= 2.34)"},
    rpm={"Requires": "penroot = {version}"},
    setup_arguments="extra cryptography",
)
SSH = Package(
    name="penroot-ssh",
    summary="ssh into the containers of running jobs, for penroot",
    text="""\
The Python library asyncssh, to reach the containers of running jobs with ssh,
sftp and other tools over ssh.""",
    files=(f"{LIBRARY}/asyncssh/*", f"{LIBRARY}/typing_extensions.py"),
    deb={"Depends": "penroot (= {version}), penroot-signatures (= {version})"},
    rpm={"Requires": "penroot = {version}, penroot-signatures = {version}"},
    native=False,
    setup_arguments="extra asyncssh",
)
NAMES = Package(
    name="penroot-enroot-names",
    summary="links to penroot under the names of enroot's programs",
    text="""\
Scripts that call enroot, enroot-mount and others run penroot through these
links. penroot has the same commands and options.""",
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
Python core over small C shims. The package includes the Python libraries that
it needs, for Python 3.10 to 3.14.""",
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
    setup_arguments="library",
    watches=("/usr/bin/python3", "/etc/apparmor.d/abi/4.0"),
)
PACKAGES = (PLUGIN, SIGNATURES, SSH, NAMES, MAIN)  # owner() tries them in this order


def owner(path: str) -> Package:
    return next(package for package in PACKAGES if package.owns(path))
