# Copyright the penroot authors.
#
# SPDX-License-Identifier: Apache-2.0

import os
import platform

from spack_repo.builtin.build_systems.generic import Package

from spack.package import *


# The checksum of each machine's archive.
CHECKSUMS = {
    # @CHECKSUMS@
}
ARCHIVE = f"penroot-@VERSION@-{platform.machine()}.tar.xz"


class Penroot(Package):
    """Unprivileged containers for Slurm clusters, from Docker images: the commands of NVIDIA enroot
    and the srun options of NVIDIA pyxis. This is the relocatable archive: the archive includes all Python modules and
    programs, and a plugin for each Slurm."""

    homepage = "https://penroot.invalid"
    url = f"file://{os.getcwd()}/{ARCHIVE}"
    manual_download = True

    license("Apache-2.0", checked_by="penroot")

    if ARCHIVE in CHECKSUMS:
        version("@VERSION@", sha256=CHECKSUMS[ARCHIVE])

    requires("platform=linux", msg="penroot needs Linux namespaces")
    requires(
        "target=x86_64:",
        "target=aarch64:",
        policy="one_of",
        msg="the archives are for x86_64 and aarch64; on other machines use: make install",
    )

    # To read and write image files.
    depends_on("squashfuse", type="run")
    depends_on("squashfs", type="run")

    def install(self, spec, prefix):
        install_tree(".", prefix)

    @run_after("install")
    def choose_plugin(self):
        """Choose the plugin for this machine's Slurm, if there is one."""
        Executable(join_path(self.prefix.bin, "pyxis-py"))("choose")

    @run_after("install")
    @on_package_attributes(run_tests=True)
    def check_install(self):
        Executable(join_path(self.prefix.bin, "penroot"))("info")
