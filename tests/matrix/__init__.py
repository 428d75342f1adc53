"""The tests on each release of Debian, and so on each Slurm that they have, from one command.

    make matrix [RELEASES="trixie forky"] [TIERS="slurm demo"] [TESTS="tests/slurm/test_steps.py"] [SLURM_SOURCE=DIR]
    make matrix-vm [RELEASES=trixie] [TIERS="slurm systemd"] [TESTS=…]
    make matrix ARCH=arm64; make matrix-vm ARCH=arm64

As root. `roots.py` makes a directory with the release by debootstrap(8), once; `enter` runs commands there in
namespaces of their own; `known.py` names the failures that are not ours, each with where that is said; `report.py`
counts. What is tested is a copy of the working tree. The directories are kept in $PENROOT_MATRIX
(/var/cache/penroot-matrix): remove one to have it made anew. With SLURM_SOURCE, Slurm is built from that source and
stands where the release's own would. `vm.py` makes a virtual machine of a release, `foreign.py` emulates another
architecture.
"""

from __future__ import annotations
