# Copyright the penroot authors.
#
# SPDX-License-Identifier: Apache-2.0

import os

from spack_repo.builtin.build_systems.generic import Package

from spack.package import *


class Penroot(Package):
    """Unprivileged containers for Slurm clusters, from Docker images: the commands of NVIDIA enroot
    and the srun options of NVIDIA pyxis. This is the relocatable archive: it includes its
    Python modules, its programs, and a plugin for each Slurm."""

    homepage = "https://penroot.invalid"
    url = f"file://{os.getcwd()}/penroot-@VERSION@-x86_64.tar.xz"
    manual_download = True

    license("Apache-2.0", checked_by="penroot")

    version("@VERSION@", sha256="@SHA256@")

    requires("platform=linux", msg="penroot needs Linux namespaces")
    requires("target=x86_64:", msg="the archive is for x86_64; on other machines use: make install")

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
