"""Make the Debians that the tests copy, while the packages are built: python -m tests.packages."""

from __future__ import annotations

import sys

from tests.matrix.roots import MatrixError
from tests.packages.conftest import PLUGINS, base_of

if __name__ == "__main__":
    try:
        for release in PLUGINS:
            base_of(release, slurm=True)
    except MatrixError as e:
        sys.exit(f"packages: {e}")
