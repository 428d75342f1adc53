"""Run the tests on each release of Debian, with the release's Slurm, by one command.

    make matrix [RELEASES="trixie forky"] [TIERS="slurm demo"] [TESTS="tests/slurm/test_steps.py"] [SLURM_SOURCE=DIR]
    make matrix-vm [RELEASES=trixie] [TIERS="slurm systemd"] [TESTS=…]
    make matrix ARCH=arm64; make matrix-vm ARCH=arm64

Run as root. `roots.py` makes a directory with the release by debootstrap(8), once; `enter` runs commands there in
separate namespaces; `known.py` lists known failures of other software with their sources; `report.py` counts the
results. The tests run in a copy of the working tree. The directories are kept in $PENROOT_MATRIX
(/var/cache/penroot-matrix): remove a directory to make it again. With SLURM_SOURCE, a Slurm built from that source
replaces the release's Slurm. `vm.py` makes a virtual machine of a release, `foreign.py` emulates another architecture.
"""

from __future__ import annotations
